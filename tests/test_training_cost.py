from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator

from tests.conftest import Run
from vit2linear.bench import SOFTMAX, Job
from vit2linear.distill.tasks import SiteTask
from vit2linear.losses import Objective
from vit2linear.recipe import Rule
from vit2linear.site import sites_of
from vit2linear.training_cost import ATTENTION, FEATURE, PLAIN, SITES, TEACHER, Steps, step_mib

TINY = {"embed_dim": 48, "num_heads": 3, "depth": 3}
SIZE = 64, 64


def job(**args: object) -> Job:
    return Job("vit_tiny_patch16_224", {"relu": (Rule(),)}, {**TINY, **args}, batch_size=2)


def gradients(steps: Steps, name: str) -> dict[str, torch.Tensor]:
    """What a work leaves in the student just before it clears the gradients."""
    found: dict[str, torch.Tensor] = {}
    clear = steps.student.zero_grad

    def keep() -> None:
        found.update({k: p.grad.clone() for k, p in steps.student.named_parameters() if p.grad is not None})
        clear()

    steps.student.zero_grad = keep  # type: ignore[assignment, method-assign]
    try:
        steps[name](steps.pixels)
    finally:
        del steps.student.zero_grad
    assert all(p.grad is None for p in steps.student.parameters())
    return found


@pytest.mark.parametrize("classes", [5, 0])
def test_steps_do_the_work_that_they_are_named_after(classes: int) -> None:
    steps = Steps(job(num_classes=classes), "relu", SIZE, Accelerator(cpu=True))
    everything = {name for name, _ in steps.student.named_parameters()}
    attention = {name for name in everything if ".attn." in name}
    assert set(gradients(steps, ATTENTION)) == set(gradients(steps, SITES)) == attention
    assert set(gradients(steps, FEATURE)) == set(gradients(steps, PLAIN)) == everything
    assert gradients(steps, TEACHER) == {}
    assert all(p.grad is None and not p.requires_grad for p in steps.teacher.parameters())


@pytest.mark.parametrize(("rules", "last"), [((Rule(),), 2), ((Rule(sites="blocks.[01].attn"),), 1)])
def test_stage_attention_computes_nothing_after_the_last_converted_site(rules: tuple[Rule, ...], last: int) -> None:
    task = Job("vit_tiny_patch16_224", {"some": rules}, TINY)
    teacher, student = task.model(SOFTMAX, SIZE), task.model("some", SIZE)
    seen: list[int] = []
    for i, block in enumerate(teacher.blocks):  # type: ignore[arg-type]
        block.mlp.register_forward_hook(lambda *_, i=i: seen.append(i))
    SiteTask(teacher, student, Objective({"site_output": 1.0})).backward(
        Accelerator(cpu=True), torch.randn(2, 3, *SIZE)
    )
    assert seen == list(range(last))
    assert all(p.grad is not None for block in student.blocks[: last + 1] for p in block.attn.parameters())  # type: ignore[index]


def test_memory_of_a_step_in_a_fresh_process() -> None:
    """At the least the gradients of the attentions; not what the imports take, which is hundreds of MiB."""
    sites = sites_of(job().model("relu", SIZE)).values()
    least = sum(p.numel() for site in sites for p in site.parameters()) * 4 / 2**20
    assert least < step_mib(job(), "relu", SIZE, ATTENTION, Accelerator(cpu=True)) < 150


def test_command(cli: Run) -> None:
    args = ["bench", "--training", "--base", "vit_tiny_patch16_224", "--depth", 1, "--img-size", "32x48", "-b", 2]
    args += ["--rounds", 1, "--no-memory", "--device", "cpu"]
    done = json.loads(cli(*args, "--op", "relu,elu", "--json").stdout)
    assert done["base"] == "vit_tiny_patch16_224" and done["batch_size"] == 2 and done["device"] == "cpu"
    assert [(c["op"], c["size"], c["width"]) for c in done["costs"][::3]] == [("relu", 32, 48), ("elu", 32, 48)]
    parts = f"{TEACHER} + {SITES}"
    assert [(c["step"], c["against"]) for c in done["costs"][:3]] == [
        (ATTENTION, parts),
        (ATTENTION, PLAIN),
        (FEATURE, PLAIN),
    ]
    for cost in done["costs"]:
        assert cost["unit"] == "s" and cost["ratio"] == pytest.approx(cost["amount"] / cost["reference"])
        assert cost["amount"] > 0 and cost["reference"] > 0
    table = cli(*args).stdout
    assert PLAIN in table and parts in table
    assert "--plot" in cli(*args, "--plot", "x.png", code=2).stderr
