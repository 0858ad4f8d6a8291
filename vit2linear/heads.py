"""Heads that timm's ``VisionTransformer`` does not have, for fine-tuned models that came with them.

Each is a subclass under a name, the JSON argument ``head`` of our architecture; weights keep timm's names.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.errors import UnsupportedModelError


class ClassAndMean(VisionTransformer):  # type: ignore[misc]
    """The classifier reads the class token beside the mean of the patches: DINOv2's (arXiv 2304.07193, section 7.1)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.reset_classifier(self.num_classes)

    def pool(self, x: Float[Tensor, "batch tokens channels"], pool_type: str | None = None) -> Tensor:
        """Registers are skipped. Another ``global_pool`` than the class token's is timm's own."""
        if (pool_type or self.global_pool) != "token":
            pooled: Tensor = super().pool(x, pool_type)
            return pooled
        return torch.cat([x[:, 0], x[:, self.num_prefix_tokens :].mean(1)], dim=-1)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """As timm's, at twice the width."""
        super().reset_classifier(num_classes, global_pool)
        self.head_hidden_size = self.embed_dim * (2 if self.global_pool == "token" else 1)
        if num_classes:
            weight = self.patch_embed.proj.weight
            self.head = nn.Linear(self.head_hidden_size, num_classes, device=weight.device, dtype=weight.dtype)
            self.head.train(self.training)


class AttentionPool(nn.Module):
    """One learned query over all tokens: AIMv2's pooling (arXiv 2411.14402)."""

    def __init__(self, width: int, num_heads: int, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.k = nn.Linear(width, width, bias=bias)
        self.v = nn.Linear(width, width, bias=bias)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "batch tokens channels"]) -> Float[Tensor, "batch channels"]:
        """The pooled feature."""
        query = self.query.expand(len(x), -1, -1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (query, self.k(x), self.v(x)))
        pooled: Tensor = self.proj(F.scaled_dot_product_attention(q, k, v).flatten(1))
        return pooled


class Aimv2Pooled(VisionTransformer):  # type: ignore[misc]
    """The pooled feature is AIMv2's, in the place of timm's attention pooling."""

    def __init__(self, num_heads: int = 12, qkv_bias: bool = True, **kwargs: Any) -> None:
        super().__init__(num_heads=num_heads, qkv_bias=qkv_bias, **kwargs)
        self.attn_pool = AttentionPool(self.embed_dim, num_heads, qkv_bias)


HEADS: dict[str, type[VisionTransformer]] = {"cls_mean": ClassAndMean, "aimv2": Aimv2Pooled}


def with_head(model_class: Any, head: str | None) -> Any:
    """``model_class`` with one of ``HEADS``.

    Raises:
        UnsupportedModelError: there is no such head, or ``model_class`` is not the one that it was made for.
    """
    if head is None:
        return model_class
    if head not in HEADS or model_class is not VisionTransformer:
        raise UnsupportedModelError(
            f"'head' is {head!r} on {getattr(model_class, '__name__', model_class)}.",
            f"Known for VisionTransformer: {', '.join(HEADS)}. Upgrade vit2linear.",
        )
    return HEADS[head]
