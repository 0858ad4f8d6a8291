"""LUNA: a feature map that is learned down to its scalar function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.operator import Operator
from vit2linear.ops._parts import check_positive, linear
from vit2linear.ops.base import SumRule


class LUNAAttention(SumRule):
    """phi(x) = [psi_l(w_i . x + b_i)] / sqrt(m) for i <= m, l <= L, rows divided by their sum (arXiv 2512.08061).

    psi is a perceptron from one number to L, relu between and after; all of it is shared by heads, queries and keys.
    """

    name = "luna"
    family = "learned kernel"
    summary = "phi(x) = [psi_l(w_i . x + b_i)] / sqrt(m), psi a scalar perceptron, rows sum to 1"
    reference = "LUNA, arXiv 2512.08061"
    notes = (
        "No code was found, so this follows the paper's formula, without its optional envelope h(x). The paper's "
        "perceptron has 64 hidden units; with 8 it stays cheap beside a ViT block. Output weights of psi start "
        "positive, so that no feature starts dead."
    )
    cost = "2 N m (d + L d + h + h L)"
    carries = frozenset({"key_mask", "pooling"})

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """LUNA's options."""

        projections: int = 32
        """Directions w_i (m); time and memory grow with projections times hidden."""
        channels: int = 2
        """Outputs of psi (L); there are projections times channels features."""
        hidden: int = 8
        """Hidden units of psi (h)."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        m, channels, hidden = options.projections, options.channels, options.hidden
        check_positive(self.name, projections=m, channels=channels, hidden=hidden)
        check_positive(self.name, **{"channels times hidden": channels * hidden})  # one by one, in turn
        self.directions = nn.Linear(geometry.head_dim, m)
        nn.init.normal_(self.directions.weight, std=geometry.head_dim**-0.5)
        nn.init.zeros_(self.directions.bias)
        self.scalar_in = nn.Linear(1, hidden)
        self.scalar_out = nn.Linear(hidden, channels)
        nn.init.uniform_(self.scalar_out.weight, 0, 2 * hidden**-0.5)
        nn.init.zeros_(self.scalar_out.bias)

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """The learned map of q and of k."""
        return self._phi(q), self._phi(k)

    def _phi(self, x: Tensor) -> Tensor:
        t = linear(x, self.directions)
        first, second = self.scalar_in, self.scalar_out
        psi = [bias.to(x.dtype).expand_as(t) for bias in second.bias]
        # Unit by unit: all hidden units at once would be a tensor as wide as a block's.
        for slope, shift, column in zip(first.weight, first.bias, second.weight.T, strict=True):
            unit = F.relu(torch.addcmul(shift.to(x.dtype), slope.to(x.dtype), t))
            psi = [torch.addcmul(y, unit, a.to(x.dtype)) for y, a in zip(psi, column, strict=True)]
        root: float = self.options.projections**-0.5
        return F.relu(torch.cat(psi, dim=-1)) * root
