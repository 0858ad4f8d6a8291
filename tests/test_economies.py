"""Gradient checkpointing and torch.compile: the same gradients and losses, and models as they were afterwards."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from timm.layers import set_reentrant_ckpt, use_reentrant_ckpt
from timm.models import save_for_hf
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from tests.test_distill import pair
from vit2linear.bench import in_fresh_process
from vit2linear.distill.economies import blocks_recomputed, check_economies, economies
from vit2linear.distill.stages import TASKS
from vit2linear.distill.tasks import ModelTask, Task
from vit2linear.errors import RecipeError
from vit2linear.losses import Objective
from vit2linear.plan import make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import DistillOptions, Recipe, Rule, RunOptions, override
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

RECOMPUTED = ["vision_transformer", "eva", "beit", "swin_transformer_v2", "hiera", "vision_transformer_sam", "davit"]
SITES_ONLY = {"site_output": 1.0}
LOSSES = {"feature": 1.0, "site_output": 0.1}


def converted(module: str) -> tuple[nn.Module, nn.Module]:
    """Teacher and student of the first small model of a family."""
    name, args = families.cases(module)[0]
    source = families.build(name, **args)
    plan = make_plan(source, [Rule(drop=("all",))])
    return apply_plan(source, plan.with_operator("softmax")).eval(), apply_plan(source, plan).eval()


def gradients(task: Task, pixels: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    task.student.zero_grad()
    loss = task.backward(Accelerator(cpu=True), pixels)
    return loss, {k: p.grad.clone() for k, p in task.student.named_parameters() if p.grad is not None}


def images(model: nn.Module) -> Tensor:
    return torch.randn(2, *example_pixels(model).shape[1:], generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("module", RECOMPUTED)
def test_recomputed_blocks_have_the_same_gradients(module: str) -> None:
    teacher, student = converted(module)
    ran: list[str] = []
    for path, site in sites_of(student).items():
        site.op.register_forward_hook(lambda *_, path=path: ran.append(path))
    pixels, task = images(student), ModelTask(teacher, student, Objective(LOSSES))
    loss, wanted = gradients(task, pixels)
    once = [*ran]
    set_reentrant_ckpt(True)  # as TIMM_REENTRANT_CKPT=1 does
    try:
        with blocks_recomputed(student):
            again, found = gradients(task, pixels)
        assert use_reentrant_ckpt()
    finally:
        set_reentrant_ckpt(False)
    assert sorted(ran) == sorted(3 * once), "every site ran once more"
    assert torch.equal(loss, again) and found.keys() == wanted.keys()
    assert all(torch.equal(found[k], wanted[k]) for k in wanted)
    ran.clear()
    gradients(task, pixels)
    assert ran == once, "off again"


@pytest.mark.parametrize("stage", ["attention", "feature"])
def test_recomputed_blocks_do_not_disturb_maps(stage: str) -> None:
    found = []
    for recomputes in (False, True):
        teacher, student = pair("elu")
        weights = {"map_kl": 1.0, "map_mse": 10.0, "site_output": 1.0}
        task = TASKS[stage](teacher, student, Objective(weights))
        if recomputes:
            with blocks_recomputed(student):
                found.append(gradients(task, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
        else:
            found.append(gradients(task, torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))))
    (loss, wanted), (again, same) = found
    assert torch.equal(loss, again) and all(torch.equal(same[k], wanted[k]) for k in wanted)
    assert any(".op." not in k and "qkv" in k for k in wanted)


def test_an_architecture_that_recomputes_nothing_is_refused_before_any_work(cli: Run) -> None:
    name, args = families.cases("twins")[0]
    said = r"cannot compute blocks of Twins again\. Leave --grad-checkpointing out"
    with pytest.raises(RecipeError, match=said):
        check_economies(families.build(name, **args), RunOptions(grad_checkpointing=True), DistillOptions())
    save_for_hf(families.build(name, **args), "twins", safe_serialization=True, model_args=args)
    assert re.search(said, cli("convert", "twins", "--grad-checkpointing", "--dry-run", code=2).stderr)


def test_maps_are_not_compiled() -> None:
    options = override(Recipe(), distill__attention__losses={"map_kl": 1.0}).distill
    _, student = pair()
    with pytest.raises(RecipeError, match="the loss 'map_kl' of stage 'attention' reads routing maps inside"):
        check_economies(student, RunOptions(compile=True), options)
    check_economies(student, RunOptions(compile=True), DistillOptions())


@pytest.mark.slow
def test_convert_with_checkpointing_gives_the_same_artifact(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    args = ["convert", checkpoint, "--data", class_folders, "--distill-steps", 4, "-b", 4, "-j", 0, "--device", "cpu"]
    cli(*args, "-o", "plain")
    cli(*args, "-o", "recomputed", "--grad-checkpointing")
    plain, recomputed = (load_file(Path(name) / "model.safetensors") for name in ("plain", "recomputed"))
    assert plain.keys() == recomputed.keys() and all(torch.equal(plain[k], recomputed[k]) for k in plain)
    assert "grad_checkpointing = true" in Path("recomputed/recipe.toml").read_text()


def compiled_against_plain(recomputes: bool) -> float:
    """Largest difference of gradients, over the largest gradient, with the hooks of both stages and one more."""
    teacher, student = pair("relu")
    names = [*student.state_dict()]
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    seen: list[Any] = []
    student.blocks[1].attn.register_forward_hook(lambda *args: seen.append(args[2].shape))  # type: ignore[union-attr, index]
    worst = 0.0
    for stage, losses in (("attention", SITES_ONLY), ("feature", LOSSES)):
        task = TASKS[stage](teacher, student, Objective(losses))
        loss, wanted = gradients(task, pixels)
        seen.clear()
        with economies(teacher, student, RunOptions(grad_checkpointing=recomputes, compile=True)):
            assert [*student.state_dict()] == names and "forward" in vars(student.blocks[1].attn)  # type: ignore[union-attr, index]
            again, found = gradients(task, pixels)
            copy.deepcopy(student)  # as averaged weights are made
        assert len(seen) == (2 if recomputes and stage == "feature" else 1)
        torch.testing.assert_close(again, loss, rtol=1e-5, atol=0)
        assert found.keys() == wanted.keys()
        worst = max(worst, *(float((found[k] - g).abs().max() / g.abs().max()) for k, g in wanted.items()))
    assert not any("forward" in vars(m) for m in [*teacher.modules(), *student.modules()])
    return worst


# In processes of their own: the shape checks of the tests are no code that torch can compile.
@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_sites_have_the_same_gradients(recomputes: bool) -> None:
    assert in_fresh_process(compiled_against_plain, recomputes) < 1e-4


def convert(source: Path, images: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vit2linear", "convert", str(source), "--data", str(images), "--json", *args]
    there = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", **environment}
    command += ["--distill-steps", "6", "-b", "4", "-j", "0", "--device", "cpu"]
    return subprocess.run(command, env=there, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.slow
def test_convert_compiled_has_the_same_losses(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    runs = [("plain",), ("compiled", "--compile")]
    found = [convert(checkpoint, class_folders, "-o", str(tmp_path / name), *more) for name, *more in runs]
    plain, fast = (json.loads(done.stdout) for done in found)
    for one, other in zip(plain["stages"], fast["stages"], strict=True):
        assert [x for _, x in other["losses"]] == pytest.approx([x for _, x in one["losses"]], rel=1e-3)
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "compiled")]
    assert weights[0].keys() == weights[1].keys()


@pytest.mark.slow
def test_no_compiler_is_an_error_before_any_work(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    nothing = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = convert(checkpoint, class_folders, "--compile", "-o", str(tmp_path / "a"), **nothing)
    assert done.returncode == 2 and "error: run.compile: torch.compile does not work here: " in done.stderr
    assert "no-such-compiler" in done.stderr and not (tmp_path / "a").exists() and not (tmp_path / "a.run").exists()
