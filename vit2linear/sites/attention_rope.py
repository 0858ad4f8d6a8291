"""timm's ``AttentionRope``: RoPE-ViT, Perception Encoder, Sapiens2, the vision towers of DeepSeek and Qwen3."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.layers import AttentionRope
from torch import Tensor, nn

from vit2linear.sites._timm import RotarySite


class AttentionRopeSite(RotarySite):
    """Fused or separate projections, grouped keys and values."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is AttentionRope

    def projections(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, ...]:
        """One projection, or three."""
        if site.qkv is None:
            return site.q_proj(x), site.k_proj(x), site.v_proj(x)
        parts: tuple[Tensor, ...] = site.qkv(x).chunk(3, -1)
        return parts
