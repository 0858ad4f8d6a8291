"""Windows on a map: what lies in them as one sequence and back; and all that Swin's two attentions have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Float
from timm.models.swin_transformer import window_partition, window_reverse
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, GridReader
from vit2linear.errors import SurgeryError
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._heads import BIAS, projected

MASK = "shifted-window-mask"


@dataclass(frozen=True)
class Windows:
    """How a block of timm cut its map: rolled by ``-shift``, padded below and to the right, cut into windows."""

    grid: tuple[int, int]
    """Rows and columns of the map."""
    size: tuple[int, int]
    shift: tuple[int, int] = (0, 0)

    def join(self, windows: Float[Tensor, "windows rows columns channels"]) -> Float[Tensor, "batch tokens channels"]:
        """Every token of each map in row-major order, padding left out."""
        (rows, columns), (down, right) = self.grid, self._padding()
        x: Tensor = window_reverse(windows, self.size, rows + down, columns + right)[:, :rows, :columns]
        return x.roll(self.shift, (1, 2)).flatten(1, 2)

    def split(self, tokens: Float[Tensor, "batch tokens channels"]) -> Float[Tensor, "windows rows columns channels"]:
        """The inverse of ``join``, with zeros for the padding, which the block cuts off."""
        down, right = self._padding()
        x = tokens.unflatten(1, self.grid).roll((-self.shift[0], -self.shift[1]), (1, 2))
        windows: Tensor = window_partition(F.pad(x, (0, 0, 0, right, 0, down)), self.size)
        return windows

    def _padding(self) -> tuple[int, int]:
        return -self.grid[0] % self.size[0], -self.grid[1] % self.size[1]


def known_map(site: Any) -> tuple[int, int]:
    """Rows and columns of the running forward's map."""
    grid: tuple[int, int] | None = site.grid_ref.grid
    if grid is None:
        raise SurgeryError("a site with global windows ran outside its model, so its map is not known.")
    return grid


def map_grid(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> tuple[int, int]:
    """Rows and columns of an output (batch, rows, columns, channels)."""
    return output.shape[1], output.shape[2]


class SwinSite(SiteKind):
    """Attention over (windows, tokens, channels) with a bias and a mask of (windows, tokens, tokens)."""

    windowed = True
    parameters: ClassVar[tuple[str, ...]]
    """What makes the bias."""
    block: Any
    """Knows window and shift, also after a resize of the model."""

    @abstractmethod
    def heads(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v such that ``scale`` q.k is the logit."""

    @abstractmethod
    def bias(self, site: Any) -> Float[Tensor, "1 heads tokens tokens"]:
        """The relative position bias of one window."""

    def at(self, model: nn.Module, path: str) -> SiteKind:
        """With its block."""
        self.block = model.get_submodule(path.rpartition(".")[0])
        return self

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """A bias everywhere, a mask in every second block: also where this map is one window, for larger images."""
        words = "an additive bias on the logits for each head and offset inside a window"
        found = {BIAS: Feature(words, "bias", self.parameters, globally="lost")}
        if any(self.block.target_shift_size):
            words = "a mask between tokens that only the cyclic shift has brought into one window"
            found[MASK] = Feature(words, "bias", globally="moot")
        return found

    def window(self, module: nn.Module) -> int:
        """Rows times columns."""
        rows, columns = module.window_size  # type: ignore[misc]
        return int(rows * columns)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader]:
        """The downsampling before the blocks of the stage: what it returns is the map."""
        return path.rpartition(".blocks.")[0] + ".downsample", map_grid

    def project(
        self, site: Any, x: Float[Tensor, "windows inside channels"], mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """Inside windows as timm does it; or over the map, where neither window bias nor mask has a meaning."""
        size, bias = self.block.window_size, None
        if site.global_windows:
            windows = Windows(known_map(site), size, self.block.shift_size)
            x = windows.join(x.unflatten(1, size))
            ctx = AttentionContext(x, windows.grid, state=windows)
        else:
            if mask is not None and MASK not in site.dropped:
                bias = mask.repeat(len(x) // len(mask), 1, 1)[:, None]
            if BIAS not in site.dropped:
                bias = self.bias(site) if bias is None else self.bias(site) + bias
            ctx = AttentionContext(x, size, bias=bias)
        return *self.heads(site, x), ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "windows inside channels"]:
        """Output projection; windows again, where they were undone."""
        y = projected(site, heads)
        return y if ctx.state is None else ctx.state.split(y).flatten(1, 2)
