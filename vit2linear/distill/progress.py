"""How far a stage is, and what it has done in the end."""

from __future__ import annotations

from dataclasses import dataclass, field

from vit2linear.distill.averaged import Averaged
from vit2linear.distill.watch import Watch


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
    skipped: int = 0
    """Steps whose loss or gradient was not finite, so that they changed nothing."""
    waiting: float = 0.0
    """Share of the time spent waiting for images."""


@dataclass
class StageProgress:
    """What a checkpoint carries beside tensors; JSON."""

    step: int = 0
    applied: int = 0
    """Steps that changed the weights; the schedule follows them."""
    parts: int = 1
    """The images of a step go through in so many parts."""
    images: int = 0
    seconds: float = 0.0
    waited: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)
