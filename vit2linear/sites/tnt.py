"""TNT's ``Attention`` (arXiv 2103.00112): over the pixels inside each patch, and over the patches."""

from __future__ import annotations

import math
from typing import Any

from jaxtyping import Float
from timm.models.tnt import TNT, Attention, PixelEmbed
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry, patch_embedding_grid
from vit2linear.site import SiteKind


class TntSite(SiteKind):
    """One projection for q and k, one for v. A patch is the window of the inner attention."""

    models = ("TNT",)
    pixels: int | None = None
    """Of a patch, at the inner sites."""

    def at(self, model: nn.Module, path: str) -> TntSite:
        """Inner or outer, by the names that TNT's block gives them."""
        assert isinstance(model, TNT)
        self.pixels = math.prod(model.pixel_embed.new_patch_size) if path.endswith("attn_in") else None
        return self

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is Attention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, Attention)
        return HeadGeometry(module.qk.in_features, module.num_heads, module.head_dim, module.scale)

    def window(self, module: nn.Module) -> int | None:
        """Pixels of a patch, at the inner sites."""
        return self.pixels

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader]:
        """The pixel embedding tells both grids: that of the pixels in a patch and that of the patches."""
        return "pixel_embed", pixel_grid if self.pixels else patch_embedding_grid

    def num_prefix(self, model: nn.Module, path: str) -> int:
        """The class token is among the patches only."""
        return 0 if self.pixels else super().num_prefix(model, path)

    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qk and v; the inner sites' batch holds every patch of every image."""
        q, k = site.qk(x).unflatten(-1, (2, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        v = site.v(x).unflatten(-1, (site.num_heads, -1)).transpose(1, 2)
        return q, k, v, AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix)

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        out: Tensor = site.proj_drop(site.proj(heads.transpose(1, 2).flatten(2)))
        return out


def pixel_grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int]:
    """Rows and columns of the pixels in one patch."""
    assert isinstance(module, PixelEmbed)
    rows, columns = module.new_patch_size
    return rows, columns
