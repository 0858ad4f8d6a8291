from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vit2linear.data import Batch
from vit2linear.devices import accelerator_for
from vit2linear.distill.forward import run
from vit2linear.distill.loop import run_stage
from vit2linear.distill.optimiser import parameter_groups
from vit2linear.distill.stages import TASKS, check_stages, objective_of, split_steps
from vit2linear.distill.tasks import ModelTask, SiteTask
from vit2linear.distill.watch import IN_A_ROW, Watch
from vit2linear.errors import DistillError, NotFiniteError, RecipeError, UnknownNameError
from vit2linear.losses import LOSSES, Objective, Outputs, unexplained
from vit2linear.recipe import OPERATORS, DistillOptions, Recipe, override
from vit2linear.reporting import Progress, Reporter
from vit2linear.site import sites_of
from vit2linear.surgery import linearize

OPTIONS = DistillOptions(warmup=0.1).at_width(384)
ATTENTION_STAGE, FEATURE_STAGE = OPTIONS.attention, OPTIONS.feature


class Quiet(Reporter):
    def __init__(self) -> None:
        self.seen: list[Progress] = []

    def progress(self, progress: Progress) -> None:
        self.seen.append(progress)


def pair(op: str = "relu", **args: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 5} | args
    source = timm.create_model("vit_tiny_patch16_224", **size).eval()
    for parameter in source.parameters():  # peaked attention, so that there is something to recover
        parameter.data.mul_(2 if parameter.ndim == 2 else 1)
    for block in source.blocks:
        block.attn.qkv.weight.data[:96] *= 6
    return linearize(source, "softmax").eval(), linearize(source, op).eval()


def batches(steps: int, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    batch = torch.randn(size, 3, 32, 32, generator=generator), torch.zeros(size, dtype=torch.long)
    return [batch] * steps


def train(stage: str, teacher: nn.Module, student: nn.Module, steps: int = 30, **changes: Any) -> Quiet:
    reporter = Quiet()
    options = replace(OPTIONS, **changes)
    run_stage(stage, teacher, student, iter(batches(steps)), steps, options, Accelerator(cpu=True), reporter)
    return reporter


@pytest.mark.parametrize("op", OPERATORS.names())
@pytest.mark.parametrize("stage", ["attention", "feature"])
def test_losses_fall_and_the_teacher_stays(stage: str, op: str) -> None:
    teacher, student = pair(op)
    before = copy.deepcopy(teacher.state_dict())
    steps = 100 if op == "soft" else 30  # its kernel of distances moves slowly
    reporter = train(stage, teacher, student, steps)
    first, last = reporter.seen[0].loss, sum(p.loss for p in reporter.seen[-3:]) / 3
    if op == "softmax":
        assert first < 1e-6, "the student is the teacher"
    else:
        assert last < 0.8 * first
    assert all(torch.equal(before[k], v) for k, v in teacher.state_dict().items())
    assert not teacher.training and not student.training
    assert [p.step for p in reporter.seen] == list(range(1, steps + 1)) and reporter.seen[-1].seconds_left == 0


def test_stage_attention_trains_the_attention_and_nothing_else() -> None:
    teacher, student = pair()
    before = copy.deepcopy(student.state_dict())
    train("attention", teacher, student, 3)
    changed = {k for k, v in student.state_dict().items() if not torch.equal(before[k], v)}
    assert changed == {k for k in before if ".attn." in k}
    train("feature", teacher, student, 3)
    changed = {k for k, v in student.state_dict().items() if not torch.equal(before[k], v)}
    assert changed == set(before)


def test_stage_attention_gradients_are_those_of_replayed_sites() -> None:
    """Against the plain way: keep the teacher's inputs, then replay every site with autograd."""
    teacher, student = pair()
    x = batches(1)[0][0]
    inputs: dict[str, Tensor] = {}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, path=path: inputs.update({path: args[0]}))
        for path, m in sites_of(teacher).items()
    ]
    with torch.no_grad():
        target = run(teacher, x, sites_of(teacher))
    for hook in hooks:
        hook.remove()
    sites = sites_of(student)
    loss = torch.stack([unexplained(sites[p](inputs[p]), target.sites[p]) for p in sites]).mean()
    loss.backward()
    wanted = {k: p.grad.clone() for k, p in student.named_parameters() if p.grad is not None}
    student.zero_grad()
    mine = SiteTask(teacher, student, Objective(ATTENTION_STAGE.losses)).backward(Accelerator(cpu=True), x)
    torch.testing.assert_close(mine, loss.detach())
    for name, parameter in student.named_parameters():
        if name in wanted:
            torch.testing.assert_close(parameter.grad, wanted[name])
        else:
            assert parameter.grad is None


def test_stage_attention_sets_the_grid_from_the_teacher() -> None:
    teacher, student = pair(dynamic_img_size=True)
    SiteTask(teacher, student, Objective(ATTENTION_STAGE.losses)).backward(
        Accelerator(cpu=True), torch.randn(2, 3, 16, 48)
    )
    assert sites_of(student)["blocks.0.attn"].grid_ref.grid == (2, 6)


def test_the_same_seed_gives_the_same_weights() -> None:
    results = []
    for _ in range(2):
        teacher, student = pair()
        train("attention", teacher, student, 4)
        train("feature", teacher, student, 4)
        results.append(student.state_dict())
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


def test_parameter_groups() -> None:
    _, student = pair()
    groups = parameter_groups(student, FEATURE_STAGE)
    assert sum(p.numel() for g in groups for p in g["params"]) == sum(p.numel() for p in student.parameters())
    assert {g["weight_decay"] for g in groups if g["params"][0].ndim < 2} == {0.0}
    attention = parameter_groups(student, ATTENTION_STAGE)
    inside = sum(p.numel() for site in sites_of(student).values() for p in site.parameters())
    assert sum(p.numel() for g in attention for p in g["params"]) == inside
    with pytest.raises(DistillError, match="nothing would be trained"):
        parameter_groups(student, replace(ATTENTION_STAGE, lr=0.0, lr_new=0.0))


@pytest.mark.parametrize(
    ("total", "wanted"), [(0, (0, 0, 0)), (1, (0, 1, 0)), (10, (3, 7, 0)), (20000, (6000, 14000, 0))]
)
def test_steps_are_split_by_the_shares(total: int, wanted: tuple[int, int]) -> None:
    assert tuple(split_steps(OPTIONS, total).values()) == wanted


def test_a_loss_that_is_not_finite_names_stage_step_and_site() -> None:
    teacher, student = pair()
    student.blocks[1].attn.proj.weight.data[0, 0] = float("nan")
    with pytest.raises(NotFiniteError, match=r"stage attention, step 2 of 2: the loss at site 'blocks.1.attn' is nan"):
        train("attention", teacher, student, 2)
    many = f"stage feature, step {IN_A_ROW} of 30: the loss is nan, and nothing was finite for {IN_A_ROW} steps"
    with pytest.raises(NotFiniteError, match=many):
        train("feature", teacher, student, 30)


def test_single_steps_that_are_not_finite_change_nothing_and_are_counted() -> None:
    """The same as if their images had not been there, but for the schedule's length."""
    teacher, student = pair()
    _, other = pair()
    data = batches(6)
    bad = torch.full_like(data[0][0], float("inf")), data[0][1]
    options = replace(OPTIONS, warmup=0.0)
    reports = [
        run_stage("feature", teacher, model, iter(images), 8, options, Accelerator(cpu=True), Quiet())
        for model, images in ((student, [*data[:2], bad, *data[2:5], bad, data[5]]), (other, data))
    ]
    assert [r.skipped for r in reports] == [2, 0] and [r.steps for r in reports] == [8, 6]
    assert all(torch.equal(a, b) for a, b in zip(student.parameters(), other.parameters(), strict=True))


def test_a_loss_that_rises_warns_once() -> None:
    watch = Watch()
    said = [watch.see(loss) for loss in (*([1.0] * 10), *([5.0] * 30), *([1.0] * 50), *([9.0] * 30))]
    assert len(found := [s for s in said if s is not None]) == 1 and "the loss goes up" in found[0]
    assert Watch(lowest=1.0, smooth=1.0).see(1.9) is None


@pytest.mark.parametrize("stage", ["attention", "feature", "task"])
def test_parts_of_a_step_add_up_to_the_whole(stage: str) -> None:
    pixels, labels = batches(1)[0]
    found = []
    for parts in (1, 3):
        teacher, student = pair()
        task = TASKS[stage](teacher, student, objective_of(replace(OPTIONS, label_smoothing=0.0), stage))
        task.prepare(Accelerator(cpu=True))
        loss = task.backward(Accelerator(cpu=True), pixels, labels, parts)
        found.append([loss, *(p.grad for p in student.parameters() if p.grad is not None)])
    assert len(found[0]) > 10
    for whole, parted in zip(*found, strict=True):
        torch.testing.assert_close(parted, whole, rtol=1e-4, atol=1e-6)


def test_a_step_that_does_not_fit_into_memory_goes_through_in_parts() -> None:
    """The error is torch's own, raised where a real one comes from: inside a forward of too many images."""
    teacher, student = pair()
    refused: list[int] = []

    def small_memory(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if len(args[0]) > 3:
            refused.append(len(args[0]))
            torch.empty(2**45)

    student.blocks[0].attn.register_forward_pre_hook(small_memory)
    with pytest.raises(RuntimeError):
        small_memory(student, (torch.empty(8, 1),))
    refused.clear()
    reporter = train("feature", teacher, student, 2)
    assert refused == [8, 4] and len(reporter.seen) == 2


PLAIN = ("site_mse", "map_mse", "feature_mse")
"""Squared errors in their own units, as papers have them."""


def random_outputs() -> Outputs:
    return Outputs(
        {"a": torch.randn(2, 5, 8)},
        {"a": torch.randn(2, 3, 5, 5).softmax(-1)},
        (torch.randn(2, 5, 8), torch.randn(2, 3, 4)),
        torch.randn(2, 8),
        torch.randn(2, 3),
        torch.tensor([0, 2]),
    )


@pytest.mark.parametrize("name", LOSSES)
def test_losses_vanish_at_the_teacher_and_do_not_depend_on_its_units(name: str) -> None:
    torch.manual_seed(0)

    def scaled(o: Outputs) -> Outputs:
        assert o.pooled is not None
        tokens = tuple(100 * t for t in o.tokens)
        return replace(o, sites={p: 100 * y for p, y in o.sites.items()}, tokens=tokens, pooled=100 * o.pooled)

    student, teacher = random_outputs(), random_outputs()
    loss = Objective({name: 1.0}, label_smoothing=0.0)
    value = loss(student, teacher)
    assert value.ndim == 0 and value > 0.01
    torch.testing.assert_close(Objective({name: 3.0}, label_smoothing=0.0)(student, teacher), 3 * value)
    if name == "labels":  # it knows no teacher, and vanishes where the student is sure and right
        student.logits = torch.tensor([[50.0, 0, 0], [0, 0, 50.0]])
        assert loss(student, teacher) < 1e-6
        return
    assert loss(teacher, teacher).abs() < 1e-6
    if name not in PLAIN:
        torch.testing.assert_close(loss(scaled(student), scaled(teacher)), value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_means_over_images(name: str) -> None:
    """Half a batch on each of two processes gives the whole batch's loss."""
    torch.manual_seed(0)

    def image(o: Outputs, i: slice) -> Outputs:
        assert o.pooled is not None and o.logits is not None and o.labels is not None
        sites, maps = ({p: y[i] for p, y in x.items()} for x in (o.sites, o.maps))
        return Outputs(sites, maps, tuple(t[i] for t in o.tokens), o.pooled[i], o.logits[i], o.labels[i])

    student, teacher, loss = random_outputs(), random_outputs(), Objective({name: 1.0})
    halves = [loss(image(student, i), image(teacher, i)) for i in (slice(0, 1), slice(1, 2))]
    torch.testing.assert_close(torch.stack(halves).mean(), loss(student, teacher))


def test_losses_are_their_formulas() -> None:
    """Against torch's and plain loops."""
    torch.manual_seed(0)
    student, teacher = random_outputs(), random_outputs()
    a, b = teacher.maps["a"].double(), student.maps["a"].double()
    wanted = sum(a[i, h, q] @ (a[i, h, q] / b[i, h, q]).log() for i in range(2) for h in range(3) for q in range(5))
    torch.testing.assert_close(Objective({"map_kl": 1.0})(student, teacher).double(), wanted / 30)
    s, t = student.logits, teacher.logits
    assert s is not None and t is not None
    hard = nn.CrossEntropyLoss(label_smoothing=0.2)(s, torch.tensor([0, 2]))
    torch.testing.assert_close(Objective({"labels": 1.0}, label_smoothing=0.2)(student, teacher), hard)
    half = Objective({"labels": 1.0}, label_smoothing=0.2)(student, replace(teacher, labels=torch.tensor([0, -1])))
    torch.testing.assert_close(half, nn.CrossEntropyLoss(label_smoothing=0.2)(s[:1], torch.tensor([0])) / 2)
    soft = 9 * nn.KLDivLoss(reduction="batchmean")((s / 3).log_softmax(1), (t / 3).softmax(1))
    torch.testing.assert_close(Objective({"logits": 1.0}, temperature=3.0)(student, teacher), soft)
    cosines = [[x @ x.mT / (x.norm(dim=-1)[:, None] * x.norm(dim=-1)) for x in o.tokens[0]] for o in (student, teacher)]
    rows = [[x / x.norm(dim=-1, keepdim=True) for x in maps] for maps in cosines]
    wanted = 1 - torch.stack([(x * y).sum(-1).mean() for x, y in zip(*rows, strict=True)]).mean()
    one = replace(student, tokens=student.tokens[:1]), replace(teacher, tokens=teacher.tokens[:1])
    torch.testing.assert_close(Objective({"relational": 1.0})(*one), wanted)


@pytest.mark.parametrize(
    ("stage", "name"),
    [("attention", n) for n, known in LOSSES.items() if known.needs <= SiteTask.fields] + [("task", n) for n in LOSSES],
)
def test_every_loss_trains(stage: str, name: str) -> None:
    teacher, student = pair()
    changed = replace(OPTIONS.stages[stage], losses={name: 1.0})
    reporter = train(stage, teacher, student, 20, **{stage: changed})
    assert sum(p.loss for p in reporter.seen[-3:]) / 3 < reporter.seen[0].loss


def test_maps_are_compared_with_the_softmax_of_the_source() -> None:
    teacher, _ = pair()
    x = batches(1)[0][0]
    inputs: list[Tensor] = []
    attention = sites_of(teacher)["blocks.1.attn"]
    handle = attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        found = run(teacher, x, sites_of(teacher), maps=True).maps["blocks.1.attn"]
        handle.remove()
        q, k, _ = attention.qkv(inputs[0]).reshape(8, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(found, (q @ k.mT / 4).softmax(-1))


@pytest.mark.parametrize(
    ("stage", "losses", "op", "classes", "says"),
    [
        ("feature", {"feature": 1.0, "logit": 1.0}, "relu", 5, "Did you mean 'logits'"),
        ("attention", {"feature": 1.0}, "relu", 5, "'feature' needs pooled, tokens; possible here: map_kl"),
        ("attention", {"map_mse": 1.0}, "ttt", 5, "operator 'ttt', which has no such routing map"),
        ("attention", {"map_kl": 1.0}, "inline", 5, "operator 'inline', whose routing map can be negative"),
        ("feature", {"logits": 1.0}, "relu", 0, "no loss is left"),
        ("feature", {"labels": 1.0}, "relu", 0, "'labels' needs a class head"),
    ],
)
def test_losses_that_cannot_be_had_are_refused(
    stage: str, losses: dict[str, float], op: str, classes: int, says: str
) -> None:
    options = replace(OPTIONS, **{stage: replace(OPTIONS.stages[stage], losses=losses)})  # type: ignore[arg-type]
    with pytest.raises((UnknownNameError, RecipeError), match=says):
        check_stages(options, [OPERATORS.get(op)], classes)


def test_stage_task_learns_labels_that_the_teacher_does_not_know() -> None:
    teacher, student = pair()
    pixels = batches(1)[0][0]
    labels = (run(teacher, pixels, {}).logits.argmin(1)).detach()  # type: ignore[union-attr]
    options = replace(OPTIONS, task=replace(OPTIONS.task, losses={"labels": 1.0}))
    steps = iter([(pixels, labels)] * 60)
    run_stage("task", teacher, student, steps, 60, options, Accelerator(cpu=True), Quiet())
    assert (run(student, pixels, {}).logits.argmax(1) == labels).float().mean() > 0.9  # type: ignore[union-attr]


@pytest.mark.parametrize("noisy", [True, False])
def test_the_better_of_last_and_averaged_weights_is_kept(noisy: bool) -> None:
    """At a wild learning rate the average is better; while everything still falls steadily the last weights are."""
    teacher, student = pair()
    rate = 3e-2 if noisy else 1e-4
    stage = replace(FEATURE_STAGE, lr=rate, lr_rest=rate, lr_new=rate)
    options = replace(OPTIONS, feature=stage, ema=0.9 if noisy else 0.999, warmup=0.0)
    torch.manual_seed(2)
    data = [(torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)) for _ in range(25)]
    check = torch.randn(70, 3, 32, 32), torch.zeros(70, dtype=torch.long)
    # Cut short, before the schedule has brought the rate down.
    report = run_stage("feature", teacher, student, iter(data), 100, options, Accelerator(cpu=True), Quiet(), check)
    assert report.averaged is not None and report.averaged.kept == noisy
    with torch.no_grad():
        sites = sites_of(teacher), sites_of(student)
        mine, theirs = (run(m, check[0], s) for m, s in zip((student, teacher), sites[::-1], strict=True))
    wanted = min(report.averaged.loss, report.averaged.loss_averaged)
    assert float(Objective(stage.losses)(mine, theirs)) == pytest.approx(wanted, rel=1e-4)


def test_headless_models_have_no_logits() -> None:
    teacher, student = pair(num_classes=0)
    assert run(teacher, batches(1)[0][0], {}).logits is None
    task = ModelTask(teacher, student, Objective({"feature": 1.0, "site_output": 0.1}))
    task.prepare(Accelerator(cpu=True))
    assert task.backward(Accelerator(cpu=True), batches(1)[0][0]).isfinite()
    assert all(p.grad is not None for p in student.parameters())


def test_gradients_in_fp16_are_unscaled_once_in_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the means that accelerate takes on a GPU; a small scale, so that nothing overflows."""

    def norms(accelerator: Accelerator) -> list[float]:
        found: list[float] = []
        clip = accelerator.clip_grad_norm_
        monkeypatch.setattr(accelerator, "clip_grad_norm_", lambda *args: found.append(float(n := clip(*args))) or n)
        teacher, student = pair()
        for stage in ("attention", "feature"):
            run_stage(stage, teacher, student, iter(batches(1)), 1, OPTIONS, accelerator, Quiet())
        return found

    wanted = norms(Accelerator(cpu=True))
    accelerator = Accelerator(cpu=True)
    monkeypatch.setattr(accelerator, "scaler", torch.amp.GradScaler("cpu", init_scale=16.0))
    monkeypatch.setattr(accelerator, "native_amp", True)
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "fp16")
    assert norms(accelerator) == pytest.approx(wanted, rel=0.02)


def test_processes_are_patient_while_the_main_one_evaluates() -> None:
    accelerator = accelerator_for(override(Recipe(), run__device="cpu"))
    assert accelerator.init_handler.timeout >= timedelta(hours=1)


@pytest.mark.parametrize(("variable", "name"), [("FSDP", "FSDP"), ("DEEPSPEED", "DeepSpeed")])
def test_models_are_not_split_over_processes(variable: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``accelerate launch`` asks for it."""
    monkeypatch.setenv(f"ACCELERATE_USE_{variable}", "true")
    with pytest.raises(RecipeError, match=rf"asks for {name}, which splits .* --grad-checkpointing"):
        accelerator_for(override(Recipe(), run__device="cpu"))
