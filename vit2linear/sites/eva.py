"""timm's ``EvaAttention``: EVA, EVA-02, DINOv3, LingBot-Vision, timm's own ViTs with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._timm import context, gated_output, rotate, split_heads


class EvaSite(SiteKind):
    """Rotary positions, norms, gate; one projection with its biases apart (none for the keys), or three projections."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is EvaAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, EvaAttention)
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
        """Projections, qk-norm, rotation; timm's order."""
        ctx = context(site, x, attn_mask, is_causal)
        if site.qkv is not None:
            bias = None if site.q_bias is None else torch.cat((site.q_bias, site.k_bias, site.v_bias))
            q, k, v = F.linear(x, site.qkv.weight, bias).chunk(3, -1)
        else:
            q, k, v = site.q_proj(x), site.k_proj(x), site.v_proj(x)
        q, k, v = (split_heads(part, site.head_dim) for part in (q, k, v))
        return rotate(site, site.q_norm(q), rope, v), rotate(site, site.k_norm(k), rope, v), v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Norm, gate, output projection."""
        return gated_output(site, heads, ctx)
