"""PiT (arXiv 2103.16302): plain attention in stages, with the patches pooled between them."""

from __future__ import annotations

from typing import Any

from timm.models.pit import PoolingVisionTransformer
from torch import nn

from vit2linear.context import GridReader
from vit2linear.sites.attention import AttentionSite


class PitSite(AttentionSite):
    """``Attention`` whose grid is that of its stage."""

    models = ("PoolingVisionTransformer",)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader]:
        """What makes the stage's map: its pooling, or the patch embedding; paths are ``transformers.STAGE. ...``."""
        stage = int(path.split(".")[1])
        return f"transformers.{stage}.pool" if stage else "patch_embed", map_grid

    def num_prefix(self, model: nn.Module, path: str) -> int:
        """Class and distillation token."""
        assert isinstance(model, PoolingVisionTransformer)
        return int(model.num_tokens)


def map_grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int]:
    """Rows and columns of the map (batch, channels, rows, columns) that comes out, alone or beside the class tokens."""
    rows, columns = (output[0] if isinstance(output, tuple) else output).shape[-2:]
    return rows, columns
