"""ELU + 1 linear attention."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.ops._parts import elu_plus_one
from vit2linear.ops.base import SumRule


class ELUAttention(SumRule):
    """phi(x) = elu(x) + 1, rows divided by their sum (Linear Transformer, arXiv 2006.16236, equation 7)."""

    name = "elu"
    family = "kernel"
    summary = "phi(x) = elu(x) + 1, rows sum to 1"
    reference = "Linear Transformer, arXiv 2006.16236"
    carries = frozenset({"key_mask", "pooling"})

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """elu(q) + 1, elu(k) + 1."""
        return elu_plus_one(q), elu_plus_one(k)
