"""BEiT (arXiv 2106.08254) and BEiT v2 (2208.06366): relative position biases of each block, of all blocks, or both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jaxtyping import Float
from timm.models.beit import Attention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._heads import BIAS, fused_heads, projected, set_window_size


class BeitSite(SiteKind):
    """Fused qkv with separate biases, a table of biases with own entries for the class token."""

    methods: ClassVar = {"set_window_size": set_window_size}
    shared = ""
    """The model's module of biases for all blocks, if it has one."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is Attention

    def at(self, model: nn.Module, path: str) -> SiteKind:
        """With the biases that come as an argument."""
        self.shared = "rel_pos_bias" if getattr(model, "rel_pos_bias", None) is not None else ""
        return self

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Heads may be wider or narrower than the input shared among them (``attn_head_dim``)."""
        assert isinstance(module, Attention)
        head_dim = module.qkv.out_features // (3 * module.num_heads)
        return HeadGeometry(module.qkv.in_features, module.num_heads, head_dim, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """The biases, wherever they come from."""
        own = ("relative_position_bias_table", "relative_position_index")
        table = module.relative_position_bias_table is not None
        if not (table or self.shared):
            return {}
        words = "an additive bias on the logits for each head and offset between two patches"
        return {BIAS: Feature(words, "bias", own if table else (), shared=self.shared)}

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        shared_rel_pos_bias: Float[Tensor, "heads tokens tokens"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv and the sum of the biases."""
        bias = None
        if BIAS not in site.dropped:
            bias = None if shared_rel_pos_bias is None else shared_rel_pos_bias[None]
            if site.relative_position_bias_table is not None:
                own = site._get_rel_pos_bias()
                bias = own if bias is None else own + bias
        ctx = AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, bias=bias)
        return *fused_heads(site, x), ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        return projected(site, heads)
