"""DaViT's ``WindowAttention``; the channel attention in between is linear in the tokens and stays as it is."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.models.davit import WindowAttention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._grouped import from_windows, into_windows


class DaViTWindowSite(SiteKind):
    """Windows cut and padded by the block, without masks or position biases (DaViT, arXiv 2204.03645)."""

    windowed = True

    def matches(self, module: nn.Module) -> bool:
        """Exactly DaViT's class: others of the name have biases."""
        return type(module) is WindowAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, WindowAttention)
        return HeadGeometry(module.dim, module.num_heads, module.dim // module.num_heads, module.scale)

    def window(self, module: nn.Module) -> int | None:
        """Tokens of a window."""
        assert isinstance(module, WindowAttention)
        rows, columns = module.window_size
        return int(rows * columns)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """The block's first convolution, which sees the map before it is padded."""
        return f"{path.rpartition('.')[0]}.cpe1", _map_size

    def project(
        self, site: Any, x: Float[Tensor, "windows window_tokens channels"]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv of every window, or of the map that the windows make up."""
        grid = site.window_size
        if site.global_windows:
            grid = site.grid_ref.grid
            x = from_windows(x, site.window_size, grid).flatten(1, 2)
        q, k, v = site.qkv(x).unflatten(-1, (3, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v, AttentionContext(x, grid)

    def merge(
        self, site: Any, heads: Float[Tensor, "sequences heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "windows window_tokens channels"]:
        """Output projection; windows again, zeros where the block cuts them off."""
        y: Tensor = site.proj(heads.transpose(1, 2).flatten(2))
        return into_windows(y.unflatten(1, ctx.grid), site.window_size) if site.global_windows else y


def _map_size(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
    rows, columns = args[0].shape[-2:]
    return rows, columns
