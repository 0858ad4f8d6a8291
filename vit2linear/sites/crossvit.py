"""CrossViT (arXiv 2103.14899): plain attention in branches of different patch sizes.

Its cross attention has one query, so its cost is linear already: it is no site.
"""

from __future__ import annotations

from typing import Any

from timm.models.crossvit import PatchEmbed
from torch import nn

from vit2linear.context import GridReader
from vit2linear.sites.attention import AttentionSite


class CrossVitSite(AttentionSite):
    """``Attention`` whose grid is that of its branch."""

    models = ("CrossVit",)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader]:
        """The branch's patch embedding; paths are ``blocks.BLOCK.blocks.BRANCH.LAYER.attn``."""
        return f"patch_embed.{path.split('.')[3]}", fixed_grid

    def num_prefix(self, model: nn.Module, path: str) -> int:
        """A class token in each branch."""
        return 1


def fixed_grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int]:
    """The grid of CrossViT's ``PatchEmbed``, which takes one image size only."""
    assert isinstance(module, PatchEmbed)
    (rows, columns), (height, width) = module.img_size, module.patch_size
    return rows // height, columns // width
