"""The one training loop: AdamW, linear warm-up, cosine, clipping, progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from vit2linear.data import Batch
from vit2linear.distill.tasks import ModelTask, SiteTask, Task
from vit2linear.errors import DistillError
from vit2linear.recipe import DistillOptions, Stage
from vit2linear.reporting import Progress, Reporter
from vit2linear.site import sites_of

TASKS: dict[str, type[Task]] = {"attention": SiteTask, "feature": ModelTask}


@dataclass(frozen=True)
class StageReport:
    """What a stage did."""

    stage: str
    steps: int
    images: int
    seconds: float
    trainable: int
    """Parameters that were trained."""
    losses: tuple[tuple[int, float], ...]
    """(step, loss), at most about 100 of them."""


def split_steps(options: DistillOptions, total: int) -> dict[str, int]:
    """Optimiser steps of each stage, summing to ``total``."""
    attention, feature = options.attention.share, options.feature.share
    first = round(total * attention / (attention + feature))
    return {"attention": first, "feature": total - first}


def run_stage(
    name: str,
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterator[Batch],
    steps: int,
    options: DistillOptions,
    losses: dict[str, float],
    accelerator: Accelerator,
    reporter: Reporter,
) -> StageReport:
    """Train ``student`` in place for ``steps`` batches; it ends in eval mode with gradients cleared.

    Raises:
        DistillError: a loss or gradient that is not finite, naming site or step.
    """
    stage: Stage = getattr(options, name)
    groups = parameter_groups(student, stage)
    trained = [p for g in groups for p in g["params"]]
    task = TASKS[name](teacher, student, losses)
    # Dropout and drop path stay off: the teacher's function is what is learned, and it is deterministic.
    teacher.eval().requires_grad_(False)
    student.eval().requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    task.prepare(accelerator)
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    schedule = torch.optim.lr_scheduler.LambdaLR(adamw, _warmup_cosine(steps, options.warmup))
    optimizer = accelerator.prepare(adamw)
    curve: list[tuple[int, float]] = []
    start, images = time.perf_counter(), 0
    for step, (pixels, _) in enumerate(batches, 1):
        try:
            loss = task.backward(accelerator, pixels.to(accelerator.device, non_blocking=True))
        except DistillError as error:
            raise DistillError(f"stage {name}, step {step} of {steps}: {error.message}", error.hint) from error
        norm = accelerator.clip_grad_norm_(trained, options.clip)
        if accelerator.scaler is None and not torch.isfinite(norm):
            raise DistillError(f"stage {name}, step {step} of {steps}: the gradient norm is {float(norm)}.")
        optimizer.step()
        if not optimizer.step_was_skipped:  # fp16, where the loss scale was too large
            schedule.step()
        optimizer.zero_grad()
        images += pixels.shape[0] * accelerator.num_processes
        value = float(loss)
        if step == 1 or step == steps or step % max(1, steps // 100) == 0:
            curve.append((step, value))
        rate = images / (time.perf_counter() - start)
        left = (steps - step) * images / step / rate
        reporter.progress(Progress(name, step, steps, value, rate, left))
    student.requires_grad_(True)
    # With fp16 accelerate unscales for every optimiser that it holds, so the next stage's gradients would be twice.
    accelerator.free_memory()
    seconds = time.perf_counter() - start
    return StageReport(name, steps, images, seconds, sum(p.numel() for p in trained), tuple(curve))


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
