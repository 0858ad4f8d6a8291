"""Rank-augmented linear attention."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.ops._parts import elu_plus_one, gated, token_mean, unit_gate
from vit2linear.ops.base import SumRule, count_keys


class RALA(SumRule):
    """K_ij = phi(q_i) . alpha_j phi(k_j), rows divided by their sum, heads times a gate (RALA, arXiv 2411.07635).

    phi(x) = elu(x) + 1; alpha = N softmax over tokens of s (mean phi(q)) . phi(k_j).
    """

    name = "rala"
    family = "kernel"
    summary = "K = phi(q) [alpha phi(k)]^T, phi(x) = elu(x) + 1, alpha = N softmax_j(s mean phi(q) . phi(k_j)), gated"
    reference = "RALA, arXiv 2411.07635"
    notes = (
        "The output gate is a linear map of the block input and starts at 1. The paper's code rotates the numerator "
        "by rotary positions, left out since the copied model has positions, and adds a 5x5 depthwise convolution "
        "before the gate: `--local dwc5`, here after it."
    )
    cost = "2 N d^2"

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        self.output_gate = unit_gate(geometry)

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """elu(q) + 1, and elu(k) + 1 weighted by how much the mean query asks for the key."""
        phi_q, phi_k = elu_plus_one(q), elu_plus_one(k)
        valid = None if ctx.key_mask is None else ctx.key_mask[:, None, :, None]
        scores = phi_k @ token_mean(phi_q, valid).transpose(-2, -1) * self.geometry.scale
        if valid is not None:
            scores = scores.masked_fill(~valid, float("-inf"))
        return phi_q, phi_k * (scores.softmax(-2) * count_keys(k, ctx))

    def finish(
        self,
        heads: Float[Tensor, "batch heads queries value_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Heads times a linear map of the block input, without activation."""
        return gated(heads, self.output_gate, ctx)
