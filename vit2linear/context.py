"""What an operator is told besides q, k and v: sizes, tokens, grid, masks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vit2linear.errors import SurgeryError


@dataclass(frozen=True)
class HeadGeometry:
    """Sizes of one site: input width, heads, width of a head, and the factor on q.k."""

    width: int
    num_heads: int
    head_dim: int
    scale: float


@dataclass
class AttentionContext:
    """Everything an operator may need besides q, k and v."""

    x: Float[Tensor, "batch tokens channels"]
    """The normalised block input."""
    grid: tuple[int, int] | None = None
    """Rows and columns of patches, as seen by the patch embedding of this forward."""
    num_prefix: int = 0
    """Tokens before the patches: class, distillation, registers."""
    key_mask: Bool[Tensor, "batch keys"] | None = None
    """True where a key is a real token."""
    bias: Float[Tensor, "#batch #heads queries keys"] | None = None
    """Additive bias on the logits."""

    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of the patches, checked against the number of tokens."""
        tokens = self.x.shape[1] - self.num_prefix
        if self.grid is None or self.grid[0] * self.grid[1] != tokens:
            raise SurgeryError(
                f"the patch grid is {self.grid}, but {tokens} patch tokens follow {self.num_prefix} prefix tokens.",
                "Tokens may not be dropped or added between the patch embedding and an operator that uses the grid.",
            )
        return self.grid


class GridRef:
    """The patch grid of the running forward; one per model, filled by a hook on the patch embedding.

    Blocks receive (batch, tokens, channels) only, and the square root of the number of tokens is no grid. An instance
    is the hook itself, so that copying a model copies hook and reference together.
    """

    def __init__(self, num_prefix: int = 0) -> None:
        self.grid: tuple[int, int] | None = None
        self.num_prefix = num_prefix

    def __call__(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook on a timm ``PatchEmbed``: pixels in, patches out."""
        height, width = args[0].shape[-2:]
        rows, columns = module.dynamic_feat_size((height, width))
        self.grid = (rows, columns)


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off where it is on: for what needs float32 sums."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
