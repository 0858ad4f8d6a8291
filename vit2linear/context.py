"""What an operator is told besides q, k and v: sizes, tokens, grid, masks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit2linear.errors import SurgeryError


@dataclass(frozen=True)
class HeadGeometry:
    """Sizes of one site: input width, heads, width of a head, and the factor on q.k."""

    width: int
    num_heads: int
    head_dim: int
    scale: float


@dataclass(frozen=True)
class HeadMix:
    """Talking heads (arXiv 2003.02436): linear maps over the heads of the logits and of the softmax's rows."""

    logits: nn.Module
    maps: nn.Module


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
    head_mix: HeadMix | None = None
    """Mixing of the heads, where the source has it."""
    state: Any = None
    """What the site's ``project`` hands to its ``merge``; operators leave it alone."""

    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of the patches, checked against the number of tokens."""
        tokens = self.x.shape[1] - self.num_prefix
        if self.grid is None or self.grid[0] * self.grid[1] != tokens:
            raise SurgeryError(
                f"the patch grid is {self.grid}, but {tokens} patch tokens follow {self.num_prefix} prefix tokens.",
                "Tokens may not be dropped or added between the patch embedding and an operator that uses the grid.",
            )
        return self.grid


GridReader = Callable[[nn.Module, tuple[Any, ...], Any], tuple[int, int] | None]
"""Rows and columns of patches from the module, the inputs and the output of a forward."""


class GridRef:
    """The patch grid of the running forward, filled by a hook on the module that tells it: one per such module.

    Blocks receive (batch, tokens, channels) only, and the square root of the number of tokens is no grid. An instance
    is the hook itself, so that copying a model copies hook and reference together.
    """

    def __init__(self, num_prefix: int = 0, read: GridReader | None = None) -> None:
        self.grid: tuple[int, int] | None = None
        self.num_prefix = num_prefix
        self.read = read

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook."""
        self.grid = None if self.read is None else self.read(module, args, output)


def patch_embedding_grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
    """The grid of a timm ``PatchEmbed``: pixels in, patches out."""
    rows, columns = module.dynamic_feat_size(tuple(args[0].shape[-2:]))  # type: ignore[operator]
    return rows, columns


def no_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Switch autocast off where it is on: for what needs float32 sums."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
