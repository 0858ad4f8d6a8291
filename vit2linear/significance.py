"""Whether a difference between two models on the same images is more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

RESAMPLES = 10_000
BINS = 15
LISTED = 10
"""Classes that are named, at most."""


@dataclass(frozen=True)
class Difference:
    """Student minus teacher in top-1, percentage points, with what the number of images lets one say."""

    points: float
    low: float
    high: float
    """95% interval: bootstrap over images, both models on the same ones."""
    won: int
    """Images that only the student has right."""
    lost: int
    """Images that only the teacher has right."""
    p_value: float
    """McNemar's exact test: how often chance alone would split the images so unevenly, or more so."""

    @property
    def words(self) -> str:
        """The difference in one clause."""
        shown = f"{self.points:+.2f} points (95% interval {self.low:+.2f} to {self.high:+.2f}, p = {self.p_value:.2g})"
        return shown if self.p_value < 0.05 else f"{shown}: within the noise of so many images"


@dataclass(frozen=True)
class ClassChange:
    """One class of the image set."""

    name: str
    images: int
    teacher: float
    """Top-1, per cent."""
    student: float


def difference(teacher: Bool[Tensor, " images"], student: Bool[Tensor, " images"]) -> Difference:
    """Compare two models' hits on the same images; at least one image.

    The bootstrap of a mean over images that are won, lost or alike is a multinomial draw, so it is drawn as one.
    """
    n = len(teacher)
    won, lost = int((student & ~teacher).sum()), int((teacher & ~student).sum())
    shares = [won / n, lost / n, (n - won - lost) / n]
    drawn = np.random.default_rng(0).multinomial(n, shares, RESAMPLES)
    low, high = np.percentile(100 * (drawn[:, 0] - drawn[:, 1]) / n, [2.5, 97.5])
    return Difference(100 * (won - lost) / n, float(low), float(high), won, lost, sign_test(won, lost))


def sign_test(won: int, lost: int) -> float:
    """Two-sided exact binomial p-value at one half (McNemar 1947; Fagerland, Lydersen and Laake 2013, section 2)."""
    n, least = won + lost, min(won, lost)
    logs = [
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2) for i in range(least + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def calibration_error(confidence: Float[Tensor, " images"], hits: Bool[Tensor, " images"]) -> float:
    """Expected calibration error, per cent: 15 bins of equal width (Guo et al., arXiv 1706.04599, equation 3)."""
    bins = (confidence.double() * BINS).long().clamp(0, BINS - 1)
    gap = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, hits.double() - confidence.double())
    return 100 * float(gap.abs().sum() / len(hits))


def classes_that_lost(
    teacher: Bool[Tensor, " images"],
    student: Bool[Tensor, " images"],
    truth: Int[Tensor, " images"],
    names: Sequence[str],
) -> tuple[ClassChange, ...]:
    """At most ``LISTED`` classes of the set that lost images, the one that lost most first.

    Args:
        teacher, student: hits.
        truth: the set's class of each image.
        names: of the set's classes.
    """
    found = []
    for i, name in enumerate(names):
        of = truth == i
        if (count := int(of.sum())) and (lost := int(teacher[of].sum() - student[of].sum())) > 0:
            rates = (100 * float(hits[of].double().mean()) for hits in (teacher, student))
            found.append((lost / count, lost, ClassChange(name, count, *rates)))
    return tuple(change for *_, change in sorted(found, key=lambda f: f[:2], reverse=True)[:LISTED])
