"""timm's ``DiffAttention``: differential attention (arXiv 2410.05258) in plain ViTs."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.layers import DiffAttention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._differential import difference, paired_geometry, paired_heads
from vit2linear.sites._timm import context


class DiffAttentionSite(SiteKind):
    """Four heads of the operator for one of the source; the subtraction comes after the routing."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is DiffAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Heads of one set and half of the values."""
        assert isinstance(module, DiffAttention)
        return paired_geometry(module, module.qkv.in_features)

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, the sets and halves as heads, qk-norm."""
        ctx = context(site, x, attn_mask, is_causal)
        q, k, v = paired_heads(site, *site.qkv(x).chunk(3, dim=-1))
        return q, k, v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Difference, norm, output projection."""
        out: Tensor = site.proj_drop(site.proj(site.norm(difference(site, heads))))
        return out
