"""Three real steps of every stage, with real weights and images: what ``--dry-run --probe`` measures."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import set_seed

from vit2linear import model
from vit2linear.distill.keeper import Keeper
from vit2linear.interrupt import Interrupts
from vit2linear.moments import Course, moments_of
from vit2linear.opening import checked_accelerator, judge_of, models_of
from vit2linear.prepare import Prepared
from vit2linear.reporting import Reporter

STEPS = 3
"""The first one warms up, and the median of the others counts."""


@dataclass(frozen=True)
class Measured:
    """One stage."""

    stage: str
    steps: int
    """That the conversion would take."""
    seconds: float
    """Of a step, waiting for images included."""
    memory: int
    """Bytes at the peak: of the device, or of the whole process so far (CPU), libraries and all."""

    @property
    def words(self) -> str:
        """One line."""
        return f"stage {self.stage}: {self.seconds:.3g} s a step, {self.memory / 2**20:,.0f} MiB at the peak"


@dataclass(frozen=True)
class Trial:
    """What the stages would take."""

    device: str
    processes: int
    stages: tuple[Measured, ...]

    @property
    def seconds(self) -> float:
        """Of all steps of all stages; evaluation and calibration come on top."""
        return sum(s.steps * s.seconds for s in self.stages)

    def to_json(self) -> dict[str, Any]:
        """Plain values, the sum included."""
        return {**asdict(self), "seconds": self.seconds}


def try_out(prepared: Prepared, ignore_labels: bool = False) -> Trial:
    """Take the first steps of every stage that has any; nothing is written.

    With ``keep_softmax`` every site is converted: which ones keep it is not known before it has been measured.

    Raises:
        Vit2LinearError: what the conversion itself would stumble over until then.
    """
    interrupts = Interrupts()
    with interrupts.installed():
        accelerator = checked_accelerator(prepared.recipe)
        judge = judge_of(prepared, accelerator.device, ignore_labels, Reporter())
        set_seed(prepared.recipe.run.seed)
        teacher, student, _ = models_of(model.load(prepared.ref, prepared.spec).module, prepared, accelerator.device)
        course = Course(accelerator, interrupts, Reporter(), None)
        found = []
        for moment in moments_of(prepared.recipe.distill):
            if moment.stage is not None:
                clock = _Clock()
                _reset_peak(accelerator.device)
                course.train(replace(moment, steps=STEPS), teacher, student, prepared, judge, clock)
                seconds = statistics.median(b - a for a, b in pairwise(clock.ends))
                found.append(Measured(moment.stage, moment.steps, seconds, _peak(accelerator.device)))
        trial = Trial(accelerator.device.type, accelerator.num_processes, tuple(found))
        accelerator.end_training()
        return trial


@dataclass
class _Clock(Keeper):
    """Notes when steps end."""

    ends: list[float] = field(default_factory=list)

    def due(self, step: int) -> bool:
        self.ends.append(time.perf_counter())
        return False


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
