"""Exact softmax attention: the teacher, the baseline, and the proof that surgery changes nothing else."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.attention import Operator
from vit2linear.context import AttentionContext


class SoftmaxAttention(Operator):
    """softmax(scale q k^T + bias), through torch's fused kernel; quadratic in the number of tokens."""

    name = "softmax"
    family = "exact"
    summary = "softmax(q k^T / sqrt(d)), exact and quadratic"
    reference = "Attention Is All You Need, arXiv 1706.03762"
    carries = frozenset({"key_mask", "bias"})
    linear = False
    cost = "2 N^2 d"

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """softmax(scale q k^T + bias) v."""
        mask = _mask(ctx)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.geometry.scale)

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """softmax(scale q k^T + bias)."""
        logits = q @ k.transpose(-2, -1) * self.geometry.scale
        mask = _mask(ctx)
        if mask is not None:
            logits = (
                logits.masked_fill(~mask, float("-inf")) if mask.dtype.is_floating_point is False else logits + mask
            )
        return logits.softmax(-1)


def _mask(ctx: AttentionContext) -> Tensor | None:
    """The context's key mask or bias as torch's attention takes it."""
    if ctx.key_mask is None:
        return ctx.bias
    mask = ctx.key_mask[:, None, None]
    return mask if ctx.bias is None else ctx.bias.masked_fill(~mask, float("-inf"))
