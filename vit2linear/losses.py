"""Distillation losses by name: one decorated function each, from what student and teacher computed to a scalar.

Every loss is a mean over images, so that a batch may be shared among processes, and computed in float32 whatever the
autocast type. All but the plain squared errors (``*_mse``, as papers have them) are unit-free: scaled by the teacher's
own energy, or an angle, or nats, so that weights mean the same on every model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from vit2linear.errors import UnknownNameError


@dataclass
class Outputs:
    """What a forward leaves behind for the losses; stage ``attention`` fills ``sites`` and ``maps`` only."""

    sites: dict[str, Float[Tensor, "batch tokens channels"]] = field(default_factory=dict)
    """Attention outputs after the output projection, before the residual, by site path."""
    maps: dict[str, Float[Tensor, "batch heads queries keys"]] = field(default_factory=dict)
    """Routing maps, where a loss needs them."""
    tokens: tuple[Float[Tensor, "batch _ _"], ...] = ()
    """Final features, after the final norm: one tensor, or one of each branch."""
    pooled: Float[Tensor, "batch channels"] | None = None
    """What the head reads."""
    logits: Float[Tensor, "batch classes"] | None = None
    """Absent for a headless model."""
    labels: Int[Tensor, " batch"] | None = None
    """Of the teacher: the user's own labels, as the model's classes."""


@dataclass(frozen=True)
class Loss:
    """A loss, and the fields of ``Outputs`` that it reads."""

    function: Callable[[Outputs, Outputs, Objective], Tensor]
    needs: frozenset[str]


@dataclass(frozen=True)
class Objective:
    """What a stage minimises: a weighted sum of losses."""

    weights: Mapping[str, float]
    temperature: float = 2.0
    label_smoothing: float = 0.1

    def __post_init__(self) -> None:
        """Raise ``UnknownNameError`` for a name that is no loss."""
        for name in self.weights:
            if name not in LOSSES:
                raise UnknownNameError("loss", name, LOSSES)

    @property
    def needs(self) -> frozenset[str]:
        """The fields of ``Outputs`` that are read."""
        return frozenset().union(*(LOSSES[name].needs for name in self.weights))

    def __call__(self, student: Outputs, teacher: Outputs) -> Float[Tensor, ""]:
        """The loss of one batch."""
        return torch.stack([w * LOSSES[n].function(student, teacher, self) for n, w in self.weights.items()]).sum()


LOSSES: dict[str, Loss] = {}


def loss(*needs: str) -> Callable[[Callable[[Outputs, Outputs, Objective], Tensor]], None]:
    """Register a loss under its function's name; ``needs`` are fields of ``Outputs``."""

    def register(function: Callable[[Outputs, Outputs, Objective], Tensor]) -> None:
        LOSSES[function.__name__] = Loss(function, frozenset(needs))

    return register


def unexplained(student: Tensor, teacher: Tensor) -> Tensor:
    """Squared error as a fraction of the teacher's energy, mean over images: 0 is equal, 1 as bad as answering zero."""
    s, t = student.float().flatten(1), teacher.float().flatten(1)
    return ((s - t).square().sum(1) / t.square().sum(1).clamp_min(1e-12)).mean()


# At the sites: means over them.


@loss("sites")
def site_output(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Unexplained energy of the attention output (LoLCATs, arXiv 2410.10254, normalised by site)."""
    return _mean(unexplained, student.sites, teacher.sites)


@loss("sites")
def site_mse(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Squared error of the attention output, not normalised: the source paper's, with weight 50 (arXiv 2609.35745)."""
    return _mean(_mse, student.sites, teacher.sites)


@loss("sites")
def site_l1(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Absolute error of the attention output over the teacher's magnitude (Attention Surgery, arXiv 2509.24899)."""

    def distance(s: Tensor, t: Tensor) -> Tensor:
        return ((s - t).abs().mean((1, 2)) / t.abs().mean((1, 2)).clamp_min(1e-6)).mean()

    return _mean(distance, student.sites, teacher.sites)


@loss("sites")
def site_cosine(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """1 - cosine of the attention output, by token; blind to magnitude."""
    return _mean(_angle, student.sites, teacher.sites)


@loss("maps")
def map_kl(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """KL divergence of the routing map's rows from the teacher's, mean over heads and queries (arXiv 2411.09702).

    For maps that are not negative only; an entry of exactly zero counts as 1e-6.
    """

    def divergence(s: Tensor, t: Tensor) -> Tensor:
        return (torch.xlogy(t, t) - t * s.clamp_min(1e-6).log()).sum(-1).mean()

    return _mean(divergence, student.maps, teacher.maps)


@loss("maps")
def map_mse(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Squared error of the routing maps, not normalised: the source paper's, with weight 1e4 (arXiv 2609.35745)."""
    return _mean(_mse, student.maps, teacher.maps)


# At the end of the model.


@loss("tokens", "pooled")
def feature(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Final tokens: 0.9 (1 - cosine) + 0.1 smooth-L1 in units of the teacher's RMS, plus 1 - cosine of the pooled one.

    The form of IronViT (arXiv 2609.29252, phase II-B), made unit-free.
    """
    assert student.pooled is not None and teacher.pooled is not None

    def distance(s: Tensor, t: Tensor) -> Tensor:
        rms = t.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
        return 0.9 * _angle(s, t) + 0.1 * F.smooth_l1_loss(s / rms, t / rms)

    return _mean(distance, student.tokens, teacher.tokens) + _angle(student.pooled.float(), teacher.pooled.float())


@loss("tokens")
def feature_mse(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """Squared error of the final tokens, not normalised (ViT-AdaLA, arXiv 2603.16063, stage 2)."""
    return _mean(_mse, student.tokens, teacher.tokens)


@loss("tokens")
def relational(student: Outputs, teacher: Outputs, _: Objective) -> Tensor:
    """1 - agreement of the cosines between all pairs of final tokens, rows normalised (arXiv 2504.00037)."""

    def disagreement(s: Tensor, t: Tensor) -> Tensor:
        rows = [F.normalize(x, dim=-1) for x in (s, t)]
        return _angle(*(x @ x.mT for x in rows))

    return _mean(disagreement, student.tokens, teacher.tokens)


@loss("logits")
def logits(student: Outputs, teacher: Outputs, objective: Objective) -> Tensor:
    """T^2 times the KL divergence of the class distribution from the teacher's, at temperature T (arXiv 1503.02531)."""
    assert student.logits is not None and teacher.logits is not None
    temperature = objective.temperature
    s = F.log_softmax(student.logits.float() / temperature, -1)
    t = F.log_softmax(teacher.logits.float() / temperature, -1)
    return temperature**2 * F.kl_div(s, t, reduction="batchmean", log_target=True)


@loss("logits", "labels")
def labels(student: Outputs, teacher: Outputs, objective: Objective) -> Tensor:
    """Cross-entropy with the user's own labels, smoothed; an image without one (-1) counts as 0."""
    assert student.logits is not None and teacher.labels is not None
    z, smoothing = student.logits.float(), objective.label_smoothing
    entropies = F.cross_entropy(z, teacher.labels, ignore_index=-1, label_smoothing=smoothing, reduction="none")
    return entropies.mean()


def _mean(
    distance: Callable[[Tensor, Tensor], Tensor],
    student: Mapping[str, Tensor] | tuple[Tensor, ...],
    teacher: Mapping[str, Tensor] | tuple[Tensor, ...],
) -> Tensor:
    """Mean of a distance over sites or branches, in float32."""
    mine, theirs = (x if isinstance(x, Mapping) else dict(enumerate(x)) for x in (student, teacher))
    return torch.stack([distance(s.float(), theirs[at].float()) for at, s in mine.items()]).mean()  # type: ignore[index]


def _mse(s: Tensor, t: Tensor) -> Tensor:
    return F.mse_loss(s, t)


def _angle(s: Tensor, t: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(s, t, dim=-1).mean()
