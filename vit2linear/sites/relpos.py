"""timm's ViTs with relative positions: a table as in Swin or a network as in Swin V2, of each block or of all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._heads import BIAS, fused_heads, projected


class RelPosSite(SiteKind):
    """Fused qkv, optional qk-norm, a child ``rel_pos`` or the model's biases as an argument."""

    shared = ""
    """The model's module of biases for all blocks, if it has one."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is RelPosAttention

    def at(self, model: nn.Module, path: str) -> SiteKind:
        """With the biases that come as an argument."""
        self.shared = "shared_rel_pos" if getattr(model, "shared_rel_pos", None) is not None else ""
        return self

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, RelPosAttention)
        return HeadGeometry(module.qkv.in_features, module.num_heads, module.head_dim, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """The biases, of the block where it has some."""
        own = ("rel_pos",) if module.rel_pos is not None else ()
        words = "an additive bias on the logits for each head and offset between two patches"
        return {BIAS: Feature(words, "bias", own, shared=self.shared)} if own or self.shared else {}

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        shared_rel_pos: Float[Tensor, "1 heads tokens tokens"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, then qk-norm; the block's own biases come before the shared ones."""
        bias = None
        if BIAS not in site.dropped:
            bias = shared_rel_pos if site.rel_pos is None else site.rel_pos.get_bias()
        ctx = AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, bias=bias)
        q, k, v = fused_heads(site, x)
        return site.q_norm(q), site.k_norm(k), v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        return projected(site, heads)
