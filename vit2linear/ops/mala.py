"""Magnitude-aware linear attention."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.ops._parts import elu_plus_one
from vit2linear.ops.base import KernelOperator, Row


class MALA(KernelOperator):
    """A = K / sum(K) + (K - mean(K)) / N for K = s phi(q) phi(k)^T (MALA, arXiv 2507.00698)."""

    name = "mala"
    family = "affine"
    signed = True
    summary = "A = K / sum(K) + (K - mean(K)) / N, K = s phi(q) phi(k)^T, phi(x) = elu(x) + 1; rows sum to 1, signed"
    reference = "MALA, arXiv 2507.00698"
    notes = (
        "The first term forgets the magnitude of the query, as every normalised kernel does; the second keeps it. "
        "The paper's networks add rotary positions, an output gate and a 5x5 depthwise convolution (`--local dwc5`); "
        "the first two are left out, since the copied model has positions and no gate."
    )
    cost = "2 N d^2"
    carries = frozenset({"key_mask", "pooling"})
    eps = 1e-6
    """Floor of the row mean, as in the paper's code."""

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """s (elu(q) + 1), elu(k) + 1."""
        return (elu_plus_one(q)) * self.geometry.scale, elu_plus_one(k)

    def row_rule(self, z: Float[Tensor, "batch maps queries 1"]) -> Row:
        """a = 1 + 1 / (z + eps), b = -z."""
        return Row(1 + (z + self.eps).reciprocal(), -z)
