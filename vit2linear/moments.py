"""From moment to moment of a conversion: calibrate or train, checkpoint, evaluate.

A moment is when the student is evaluated: at the start and after everything that changes it. A checkpoint of
(moment, step) lies inside that moment's stage; one of (moment, 0) after the change of the moment before, which is
evaluated again when the run is resumed there.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import nn

from vit2linear.calibration.calibrate import calibrate
from vit2linear.checkpoint import Checkpoint
from vit2linear.compare import EvalReport
from vit2linear.data import train_batches
from vit2linear.distill.economies import economies
from vit2linear.distill.keeper import Keeper, Saved
from vit2linear.distill.loop import run_stage
from vit2linear.distill.progress import StageReport
from vit2linear.distill.stages import split_steps
from vit2linear.errors import NotFiniteError
from vit2linear.evaluation import Judge
from vit2linear.interrupt import Interrupts
from vit2linear.journal import Journal
from vit2linear.prepare import Prepared
from vit2linear.recipe import DistillOptions
from vit2linear.reporting import Reporter
from vit2linear.run_folder import RunFolder
from vit2linear.views import train_view

CHECK_IMAGES = 512
"""Training images that decide between last and averaged weights."""
MONITOR_IMAGES = 2000
"""Between stages at most so many images are evaluated."""
CHECKPOINT_SECONDS = 600.0
"""Between two checkpoints, where the user names no number of steps."""


@dataclass(frozen=True)
class Moment:
    """When the student is evaluated, and what comes before that."""

    name: str
    stage: str | None = None
    steps: int = 0
    calibrates: bool = False


def moments_of(options: DistillOptions) -> list[Moment]:
    """All moments of a conversion, in order."""
    moments = [Moment("before training")]
    for stage, steps in split_steps(options, options.steps or 0).items():
        if options.calibration.images and stage in options.calibration.before:
            again = f" before stage {stage}" if any(m.calibrates for m in moments) else ""
            moments.append(Moment(f"after calibration{again}", calibrates=True))
        if steps:
            moments.append(Moment(f"after stage {stage}", stage, steps))
    return moments


@dataclass(frozen=True)
class Begun:
    """The checkpoint that a run goes on from."""

    moment: int
    stage: Saved
    journal: Journal
    words: str


@dataclass(frozen=True)
class Course:
    """What accompanies a conversion through its moments."""

    accelerator: Accelerator
    interrupts: Interrupts
    reporter: Reporter
    run: RunFolder | None
    """In the main process only, which alone writes."""

    def begun(self) -> Begun | None:
        """The last checkpoint, if there is one, the same in every process.

        Raises:
            ArtifactError: it cannot be read, or not by every process.
        """
        last = self.run.checkpoint if self.run is not None else None
        (place,) = broadcast_object_list([last and str(last.folder.resolve())])
        if place is None:
            return None
        last = Checkpoint(Path(place))
        if self.run is not None:
            self.run.forget_after(*last.place)
        state = last.state
        saved = Saved(state["step"], last.tensors(), state["stage"])
        return Begun(state["moment"], saved, Journal(**state["journal"]), f"{last.folder.name!r}")

    def walk(
        self,
        moments: Sequence[Moment],
        teacher: nn.Module,
        student: nn.Module,
        prepared: Prepared,
        judge: Judge,
        journal: Journal,
        begun: Begun | None,
    ) -> EvalReport | None:
        """Take the student through all moments that are left.

        Args:
            moments: all of them.
            teacher, student: converted with ``softmax`` and with the operators; the student is changed in place.
            prepared: recipe and preprocessing.
            judge: the images.
            journal: is carried on.
            begun: the checkpoint to go on from.

        Returns:
            The last evaluation; ``None`` in other processes than the main one.
        """
        report = None
        if begun is not None:
            student.load_state_dict(begun.stage.tensors["student"])
        for i, moment in enumerate(moments):
            if self.interrupts.wanted:  # in a destructor, say, where Python lets nothing out
                self.interrupts.stop()
            if begun is None or i >= begun.moment:
                self._change(i, moment, teacher, student, prepared, judge, journal, begun)
                if self.run is not None and len(moments) > 1:
                    self.run.save(i + 1, 0, {"student": student.state_dict()}, _state(i + 1, 0, {}, journal))
            if self.run is not None and i == len(journal.history):
                report = judge(teacher, student, None if moment is moments[-1] else MONITOR_IMAGES)
                self.reporter.say(f"{moment.name}: {report.summary}")
                told = ("agreement", "neighbour_agreement", "feature_cosine", "site_errors")
                entry = {"moment": moment.name, "images": report.images, "student": asdict(report.student)}
                journal.history.append(entry | {key: getattr(report, key) for key in told})
        return report

    def _change(
        self,
        i: int,
        moment: Moment,
        teacher: nn.Module,
        student: nn.Module,
        prepared: Prepared,
        judge: Judge,
        journal: Journal,
        begun: Begun | None,
    ) -> None:
        options = prepared.recipe.distill
        if moment.calibrates:
            pixels, _ = judge.sample(options.calibration.images or 0)
            journal.calibration[moment.name] = asdict(
                calibrate(teacher, student, pixels, options.calibration, self.reporter)
            )
        elif moment.stage is not None:
            before = sum(m.steps for m in moments_of(options)[:i])
            keeper = _Keeper(self, i, moment.stage, journal, prepared.recipe.run.checkpoint_every, before)
            if begun is not None and i == begun.moment and begun.stage.step:
                keeper.resumed, keeper.last_step = begun.stage, begun.stage.step
            with self.interrupts.deferred():
                report = self.train(moment, teacher, student, prepared, judge, keeper)
            journal.stages.append(asdict(report))

    def train(
        self, moment: Moment, teacher: nn.Module, student: nn.Module, prepared: Prepared, judge: Judge, keeper: Keeper
    ) -> StageReport:
        """The stage that comes before ``moment``."""
        options, run, name = prepared.recipe.distill, prepared.recipe.run, moment.stage or ""
        batches = train_batches(
            judge.sets.train,
            train_view(prepared.data_config, options.augment),
            options.batch_size,
            moment.steps,
            # Each stage sees its own order of the images.
            run.seed + len(name),
            prepared.recipe.data.workers,
            self.accelerator.process_index,
            self.accelerator.num_processes,
            start=keeper.resumed.step if keeper.resumed is not None else 0,
            bad=judge.bad,
        )
        labelled = ((pixels, judge.as_model_classes(classes)) for pixels, classes in batches)
        check = judge.sample(CHECK_IMAGES) if options.ema else None
        try:
            with economies(teacher, student, run):
                return run_stage(
                    *(name, teacher, student, labelled, moment.steps),
                    *(options, self.accelerator, self.reporter, check, keeper),
                )
        except NotFiniteError as error:
            words = self.run.words if self.run is not None else ""
            raise NotFiniteError(error.message, f"{error.hint or ''} {words}".strip()) from error


class _Keeper(Keeper):
    """Writes checkpoints and metrics of a stage, in the main process, and asks for signals, in all."""

    def __init__(
        self, course: Course, moment: int, stage: str, journal: Journal, every: int | None, before: int
    ) -> None:
        self.course, self.moment, self.stage, self.journal, self.every = course, moment, stage, journal, every
        self.before = before
        self.last, self.last_step = time.monotonic(), 0

    def due(self, step: int) -> bool:
        if self.course.run is None:
            return False
        if self.every is None:
            return time.monotonic() - self.last >= CHECKPOINT_SECONDS
        return step - self.last_step >= self.every

    def save(self, saved: Saved) -> None:
        if self.course.run is not None:
            state = _state(self.moment, saved.step, saved.state, self.journal)
            self.course.run.save(self.moment, saved.step, saved.tensors, state)
            self.last, self.last_step = time.monotonic(), saved.step

    def log(self, step: int, values: dict[str, float]) -> None:
        if self.course.run is not None:
            finite = {k: v if abs(v) < float("inf") else None for k, v in values.items()}
            self.course.run.log({"moment": self.moment, "stage": self.stage, "step": step, **finite})
            named = {f"{self.stage}/{k}": v for k, v in finite.items() if v is not None}
            self.course.accelerator.log(named, step=self.before + step)

    def stop_wanted(self) -> bool:
        accelerator, wanted = self.course.accelerator, self.course.interrupts.wanted
        if accelerator.num_processes == 1:
            return wanted
        if wanted:
            accelerator.set_trigger()
        return bool(accelerator.check_trigger())

    def stop(self) -> None:
        self.course.interrupts.stop()


def _state(moment: int, step: int, stage: dict[str, Any], journal: Journal) -> dict[str, Any]:
    return {"moment": moment, "step": step, "stage": stage, "journal": dataclasses.asdict(journal)}
