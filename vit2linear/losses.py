"""Distillation losses by name: one decorated function each, from what student and teacher computed to a scalar.

Every loss is unit-free (scaled by the teacher's own energy, or an angle, or nats), so that weights mean the same on
every model; a mean over images, so that a batch may be shared among processes; and computed in float32 whatever the
autocast type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.errors import UnknownNameError


@dataclass
class Outputs:
    """What a forward leaves behind for the losses; stage ``attention`` fills ``sites`` only."""

    sites: dict[str, Float[Tensor, "batch tokens channels"]] = field(default_factory=dict)
    """Attention outputs after the output projection, before the residual, by site path."""
    tokens: tuple[Float[Tensor, "batch _ _"], ...] = ()
    """Final features, after the final norm: one tensor, or one of each branch."""
    pooled: Float[Tensor, "batch channels"] | None = None
    """What the head reads."""
    logits: Float[Tensor, "batch classes"] | None = None
    """Absent for a headless model."""


Loss = Callable[[Outputs, Outputs], Tensor]
LOSSES: dict[str, Loss] = {}


def loss(function: Loss) -> Loss:
    """Register a loss under its function's name."""
    LOSSES[function.__name__] = function
    return function


def check_losses(weights: Mapping[str, float]) -> None:
    """Raise ``UnknownNameError`` for a name that is no loss."""
    for name in weights:
        if name not in LOSSES:
            raise UnknownNameError("loss", name, LOSSES)


def total_loss(weights: Mapping[str, float], student: Outputs, teacher: Outputs) -> Tensor:
    """The weighted sum of the named losses."""
    return torch.stack([w * LOSSES[name](student, teacher) for name, w in weights.items()]).sum()


def unexplained(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error as a fraction of the teacher's energy, mean over images: 0 is equal, 1 as bad as answering zero."""
    s, t = student.float().flatten(1), teacher.float().flatten(1)
    return ((s - t).square().sum(1) / t.square().sum(1).clamp_min(1e-12)).mean()


@loss
def site_output(student: Outputs, teacher: Outputs) -> Tensor:
    """Mean over sites of the normalised squared error of the attention output (LoLCATs; normalised per site)."""
    return torch.stack([unexplained(y, teacher.sites[path]) for path, y in student.sites.items()]).mean()


@loss
def feature(student: Outputs, teacher: Outputs) -> Tensor:
    """Final tokens: 0.9 (1 - cosine) + 0.1 smooth-L1 in units of the teacher's RMS, plus 1 - cosine of the pooled one.

    The form of IronViT (arXiv 2609.29252, phase II-B), made unit-free.
    """
    assert student.pooled is not None and teacher.pooled is not None
    tokens = [_token_distance(s.float(), t.float()) for s, t in zip(student.tokens, teacher.tokens, strict=True)]
    pooled = 1 - F.cosine_similarity(student.pooled.float(), teacher.pooled.float(), dim=-1).mean()
    return torch.stack(tokens).mean() + pooled


@loss
def logits(student: Outputs, teacher: Outputs) -> Tensor:
    """T^2 KL(teacher || student) of the class distributions at temperature T = 2 (Hinton et al., arXiv 1503.02531)."""
    assert student.logits is not None and teacher.logits is not None
    temperature = 2.0
    s = F.log_softmax(student.logits.float() / temperature, -1)
    t = F.log_softmax(teacher.logits.float() / temperature, -1)
    return temperature**2 * F.kl_div(s, t, reduction="batchmean", log_target=True)


def _token_distance(s: Tensor, t: Tensor) -> Tensor:
    rms = t.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
    angle = 1 - F.cosine_similarity(s, t, dim=-1).mean()
    return 0.9 * angle + 0.1 * F.smooth_l1_loss(s / rms, t / rms)
