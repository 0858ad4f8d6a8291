"""Twins' ``LocallyGroupedAttn``: attention inside windows, which the module cuts itself."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.models.twins import LocallyGroupedAttn
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._grouped import from_windows, into_windows


class LocallyGroupedSite(SiteKind):
    """The map padded with zeros to whole windows; as in the source, padding takes part inside windows (2104.13840)."""

    windowed = True

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is LocallyGroupedAttn

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, LocallyGroupedAttn)
        return HeadGeometry(module.dim, module.num_heads, module.dim // module.num_heads, module.scale)

    def window(self, module: nn.Module) -> int | None:
        """Tokens of a window."""
        assert isinstance(module, LocallyGroupedAttn)
        return int(module.ws**2)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """None: the block passes the size of the map."""
        return None

    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"], size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv of every window, or of the map as it is."""
        grid = window = (site.ws, site.ws)
        if site.global_windows:
            grid = (size[0], size[1])
        else:
            x = into_windows(x.unflatten(1, size), window)
        q, k, v = site.qkv(x).unflatten(-1, (3, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v, AttentionContext(x, grid, state=size)

    def merge(
        self, site: Any, heads: Float[Tensor, "sequences heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch map_tokens channels"]:
        """Windows back in their places, output projection."""
        y = heads.transpose(1, 2).flatten(2)
        if not site.global_windows:
            y = from_windows(y, (site.ws, site.ws), ctx.state).flatten(1, 2)
        out: Tensor = site.proj_drop(site.proj(y))
        return out
