"""Swin Transformer (arXiv 2103.14030): attention inside windows, with a table of relative position biases."""

from __future__ import annotations

from typing import Any, ClassVar

from jaxtyping import Float
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from vit2linear.context import HeadGeometry
from vit2linear.sites._heads import fused_heads, set_window_size
from vit2linear.sites._windows import SwinSite


class WindowSite(SwinSite):
    """Fused qkv, a bias table, a mask in shifted windows."""

    parameters = ("relative_position_bias_table",)
    methods: ClassVar = {"set_window_size": set_window_size}

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class: several models have a ``WindowAttention`` of their own."""
        return type(module) is WindowAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Heads may be wider or narrower than the input shared among them (``head_dim``)."""
        assert isinstance(module, WindowAttention)
        head_dim = module.qkv.out_features // (3 * module.num_heads)
        return HeadGeometry(module.qkv.in_features, module.num_heads, head_dim, module.scale)

    def heads(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as they are."""
        return fused_heads(site, x)

    def bias(self, site: Any) -> Float[Tensor, "1 heads tokens tokens"]:
        """From the table."""
        bias: Tensor = site._get_rel_pos_bias()
        return bias
