"""timm's ``DiffParallelScalingBlock``: the parallel block with differential attention (arXiv 2410.05258)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.models.vision_transformer import DiffParallelScalingBlock
from torch import Tensor, nn

from vit2linear.context import HeadGeometry
from vit2linear.sites._differential import difference, paired_geometry, paired_heads
from vit2linear.sites.parallel_block import ParallelBlockSite


class DiffParallelBlockSite(ParallelBlockSite):
    """The parallel block; its heads are those of differential attention."""

    output = "out_proj"

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is DiffParallelScalingBlock

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Heads of one set and half of the values."""
        assert isinstance(module, DiffParallelScalingBlock)
        return paired_geometry(module, module.in_proj.in_features)

    def heads(self, site: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sets and halves as heads, qk-norm."""
        return paired_heads(site, q, k, v)

    def joined(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"]
    ) -> Float[Tensor, "batch tokens channels"]:
        """The difference of the sets."""
        return difference(site, heads)
