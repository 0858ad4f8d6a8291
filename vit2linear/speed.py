"""Speed of a converted model against its source, at a few image sizes, while it is converted.

The two models run interleaved, as in ``bench``; what is reported are medians and the median of the rounds' ratios. It
is to cost seconds: larger sizes are measured only where there is time for them. ``vit2linear bench`` measures more.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from vit2linear.bench import SOFTMAX, Job, interleaved, most_keys
from vit2linear.errors import Vit2LinearError
from vit2linear.recipe import Recipe, override
from vit2linear.sizes import Size, show_size

SECONDS = 5.0
"""That measuring may take, about; a conversion that trained for long may take ``SHARE`` of that time instead."""
SHARE = 0.01
LARGER = (2, 4)
"""Sizes beside the model's own, in units of its side."""
ROUNDS = (5, 15)
"""At least and at most so many rounds of both models, after one that does not count."""
STUDENT = "this model"


@dataclass(frozen=True)
class Point:
    """Both models at one size, one image at a time."""

    size: Size
    """Height and width in pixels."""
    tokens: int
    """Of the site that has most."""
    softmax: float
    """Images/s, median."""
    student: float
    speedup: float
    """Student's over the softmax model's, median of the rounds' ratios."""
    spread: tuple[float, float]
    """Their quartiles: far apart where something else was running."""


@dataclass(frozen=True)
class Speed:
    """Of the sizes measured, the smallest first."""

    device: str
    """What computed: a GPU's name, or the architecture of the CPU and its threads."""
    points: tuple[Point, ...]

    @property
    def wins_from(self) -> Size | None:
        """The smallest measured size from which on the student is faster at every one."""
        winning = None
        for point in reversed(self.points):
            if point.speedup <= 1:
                break
            winning = point.size
        return winning

    @property
    def summary(self) -> str:
        """In one line."""
        rates = ", ".join(f"{p.speedup:.2f}x at {show_size(p.size)} px" for p in self.points)
        return f"speed over the softmax original, one image at a time on {self.device}: {rates}"


def speed_of_record(record: Mapping[str, Any]) -> Speed:
    """``dataclasses.asdict`` of a ``Speed``, after it was JSON, made a ``Speed`` again."""
    pairs = ("size", "spread")
    points = (Point(**{**point, **{key: tuple(point[key]) for key in pairs}}) for point in record["points"])
    return Speed(record["device"], tuple(points))


def job_of(base: str, args: Mapping[str, Any], operators: Mapping[str, Mapping[str, Any]], batch_size: int = 1) -> Job:
    """A converted architecture beside the softmax one, for ``bench``.

    Args:
        base: timm's name.
        args: of the architecture.
        operators: site path to the entry that an artifact stores.
        batch_size: images in a forward.
    """
    rules = [{"sites": path, **entry} for path, entry in operators.items()]
    return Job(base, {STUDENT: override(Recipe(), convert=rules).convert}, dict(args), batch_size)


def measure_speed(
    teacher: nn.Module, student: nn.Module, job: Job, size: Size, device: torch.device, trained_seconds: float = 0.0
) -> Speed:
    """Measure at the model's own size, and at larger ones while there is time.

    Args:
        teacher, student: on ``device`` and in eval mode, at their own size.
        job: how to build both at other sizes, with random weights.
        size: their own height and width in pixels.
        device: what computes.
        trained_seconds: that the conversion has taken.
    """
    limit = time.perf_counter() + max(SECONDS, SHARE * trained_seconds)
    points, pair = [], 0.0
    for factor in (1, *LARGER):
        now = size[0] * factor, size[1] * factor
        # Twice the side is four times the tokens, and more than four times the time.
        if time.perf_counter() + 5 * pair * (1 + ROUNDS[0]) > limit:
            break
        try:
            models = {SOFTMAX: teacher, STUDENT: student}
            if factor > 1:
                models = {name: job.model(name, now).to(device) for name in models}
            point, pair = _measure(models, now, device, limit)
        except (AssertionError, ValueError, RuntimeError, Vit2LinearError):
            if factor == 1:
                raise
            break  # neither an architecture of one size nor too little memory ends a conversion
        points.append(point)
    return Speed(_name_of(device), tuple(points))


def _measure(models: dict[str, nn.Module], size: Size, device: torch.device, limit: float) -> tuple[Point, float]:
    """The two models at one size, and the seconds of one forward of both."""
    pixels = torch.randn(1, int(models[SOFTMAX].in_chans), *size, device=device)  # type: ignore[arg-type]
    with torch.inference_mode():
        tokens = most_keys(models[SOFTMAX], pixels)  # which warms up as well
        first = interleaved(models, pixels, 1, warmup=1)
        pair = sum(sum(values) for values in first.values())
        rounds = int((limit - time.perf_counter()) / pair / 2)
        seconds = interleaved(models, pixels, min(max(rounds, ROUNDS[0]), ROUNDS[1]), warmup=0)
    ratios = [a / b for a, b in zip(seconds[SOFTMAX], seconds[STUDENT], strict=True)]
    softmax, student = (1 / statistics.median(seconds[name]) for name in (SOFTMAX, STUDENT))
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Point(size, tokens, softmax, student, middle, (low, high)), pair


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    return f"{platform.machine()} CPU (threads: {torch.get_num_threads()})"
