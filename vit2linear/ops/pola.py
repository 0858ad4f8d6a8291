"""Polarity-aware linear attention."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import RecipeError
from vit2linear.ops._parts import add_key_positions, gated, key_table, refuse_key_mask, unit_gate
from vit2linear.ops.base import SumRule


class PolaAttention(SumRule):
    """Same-sign products route half of the channels, opposite-sign products the other (arXiv 2501.15061).

    x+ = relu(x)^p and x- = relu(-x)^p of x / softplus(gamma), with p = 1 + 4 sigmoid(theta) for each channel.
    """

    name = "pola"
    family = "learned kernel"
    summary = "two maps a head: [q+, q-] [k+, k-]^T and [q-, q+] [k+, k-]^T, x+- = relu(+-x)^p, rows sum to 1"
    reference = "PolaFormer, arXiv 2501.15061"
    notes = (
        "Key positions (resized to the running grid) start at zero and the output gate at 1. The paper adds a 5x5 "
        "depthwise convolution, `--local dwc5`; there it is gated too, here it comes after the gate."
    )
    cost = "4 N d^2"
    carries = frozenset()
    streams = 2

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        if geometry.head_dim % 2:
            raise RecipeError(f"operator 'pola': a head width of {geometry.head_dim} cannot be halved.")
        self.gamma = nn.Parameter(torch.zeros(geometry.num_heads, 1, geometry.head_dim))
        self.theta = nn.Parameter(torch.zeros(geometry.num_heads, 1, geometry.head_dim))
        self.positions = key_table(geometry)
        self.output_gate = unit_gate(geometry)

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """[q+, q-] and [q-, q+] of each head in turn, [k+, k-] twice."""
        refuse_key_mask(self.name, ctx)
        k = add_key_positions(k, self.positions, ctx)
        gain = F.softplus(self.gamma.to(q.dtype))
        power = 1 + 4 * self.theta.to(q.dtype).sigmoid()
        q_plus, q_minus = _polar(q / gain, power)
        phi_k = torch.cat(_polar(k / gain, power), dim=-1)
        same, opposite = torch.cat([q_plus, q_minus], dim=-1), torch.cat([q_minus, q_plus], dim=-1)
        return torch.stack([same, opposite], dim=2).flatten(1, 2), phi_k.repeat_interleave(2, dim=1)

    def finish(
        self,
        heads: Float[Tensor, "batch heads queries value_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Heads times a linear map of the block input, without activation."""
        return gated(heads, self.output_gate, ctx)


def _polar(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """relu(x)^p and relu(-x)^p."""
    return F.relu(x).pow(power), F.relu(-x).pow(power)
