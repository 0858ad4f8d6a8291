"""Exact softmax attention: the teacher, the baseline, and the proof that surgery changes nothing else."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext
from vit2linear.operator import Operator


class SoftmaxAttention(Operator):
    """softmax(scale q k^T + bias), through torch's fused kernel; quadratic in the number of tokens."""

    name = "softmax"
    family = "exact"
    summary = "softmax(q k^T / sqrt(d)), exact and quadratic"
    reference = "Attention Is All You Need, arXiv 1706.03762"
    carries = frozenset({"key_mask", "bias", "head_mix", "pooling"})
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
        if ctx.head_mix is not None:
            return self.map(q, k, ctx) @ v
        mask = _mask(ctx)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.geometry.scale)

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """softmax(scale q k^T + bias), heads mixed before and after where the source does."""
        logits = q @ k.transpose(-2, -1) * self.geometry.scale
        mix, mask = ctx.head_mix, _mask(ctx)
        if mix is not None:
            logits = mix.logits(logits.movedim(1, -1)).movedim(-1, 1)
        if mask is not None:
            logits = logits + mask if mask.dtype.is_floating_point else logits.masked_fill(~mask, float("-inf"))
        rows = logits.softmax(-1)
        return rows if mix is None else mix.maps(rows.movedim(1, -1)).movedim(-1, 1)


def _mask(ctx: AttentionContext) -> Tensor | None:
    """The context's key mask or bias as torch's attention takes it."""
    if ctx.key_mask is None:
        return ctx.bias
    mask = ctx.key_mask[:, None, None]
    return mask if ctx.bias is None else ctx.bias.masked_fill(~mask, float("-inf"))
