"""Performer: softmax by positive random features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.operator import Operator
from vit2linear.ops._parts import check_positive
from vit2linear.ops.base import SumRule


class PerformerAttention(SumRule):
    """phi(x) = exp(w_r . y - |y|^2 / 2 - c) + 1e-6 for r <= m, y = sqrt(s) x (FAVOR+, arXiv 2009.14794).

    The shift c is the maximum over features for a query, over features and tokens for the keys. It cancels but for the
    1e-6, and the paper's factor 1 / sqrt(m) cancels altogether.
    """

    name = "performer"
    family = "kernel"
    summary = "phi(x) = exp(w_r . y - |y|^2 / 2), y = sqrt(s) x, w_r random and orthogonal, rows sum to 1"
    reference = "Performer, arXiv 2009.14794"
    notes = (
        "The random matrix is drawn once and saved with the weights; the paper draws it anew in training. Needs "
        "many features for peaked maps, where it is near uniform otherwise: a baseline. Does more work than softmax "
        "below 2 m tokens."
    )
    cost = "4 N m d"
    carries = frozenset({"key_mask", "pooling"})
    eps = 1e-15
    """Floor of the row mean: features have one of their own, so the mean is positive but may be tiny."""

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """Performer's options."""

        features: int = 256
        """Random features (m) of a head."""

    projection: Tensor

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        check_positive(self.name, features=options.features)
        self.register_buffer("projection", orthogonal_gaussian(options.features, geometry.head_dim))

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """Shifted exponentials of random projections."""
        matrix = self.projection.to(q.dtype).T
        q, k = q * self.geometry.scale**0.5, k * self.geometry.scale**0.5
        log_q, log_k, half_k = q @ matrix, k @ matrix, k.square().sum(-1, keepdim=True) / 2
        # |q|^2 / 2 is the same in all features of a query, so that its maximum takes it away again.
        shift_q = log_q.amax(-1, keepdim=True)
        log_k = log_k - half_k
        if ctx.key_mask is not None:
            log_k = log_k.masked_fill(~ctx.key_mask[:, None, :, None], float("-inf"))
        shift_k = log_k.amax((-2, -1), keepdim=True)
        return (log_q - shift_q).exp() + 1e-6, (log_k - shift_k).exp() + 1e-6


def orthogonal_gaussian(rows: int, width: int) -> Float[Tensor, "rows width"]:
    """Rows with the law of standard normal vectors, orthogonal within each block of ``width``."""
    blocks = [nn.init.orthogonal_(torch.empty(width, width)) for _ in range(-(-rows // width))]
    return torch.cat(blocks)[:rows] * torch.randn(rows, width).square().sum(-1, keepdim=True).sqrt()
