"""Where tokens are routed: the operator's implicit N x N map beside the softmax map, site by site and head by head.

Each model is seen on its own inputs. The map of an operator that is linear in v is its answer to v = identity; that of
another is the mean over channels of its Jacobian, d heads[i, c] / d v[j, c], on the image itself (for an operator that
is linear in v they are the same). What is added after the routing, such as a local branch, is no part of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext
from vit2linear.distill.forward import last_features
from vit2linear.operator import Operator
from vit2linear.site import LinearAttention, sites_of

TOP = 10
"""Tokens that a query looks at most, at most a quarter of them."""
PROBES = 8
"""Random directions of channels in which a Jacobian is sampled."""


@dataclass(frozen=True)
class HeadRouting:
    """One head, means over images and queries."""

    cosine: float
    """Between rows of the two maps."""
    overlap: float
    """Share of the tokens that the teacher looks at most which the student looks at most, too."""
    rank: float
    """Effective rank of the student's map (Roy and Vetterli, EUSIPCO 2007): exp of the entropy of singular values."""
    teacher_rank: float
    entropy: float | None
    """Of the student's rows, as a share of log N; ``None`` where its map is signed."""
    teacher_entropy: float
    divergence: float | None
    """KL(teacher | student), nats; ``None`` where the map is signed."""


@dataclass(frozen=True)
class SiteRouting:
    """One site."""

    how: str
    """``map``, or ``jacobian`` where the operator is not linear in v."""
    signed: bool
    """Whether entries of the student's map are negative."""
    heads: tuple[HeadRouting, ...]

    def mean(self, key: str) -> float:
        """Of a figure that every head has, over heads."""
        return statistics.fmean(getattr(head, key) for head in self.heads)


Maps = dict[str, Tensor]
"""Site to (batch, heads, queries, keys); windows count as a batch."""


def compare_routing(theirs: Maps, mine: Maps, student: nn.Module) -> dict[str, SiteRouting]:
    """The sites whose maps have the same shape in both models; windows that were joined have not.

    Args:
        theirs, mine: of teacher and student, converted with ``softmax`` and with the operators, on the same images.
        student: knows how each of its maps was found.
    """
    sites = sites_of(student)
    found = {}
    for path, a in theirs.items():
        b = mine.get(path)
        if b is not None and a.shape == b.shape:
            signed = bool((b < -1e-6 * b.abs().amax()).any())
            heads = tuple(_head(x, y, signed) for x, y in zip(a.unbind(1), b.unbind(1), strict=True))
            found[path] = SiteRouting("map" if sites[path].op.has_map else "jacobian", signed, heads)
    return found


def routing_maps(model: nn.Module, pixels: Float[Tensor, "batch channels height width"]) -> Maps:
    """The map of every site on the model's own inputs, float32 on the CPU.

    Args:
        model: converted, in eval mode.
        pixels: a few images as they are evaluated; memory grows with the square of the tokens.
    """
    maps: Maps = {}

    def keep(path: str) -> Any:
        def hook(op: Operator, args: Any, _: Any) -> None:
            q, k, v, ctx = args
            found = op.map(q, k, ctx) if op.has_map else jacobian_map(op, q, k, v, ctx)
            maps[path] = found.unflatten(1, (-1, op.streams if op.has_map else 1)).mean(2).float().cpu()

        return hook

    sites: Mapping[str, LinearAttention] = sites_of(model)
    hooks = [site.op.register_forward_hook(keep(path)) for path, site in sites.items()]
    try:
        with torch.no_grad():
            last_features(model, pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return maps


def jacobian_map(
    op: Operator,
    q: Float[Tensor, "batch heads queries head_dim"],
    k: Float[Tensor, "batch heads keys head_dim"],
    v: Float[Tensor, "batch heads keys value_dim"],
    ctx: AttentionContext,
) -> Float[Tensor, "batch heads queries keys"]:
    """Mean over channels of d heads[i, c] / d v[j, c], by Hutchinson's estimate of the trace over ``PROBES`` signs."""
    generator = torch.Generator().manual_seed(0)
    found = q.new_zeros(*q.shape[:3], k.shape[2])
    with torch.enable_grad():
        values = v.detach().clone().requires_grad_(True)
        heads = op.forward(q, k, values, ctx)
        for _ in range(PROBES):
            signs = (torch.randint(0, 2, (v.shape[-1],), generator=generator) * 2 - 1).to(v)
            answered = (heads * signs).sum(-1)  # batch, heads, queries
            for i in range(answered.shape[2]):
                (slope,) = torch.autograd.grad(answered[:, :, i].sum(), values, retain_graph=True)
                found[:, :, i] += (slope * signs).sum(-1) / (PROBES * v.shape[-1])
    return found


def _head(a: Float[Tensor, "batch queries keys"], b: Float[Tensor, "batch queries keys"], signed: bool) -> HeadRouting:
    keys = a.shape[-1]
    count = max(1, min(TOP, keys // 4))
    theirs, mine = (torch.zeros_like(m).scatter_(-1, m.topk(count).indices, 1.0) for m in (a, b))
    return HeadRouting(
        cosine=float(F.cosine_similarity(a, b, dim=-1).mean()),
        overlap=float((theirs * mine).sum(-1).mean() / count),
        rank=_rank(b),
        teacher_rank=_rank(a),
        entropy=None if signed else _entropy(b),
        teacher_entropy=_entropy(a),
        divergence=None if signed else _divergence(a, b),
    )


def _rows(m: Tensor) -> Tensor:
    m = m.double().clamp_min(0)
    return m / m.sum(-1, keepdim=True).clamp_min(1e-30)


def _entropy(m: Tensor) -> float:
    rows = _rows(m)
    return float(-torch.xlogy(rows, rows).sum(-1).mean() / torch.log(torch.tensor(float(m.shape[-1]))))


def _divergence(a: Tensor, b: Tensor) -> float:
    p, q = _rows(a), _rows(b).clamp_min(1e-12)
    return float((torch.xlogy(p, p) - p * q.log()).sum(-1).mean())


def _rank(m: Tensor) -> float:
    values = torch.linalg.svdvals(m.double())
    shares = values / values.sum(-1, keepdim=True).clamp_min(1e-30)
    return float((-torch.xlogy(shares, shares).sum(-1)).exp().mean())
