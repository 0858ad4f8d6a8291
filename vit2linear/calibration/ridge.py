"""Ridge regression of a linear layer's change, and what it leaves unexplained on tokens that took no part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Tokens:
    """What a layer saw of one batch."""

    inputs: Float[Tensor, "tokens inputs"]
    missing: Float[Tensor, "tokens outputs"]
    """What the layer's output lacks."""
    weight: Float[Tensor, " tokens"]


@dataclass(frozen=True)
class Step:
    """A change of a layer: ``inputs @ weight.T + bias`` comes closest to what was missing."""

    ridge: float
    weight: Float[Tensor, "outputs inputs"]
    bias: Float[Tensor, " outputs"]
    error: float
    """Mean squared error on the held-out tokens."""
    error_without: float
    """The same without any change."""


def best_step(fit: Iterable[Tokens], held: Sequence[Tokens], ridges: Sequence[float], bias: bool = True) -> Step:
    """Least squares in float64 with a pull towards no change; of all ``ridges`` the one that is best on ``held``.

    Args:
        fit, held: batches; those to fit are read once.
        ridges: in units of the inputs' mean variance.
        bias: whether the layer has a bias that may change.
    """
    sums: list[Tensor] = []
    for t in fit:
        x, y, w = t.inputs.double(), t.missing.double(), t.weight.double()[:, None]
        wx = w * x
        found = [w.sum(), wx.sum(0), wx.T @ x, (w * y).sum(0), wx.T @ y]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    mean_h, gram, mean_r, cross = (total / sums[0] for total in sums[1:])
    if not bias:
        mean_h, mean_r = torch.zeros_like(mean_h), torch.zeros_like(mean_r)
    gram, cross = gram - torch.outer(mean_h, mean_h), cross - torch.outer(mean_h, mean_r)
    unit = gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)

    def error(weight: Tensor, offset: Tensor) -> float:
        parts = [(t.weight @ (t.missing - t.inputs @ weight.T - offset).square().mean(1), t.weight.sum()) for t in held]
        return float(sum(e for e, _ in parts) / sum(n for _, n in parts))

    without = error(torch.zeros_like(cross.T).float(), torch.zeros_like(mean_r).float())
    steps = []
    for ridge in ridges:
        weight = torch.linalg.solve(gram + ridge * unit, cross).T
        offset = mean_r - weight @ mean_h
        steps.append(Step(ridge, weight, offset, error(weight.float(), offset.float()), without))
    return min(steps, key=lambda step: step.error)
