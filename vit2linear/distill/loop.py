"""The one training loop: AdamW, linear warm-up, cosine, clipping, averaged weights, progress."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.utils import ModelEmaV3
from torch import nn

from vit2linear.data import Batch
from vit2linear.distill.tasks import ModelTask, SiteTask, Task
from vit2linear.errors import DistillError, RecipeError
from vit2linear.losses import LOSSES, Objective
from vit2linear.operator import Operator
from vit2linear.recipe import DistillOptions, Stage
from vit2linear.reporting import Progress, Reporter
from vit2linear.site import sites_of

TASKS: dict[str, type[Task]] = {"attention": SiteTask, "feature": ModelTask, "task": ModelTask}
CHECK_BATCH = 64
"""Images of one forward when weights are chosen."""


@dataclass(frozen=True)
class Averaged:
    """The averaged weights against the last ones, by the stage's loss on training images in the evaluation view."""

    decay: float
    loss: float
    loss_averaged: float

    @property
    def kept(self) -> bool:
        """Whether the average was better."""
        return self.loss_averaged < self.loss


@dataclass(frozen=True)
class StageReport:
    """What a stage did."""

    stage: str
    objective: dict[str, float]
    """Loss name to weight."""
    steps: int
    images: int
    seconds: float
    trainable: int
    """Parameters that were trained."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss), at most about 100 of them."""
    averaged: Averaged | None = None


def check_stages(options: DistillOptions, operators: Iterable[type[Operator]], num_classes: int) -> DistillOptions:
    """The stages as they can run with these operators: without a head there is no loss ``logits``.

    Raises:
        UnknownNameError: a loss that does not exist.
        RecipeError: a loss that its stage, the operators or the model cannot give.
    """
    stages = dict(options.stages)
    for name, stage in options.stages.items():
        weights = {n: w for n, w in stage.losses.items() if n != "logits" or num_classes}
        stages[name] = replace(stage, losses=weights)
        where, objective = f"distill.{name}.losses", Objective(weights)
        for loss in weights:
            missing = sorted(LOSSES[loss].needs - TASKS[name].fields)
            if missing:
                allowed = sorted(n for n, known in LOSSES.items() if known.needs <= TASKS[name].fields)
                raise RecipeError(f"{where}: {loss!r} needs {', '.join(missing)}; possible here: {', '.join(allowed)}.")
        if stage.share and not weights:
            raise RecipeError(f"{where}: no loss is left for a model without a class head.", "Use feature.")
        if stage.share and "labels" in objective.needs and not num_classes:
            raise RecipeError(f"{where}: 'labels' needs a class head, and the model has none.")
        for op in operators if stage.share and "maps" in objective.needs else ():
            if not op.has_map or op.streams > 1 or (op.signed and "map_kl" in weights):
                fault = "whose routing map can be negative" if op.signed else "which has no such routing map"
                raise RecipeError(f"{where}: maps are compared with operator {op.name!r}, {fault}.", "Use site_output.")
    return replace(options, attention=stages["attention"], feature=stages["feature"], task=stages["task"])


def objective_of(options: DistillOptions, stage: str) -> Objective:
    """What a stage minimises."""
    return Objective(options.stages[stage].losses, options.temperature, options.label_smoothing)


def split_steps(options: DistillOptions, total: int) -> dict[str, int]:
    """Optimiser steps of each stage, summing to ``total``."""
    shares = [stage.share for stage in options.stages.values()]
    ends = [0, *(round(total * part / sum(shares)) for part in itertools.accumulate(shares))]
    return {name: b - a for name, a, b in zip(options.stages, ends, ends[1:], strict=False)}


def run_stage(
    name: str,
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterator[Batch],
    steps: int,
    options: DistillOptions,
    accelerator: Accelerator,
    reporter: Reporter,
    check: Batch | None = None,
) -> StageReport:
    """Train ``student`` in place for ``steps`` batches; it ends in eval mode with gradients cleared.

    Args:
        name: of the stage.
        teacher: the source with the exact softmax at the student's sites.
        student: what is trained.
        batches: pixels and the model's classes, -1 where there is none.
        steps: optimiser steps.
        options: learning rates filled in (``at_width``).
        accelerator: devices, processes, precision.
        reporter: told about every step.
        check: images that decide between the last and the averaged weights; without them there is no average.

    Raises:
        DistillError: a loss or gradient that is not finite, naming site or step.
    """
    stage = options.stages[name]
    groups = parameter_groups(student, stage)
    trained = [p for g in groups for p in g["params"]]
    task = TASKS[name](teacher, student, objective_of(options, name))
    # Dropout and drop path stay off: the teacher's function is what is learned, and it is deterministic.
    teacher.eval().requires_grad_(False)
    student.eval().requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    task.prepare(accelerator)
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, _warmup_cosine(steps, options.warmup))
    optimizer = accelerator.prepare(adamw)
    averages = check is not None and options.ema > 0 and isinstance(task, ModelTask)
    ema = ModelEmaV3(student, options.ema, use_warmup=True) if averages else None
    curve: list[tuple[int, float]] = []
    start, images = time.perf_counter(), 0
    for step, batch in enumerate(batches, 1):
        pixels, labels = (x.to(accelerator.device, non_blocking=True) for x in batch)
        try:
            loss = task.backward(accelerator, pixels, labels)
        except DistillError as error:
            raise DistillError(f"stage {name}, step {step} of {steps}: {error.message}", error.hint) from error
        norm = accelerator.clip_grad_norm_(trained, options.clip)
        if accelerator.scaler is None and not torch.isfinite(norm):
            raise DistillError(f"stage {name}, step {step} of {steps}: the gradient norm is {float(norm)}.")
        optimizer.step()
        if not optimizer.step_was_skipped:  # fp16, where the loss scale was too large
            schedule.step()
        optimizer.zero_grad()
        if ema is not None:
            ema.update(student, step)
        images += pixels.shape[0] * accelerator.num_processes
        value = float(loss)
        if step == 1 or step == steps or step % max(1, steps // 100) == 0:
            curve.append((step, value))
        rate = images / (time.perf_counter() - start)
        left = (steps - step) * images / step / rate
        reporter.progress(Progress(name, step, steps, value, rate, left))
    averaged = None
    if ema is not None and check is not None and isinstance(task, ModelTask):
        averaged = _keep_better(task, student, ema, check, accelerator)
    student.requires_grad_(True)
    if accelerator.device.type != "cpu" or accelerator.scaler is not None:
        # Accelerate holds every optimiser: its memory, and fp16 unscales for each, the next stage's gradients twice.
        accelerator.free_memory()
    seconds = time.perf_counter() - start
    return StageReport(
        name, stage.losses, steps, images, seconds, sum(p.numel() for p in trained), tuple(curve), averaged
    )


def _keep_better(
    task: ModelTask, student: nn.Module, ema: ModelEmaV3, check: Batch, accelerator: Accelerator
) -> Averaged:
    """Leave the averaged weights in ``student`` where the stage's loss on ``check`` is lower with them."""

    @torch.no_grad()
    def loss() -> float:
        parts = zip(*(x.to(accelerator.device).split(CHECK_BATCH) for x in check), strict=True)
        found = [task.loss(accelerator, pixels, labels) * len(pixels) for pixels, labels in parts]
        # Rounding may differ between processes; what they keep must not.
        return float(broadcast(torch.stack(found).sum() / len(check[0])))

    last = {k: v.clone() for k, v in student.state_dict().items()}
    before = loss()
    student.load_state_dict(ema.module.state_dict())
    report = Averaged(ema.decay, before, loss())
    if not report.kept:
        student.load_state_dict(last)
    return report


def parameter_groups(student: nn.Module, stage: Stage) -> list[dict[str, Any]]:
    """AdamW groups: copied attention, new operator weights, the rest; matrices decay, vectors do not.

    A group whose learning rate is 0 is left out, so its weights stay bitwise as they were copied.
    """
    paths = tuple(f"{path}." for path in sites_of(student))
    rates = {"attention": stage.lr or 0.0, "new": stage.lr_new or 0.0, "rest": stage.lr_rest or 0.0}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        kind = "rest" if not name.startswith(paths) else "new" if ".op." in name else "attention"
        if rates[kind] > 0:
            groups.setdefault((kind, parameter.ndim >= 2), []).append(parameter)
    if not groups:
        raise DistillError("every learning rate of the stage is 0, so nothing would be trained.")
    return [
        {"params": parameters, "lr": rates[kind], "weight_decay": stage.weight_decay if decays else 0.0}
        for (kind, decays), parameters in groups.items()
    ]


def _warmup_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    """Factor on the peak rate: linear over the first ``warmup`` share, then cosine to 1%."""
    ramp = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < ramp:
            return (step + 1) / ramp
        done = (step - ramp) / max(1, steps - ramp)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor
