"""Rectified attention."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext, no_autocast
from vit2linear.operator import Operator


class RectifiedAttention(Operator):
    """A = relu(s q k^T + bias) / N: pointwise in place of the softmax, still quadratic (arXiv 2309.08586)."""

    name = "rela"
    family = "kernel"
    summary = "relu(q k^T / sqrt(d)) / N, quadratic, rows sum to anything"
    reference = "Replacing softmax with ReLU in Vision Transformers, arXiv 2309.08586"
    notes = (
        "Not linear in the number of tokens: it removes the softmax only, and is slower than softmax for want of a "
        "fused kernel. The division by the number of keys is the paper's; ReLA (arXiv 2104.07012) normalises the "
        "output instead."
    )
    cost = "2 N^2 d"
    carries = frozenset({"key_mask", "bias", "pooling"})
    linear = False

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """relu(s q k^T + bias) v / N."""
        wide = torch.promote_types(v.dtype, torch.float32)
        with no_autocast(v.device):
            weights, count = self._weights(q.to(wide), k.to(wide), ctx)
            values = v.to(wide)
            if ctx.key_mask is not None:
                values = torch.where(ctx.key_mask[:, None, :, None], values, 0.0)
            return (weights @ values / count).to(v.dtype)

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """relu(s q k^T + bias) / N."""
        wide = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device):
            weights, count = self._weights(q.to(wide), k.to(wide), ctx)
            return weights / count

    def _weights(self, q: Tensor, k: Tensor, ctx: AttentionContext) -> tuple[Tensor, Tensor | int]:
        """Rectified logits, and for each query how many keys it may see."""
        logits = (self.geometry.scale * q) @ k.mT
        if ctx.bias is not None:
            logits = logits + ctx.bias
        if ctx.key_mask is not None:
            logits = logits.masked_fill(~ctx.key_mask[:, None, None], float("-inf"))
        elif ctx.bias is None:
            return F.relu(logits), k.shape[-2]
        # A pair excluded by an infinite bias counts as little as a masked key.
        return F.relu(logits), (logits > float("-inf")).sum(-1, keepdim=True).clamp_min(1)
