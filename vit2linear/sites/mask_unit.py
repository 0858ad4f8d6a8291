"""Hiera's ``MaskUnitAttention``: inside mask units or global, queries max-pooled where a stage begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any

from jaxtyping import Float
from timm.models.hiera import MaskUnitAttention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._pooled import pooled


class MaskUnitSite(SiteKind):
    """Tokens come unrolled (arXiv 2306.00989), and are put in rows for operators that know the grid.

    Unrolled means: the place in a mask unit runs slowest, its lowest bits first, then the mask unit. So the tokens that
    are pooled together lie a quarter of the sequence apart, and stay as they are where queries are pooled.
    """

    windowed = True

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is MaskUnitAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, MaskUnitAttention)
        return HeadGeometry(module.dim, module.heads, module.head_dim, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """Pooled queries, at the beginning of a stage."""
        assert isinstance(module, MaskUnitAttention)
        return pooled(keys=False, queries=module.q_stride > 1)

    def window(self, module: nn.Module) -> int | None:
        """Tokens of a mask unit, before pooling."""
        assert isinstance(module, MaskUnitAttention)
        return module.q_stride * module.window_size if module.use_mask_unit_attn else None

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """The map of the block, which the model knows, noted when tokens are unrolled; none but in two dimensions."""
        _, size = model.reroll.schedule[int(path.split(".")[1])]  # type: ignore[union-attr,index]
        return ("unroll", _MapSize(*size)) if len(size) == 2 else None

    def project(
        self, site: Any, x: Float[Tensor, "batch map_tokens channels"]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, max-pooled queries; in rows unless queries are pooled or tokens were dropped."""
        unit = site.q_stride * site.window_size
        side, units = isqrt(unit), x.shape[1] // unit
        grid = site.grid_ref.grid
        if inside := site.use_mask_unit_attn and not site.global_windows:
            x = x.unflatten(1, (unit, units)).transpose(1, 2).flatten(0, 1)
            grid = (side, side)
        order = None
        if site.q_stride > 1 or grid is None or grid[0] * grid[1] != x.shape[1]:
            grid = None
        else:
            order = _Order.of(grid, side)
            x = order.into_rows(x)
        q, k, v = site.qkv(x).unflatten(-1, (3, site.heads, site.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        if site.q_stride > 1:
            q = q.unflatten(2, (site.q_stride, -1)).amax(2)
        return q, k, v, AttentionContext(x, grid, state=(order, units if inside else None))

    def merge(
        self, site: Any, heads: Float[Tensor, "sequences heads queries head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch map_queries channels"]:
        """Unrolled again, output projection."""
        order, units = ctx.state
        y = heads.transpose(1, 2).flatten(2)
        y = y if order is None else order.out_of_rows(y)
        y = y if units is None else y.unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2)
        out: Tensor = site.proj(y)
        return out


@dataclass(frozen=True)
class _MapSize:
    """A reader of a grid that is known from the start."""

    rows: int
    columns: int

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
        return self.rows, self.columns


@dataclass(frozen=True)
class _Order:
    """Sizes of the axes of unrolled tokens, and the order of the axes in which tokens lie row by row."""

    sizes: tuple[int, ...]
    axes: tuple[int, ...]

    @classmethod
    def of(cls, grid: tuple[int, int], side: int) -> _Order:
        """For mask units of ``side`` x ``side`` tokens: rows and columns of each bit, then of the units."""
        bits = side.bit_length() - 1
        sizes = (2, 2) * bits + (grid[0] // side, grid[1] // side)
        return cls(sizes, (*range(2 * bits, -1, -2), *range(2 * bits + 1, 0, -2)))

    def into_rows(self, x: Float[Tensor, "batch tokens channels"]) -> Float[Tensor, "batch tokens channels"]:
        return _permuted(x, self.sizes, self.axes)

    def out_of_rows(self, x: Float[Tensor, "batch tokens channels"]) -> Float[Tensor, "batch tokens channels"]:
        inverse = sorted(range(len(self.axes)), key=self.axes.__getitem__)
        return _permuted(x, [self.sizes[axis] for axis in self.axes], inverse)


def _permuted(x: Tensor, sizes: Sequence[int], axes: Sequence[int]) -> Tensor:
    permuted: Tensor = x.unflatten(1, tuple(sizes)).permute(0, *(1 + axis for axis in axes), -1)
    return permuted.flatten(1, -2)
