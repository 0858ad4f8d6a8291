"""The one training loop: batches in, a trained student out, and its state between any two steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vit2linear.data import Batch
from vit2linear.distill.averaged import keep_better
from vit2linear.distill.keeper import Keeper, Saved
from vit2linear.distill.optimiser import optimiser_tensors, parameter_groups, restore_optimiser, set_step, warmup_cosine
from vit2linear.distill.progress import StageProgress, StageReport
from vit2linear.distill.stages import TASKS, objective_of
from vit2linear.distill.tasks import ModelTask
from vit2linear.distill.watch import Watch
from vit2linear.errors import NotFiniteError, Vit2LinearError
from vit2linear.recipe import DistillOptions
from vit2linear.reporting import Progress, Reporter

CURVE = 100
"""Points of the curve in a report."""
LOGGED = 1000
"""Lines of metrics of a stage, about."""
WAITING = 0.2
"""Share of the time spent waiting for images from which on it is said."""


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
    keeper: Keeper | None = None,
) -> StageReport:
    """Train ``student`` in place for ``steps`` batches; it ends in eval mode with gradients cleared.

    Args:
        name: of the stage.
        teacher: the source with the exact softmax at the student's sites.
        student: what is trained.
        batches: pixels and the model's classes, -1 where there is none; those that are left, where it is resumed.
        steps: optimiser steps.
        options: learning rates filled in (``at_width``).
        accelerator: devices, processes, precision.
        reporter: told about every step.
        check: images that decide between the last and the averaged weights; without them there is no average.
        keeper: is given the state of the stage, and gives it back where the stage is resumed.

    Raises:
        NotFiniteError: many losses or gradients in a row, naming site and step.
        StoppedError: by the keeper.
    """
    stage = _Stage(name, teacher, student, steps, options, accelerator, reporter, check is not None)
    keeper = keeper or Keeper()
    if keeper.resumed is not None:
        stage.restore(keeper.resumed)
    kept = stage.done.step
    try:
        while (batch := stage.wait(batches)) is not None:
            stage.step(batch, keeper)
            stop = keeper.stop_wanted()
            # While steps are skipped, the checkpoint before them is the better one.
            if stop or (keeper.due(stage.done.step) and not stage.done.watch.in_a_row):
                keeper.save(stage.saved())
                kept = stage.done.step
            if stop:
                keeper.stop()
    except NotFiniteError:
        raise  # the checkpoint before is the better one
    except BaseException:
        # Whatever it was: what has been learned since is worth a checkpoint, if it is whole.
        if stage.settled and stage.done.step > kept:
            with suppress(Vit2LinearError):
                keeper.save(stage.saved())
        raise
    return stage.end(check)


class _Stage:
    """A stage that runs."""

    def __init__(
        self,
        name: str,
        teacher: nn.Module,
        student: nn.Module,
        steps: int,
        options: DistillOptions,
        accelerator: Accelerator,
        reporter: Reporter,
        averages: bool,
    ) -> None:
        self.name, self.student, self.steps, self.options = name, student, steps, options
        self.accelerator, self.reporter = accelerator, reporter
        self.objective = options.stages[name].losses
        groups = parameter_groups(student, options.stages[name])
        self.trained = [p for g in groups for p in g["params"]]
        self.task = TASKS[name](teacher, student, objective_of(options, name))
        # Dropout and drop path stay off: the teacher's function is what is learned, and it is deterministic.
        teacher.eval().requires_grad_(False)
        student.eval().requires_grad_(False)
        for parameter in self.trained:
            parameter.requires_grad_(True)
        self.task.prepare(accelerator)
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999))
        factor = warmup_cosine(steps, options.warmup)
        # Before accelerate wraps the optimiser, or torch takes its steps for overridden ones under fp16.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.adamw, factor)
        self.optimizer = accelerator.prepare(self.adamw)
        averages = averages and options.ema > 0 and isinstance(self.task, ModelTask)
        self.ema = ModelEmaV3(student, options.ema, use_warmup=True) if averages else None
        self.done = StageProgress(parts=options.grad_accum_steps)
        self.settled = True
        """Whether the state is that between two steps."""
        self.fresh_images, self.started = 0, time.perf_counter()

    def wait(self, batches: Iterator[Batch]) -> Batch | None:
        """The next batch, with the time that it took to come."""
        start = time.perf_counter()
        batch = next(batches, None)
        self.done.waited += time.perf_counter() - start
        self.done.seconds += time.perf_counter() - start
        return batch

    def step(self, batch: Batch, keeper: Keeper) -> None:
        """One optimiser step; one whose loss or gradient is not finite changes nothing and is counted."""
        start, done, step = time.perf_counter(), self.done, self.done.step + 1
        pixels, labels = (x.to(self.accelerator.device, non_blocking=True) for x in batch)
        value = norm = float("nan")
        try:
            value = float(self._gradients(pixels, labels))
            norm = float(self.accelerator.clip_grad_norm_(self.trained, self.options.clip))
            if self.accelerator.scaler is None and not abs(norm) < float("inf"):
                raise NotFiniteError(f"the gradient norm is {norm}.", self.task.remedy)
            self.settled = False
            self.optimizer.step()
            if self.optimizer.step_was_skipped:
                raise NotFiniteError("gradients overflow fp16.", "Use --mixed-precision bf16.")
            self.schedule.step()
            if self.ema is not None:
                self.ema.update(self.student, step)
            done.applied += 1
        except NotFiniteError as error:
            try:
                done.watch.skip(error)
            except NotFiniteError as last:
                raise NotFiniteError(f"{self._where(step)}: {last.message}", last.hint) from error
        else:
            if (warning := done.watch.see(value)) is not None:
                self.reporter.say(f"stage {self.name}, step {step}: {warning}")
        self.optimizer.zero_grad()
        done.step = step
        done.seconds += time.perf_counter() - start
        self._tell(value, norm, pixels.shape[0] * self.accelerator.num_processes, keeper)

    def _gradients(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Of the whole step; where memory runs out, in twice as many parts from now on."""
        while True:
            try:
                return self.task.backward(self.accelerator, pixels, labels, self.done.parts)
            except RuntimeError as error:
                if not should_reduce_batch_size(error) or self.done.parts >= len(pixels):
                    raise
            self.optimizer.zero_grad()
            clear_device_cache(garbage_collection=True)
            self.done.parts *= 2
            self.reporter.say(f"out of memory: the images of a step now go through in {self.done.parts} parts")

    def _tell(self, loss: float, norm: float, images: int, keeper: Keeper) -> None:
        step, steps = self.done.step, self.steps
        self.done.images += images
        self.fresh_images += images
        rate = self.fresh_images / (time.perf_counter() - self.started)
        if loss < float("inf") and (step in (1, steps) or step % max(1, steps // CURVE) == 0):
            self.done.curve.append((step, loss))
        self.settled = True
        if step in (1, steps) or step % max(1, steps // LOGGED) == 0:
            lr = float(self.schedule.get_last_lr()[0])
            shown: dict[str, float] = {"loss": loss, "gradient_norm": norm, "lr": lr, "images_per_second": rate}
            keeper.log(step, {**shown, "waiting": self._waiting, "skipped": self.done.watch.skipped})
        left = (steps - step) * images / rate
        self.reporter.progress(Progress(self.name, step, steps, loss, rate, left))

    def _where(self, step: int) -> str:
        return f"stage {self.name}, step {step} of {self.steps}"

    @property
    def _waiting(self) -> float:
        return self.done.waited / max(self.done.seconds, 1e-9)

    def _finite(self) -> bool:
        return bool(torch.stack([p.isfinite().all() for p in self.trained]).all())

    def saved(self) -> Saved:
        """The state between two steps."""
        if not self._finite():
            raise NotFiniteError(f"{self._where(self.done.step)}: weights are no longer finite.", self.task.remedy)
        tensors = {"student": self.student.state_dict(), "optimiser": optimiser_tensors(self.adamw)}
        if self.ema is not None:
            tensors["average"] = self.ema.module.state_dict()
        scaler = self.accelerator.scaler
        return Saved(self.done.step, tensors, {**asdict(self.done), "scaler": scaler and scaler.state_dict()})

    def restore(self, saved: Saved) -> None:
        """Go on from there; the student has its weights already."""
        state: dict[str, Any] = dict(saved.state)
        scaler, watch, curve = state.pop("scaler"), Watch(**state.pop("watch")), [*map(tuple, state.pop("curve"))]
        self.done = StageProgress(**state, watch=watch, curve=curve)
        restore_optimiser(self.adamw, saved.tensors["optimiser"])
        set_step(self.schedule, self.done.applied)
        if self.ema is not None:
            self.ema.module.load_state_dict(saved.tensors["average"])
        if scaler is not None and self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(scaler)

    def end(self, check: Batch | None) -> StageReport:
        """Choose the weights, put everything back, and report."""
        done, averaged = self.done, None
        if not self._finite() or (done.step and not done.applied):
            reason = done.watch.reason or "weights are no longer finite."
            raise NotFiniteError(f"{self._where(done.step)}: {reason}", self.task.remedy)
        if self.ema is not None and check is not None and isinstance(self.task, ModelTask):
            averaged = keep_better(self.task, self.student, self.ema, check, self.accelerator)
        self.student.requires_grad_(True)
        if self.accelerator.device.type != "cpu" or self.accelerator.scaler is not None:
            # Accelerate holds every optimiser: its memory, and fp16 would unscale the next stage's gradients for each.
            self.accelerator.free_memory()
        if self._waiting > WAITING:
            self.reporter.say(
                f"stage {self.name}: {self._waiting:.0%} of the time went into waiting for images; "
                "more --workers, smaller files or a faster disk would help"
            )
        if done.watch.skipped:
            self.reporter.say(f"stage {self.name}: {done.watch.skipped} steps were skipped, they were not finite")
        trainable = sum(p.numel() for p in self.trained)
        return StageReport(
            self.name,
            self.objective,
            done.step,
            done.images,
            done.seconds,
            trainable,
            tuple(done.curve),
            averaged,
            done.watch.skipped,
            self._waiting,
        )
