"""timm's ``Attention``: plain ViTs, DeiT, DINOv2, CLIP, SigLIP, register and GAP variants."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.layers import Attention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._timm import context, gated_output


class AttentionSite(SiteKind):
    """Fused qkv, optional qk-norm, optional norm and gate before the output projection."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class: a subclass may compute something else."""
        return type(module) is Attention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, Attention)
        return HeadGeometry(module.qkv.in_features, module.num_heads, module.head_dim, module.scale)

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, then qk-norm; timm's order."""
        ctx = context(site, x, attn_mask, is_causal)
        heads = site.qkv(x).unflatten(-1, (3, site.num_heads, site.head_dim))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return site.q_norm(q), site.k_norm(k), v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Norm, gate, output projection."""
        return gated_output(site, heads, ctx)
