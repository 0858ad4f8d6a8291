"""Efficient attention: softmax over features times softmax over tokens."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.ops.base import PlainRule, count_keys


class EfficientAttention(PlainRule):
    """A = softmax over features of q, times softmax over tokens of k (Efficient Attention, arXiv 1812.01243)."""

    name = "efficient"
    family = "kernel"
    summary = "A = softmax_features(q) softmax_tokens(k)^T, rows sum to 1"
    reference = "Efficient Attention, arXiv 1812.01243"
    notes = (
        "No division, bounded features, and no factor on q k: copied weights give flatter rows than softmax. The "
        "paper's code adds the input inside the module; in a ViT that is the block's residual."
    )
    cost = "2 N d^2"
    carries = frozenset({"key_mask", "pooling"})

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """Softmax of q over features and, times the number of keys, of k over valid tokens."""
        count = count_keys(k, ctx)
        if ctx.key_mask is not None:
            k = k.masked_fill(~ctx.key_mask[:, None, :, None], float("-inf"))
        return q.softmax(-1), k.softmax(-2) * count
