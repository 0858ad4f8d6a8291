"""timm's ``AttentionRope``: RoPE-ViT, Perception Encoder, Sapiens2, the vision towers of DeepSeek and Qwen3."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.layers import AttentionRope
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._timm import context, gated_output, grouped, rotate, split_heads


class AttentionRopeSite(SiteKind):
    """Rotary positions, fused or separate projections, grouped keys and values, norms and gate."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is AttentionRope

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The queries' heads: keys and values are repeated to as many."""
        assert isinstance(module, AttentionRope)
        width = (module.q_proj if module.qkv is None else module.qkv).in_features
        return HeadGeometry(width, module.num_heads, module.head_dim, module.scale)

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """Projections, qk-norm, rotation, then each key head for its group of query heads; timm's order."""
        ctx = context(site, x, attn_mask, is_causal)
        parts = site.qkv(x).chunk(3, -1) if site.qkv is not None else (site.q_proj(x), site.k_proj(x), site.v_proj(x))
        q, k, v = (split_heads(part, site.head_dim) for part in parts)
        q, k = (rotate(site, heads, rope, v) for heads in (site.q_norm(q), site.k_norm(k)))
        return q, grouped(site, k), grouped(site, v), ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Norm, gate, output projection."""
        return gated_output(site, heads, ctx)
