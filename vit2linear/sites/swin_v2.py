"""Swin Transformer V2 (arXiv 2111.09883): cosine attention inside windows, with biases from a small network."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Float
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import HeadGeometry
from vit2linear.sites._heads import fused_heads
from vit2linear.sites._windows import SwinSite


class CosineWindowSite(SwinSite):
    """q and k normalised, a learned logit scale of at most 100 for each head, continuous relative position bias."""

    parameters = ("cpb_mlp",)

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class: several models have a ``WindowAttention`` of their own."""
        return type(module) is WindowAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The usual scale, which ``heads`` makes up for."""
        assert isinstance(module, WindowAttention)
        head_dim = module.dim // module.num_heads
        return HeadGeometry(module.dim, module.num_heads, head_dim, head_dim**-0.5)

    def heads(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, Tensor, Tensor]:
        """The learned scale goes into q, and k gets entries of the order of 1, as operators know them from qk-norm."""
        q, k, v = fused_heads(site, x)
        scale = site.logit_scale.clamp(max=math.log(100.0)).exp()
        return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1) * q.shape[-1] ** 0.5, v

    def bias(self, site: Any) -> Float[Tensor, "1 heads tokens tokens"]:
        """16 sigmoid(network of the logarithmic offset), paper section 3.3."""
        table: Tensor = site.cpb_mlp(site.relative_coords_table).flatten(0, 2)
        return 16 * table[site.relative_position_index].permute(2, 0, 1)[None].sigmoid()
