"""What several operators are built from: means over tokens, output gates, learned key positions, option checks."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError

TABLE_SIDE = 14
"""Rows and columns of a table of key positions: the grid of 224 pixels in patches of 16."""


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1 as exp(min(x, 0)) + max(x, 0): torch's own elu is eight times slower on CPUs."""
    low = x.clamp_max(0)
    return low.exp() + F.relu(x) if x.requires_grad else low.exp_().add_(F.relu(x))


def token_mean(
    x: Float[Tensor, "*batch tokens width"], valid: Bool[Tensor, "*#batch tokens 1"] | None
) -> Float[Tensor, "*batch 1 width"]:
    """The mean over valid tokens."""
    if valid is None:
        return x.mean(-2, keepdim=True)
    return torch.where(valid, x, 0.0).sum(-2, keepdim=True) / valid.sum(-2, keepdim=True).clamp_min(1)


def unit_gate(geometry: HeadGeometry) -> nn.Linear:
    """A linear map of the block input that is 1 at the start, for ``gated``."""
    gate = nn.Linear(geometry.width, geometry.num_heads * geometry.head_dim)
    nn.init.zeros_(gate.weight)
    nn.init.ones_(gate.bias)
    return gate


def gated(
    heads: Float[Tensor, "batch heads tokens head_dim"], gate: nn.Linear, ctx: AttentionContext
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Heads times the gate of their tokens, in the heads' type."""
    factor: Tensor = linear(ctx.x.to(heads.dtype), gate).unflatten(-1, heads.shape[1::2]).transpose(1, 2)
    return heads * factor


def linear(x: Float[Tensor, "*batch width"], layer: nn.Linear) -> Float[Tensor, "*batch outputs"]:
    """The layer in the type of x."""
    return F.linear(x, layer.weight.to(x.dtype), layer.bias.to(x.dtype))


def key_table(geometry: HeadGeometry) -> nn.Parameter:
    """Positions for ``add_key_positions``, zero at the start."""
    return nn.Parameter(torch.zeros(geometry.num_heads * geometry.head_dim, TABLE_SIDE, TABLE_SIDE))


def add_key_positions(
    k: Float[Tensor, "batch heads keys head_dim"], table: Float[Tensor, "channels side side"], ctx: AttentionContext
) -> Float[Tensor, "batch heads keys head_dim"]:
    """Patch keys plus their positions: the table, resized bilinearly to the running grid; prefix keys as they are."""
    rows, columns = (_hat(n, k) for n in ctx.patch_grid())
    positions = (rows @ table.to(k.dtype) @ columns.T).flatten(1).unflatten(0, k.shape[1::2]).transpose(1, 2)
    return torch.cat([k[:, :, : ctx.num_prefix], k[:, :, ctx.num_prefix :] + positions], dim=2)


def _hat(size: int, like: Tensor) -> Float[Tensor, "size side"]:
    """Weights of bilinear resizing along one axis."""
    # A product and not F.interpolate, whose gradient has no fixed order of summation on GPUs.
    cells = torch.arange(TABLE_SIDE, dtype=like.dtype, device=like.device)
    centres = (torch.arange(size, dtype=like.dtype, device=like.device) + 0.5) * TABLE_SIDE / size - 0.5
    return (1 - (centres.clamp(0, TABLE_SIDE - 1)[:, None] - cells).abs()).clamp_min(0)


def refuse_key_mask(name: str, ctx: AttentionContext) -> None:
    """For operators whose positions are relative to the whole grid, so that padding would move the tokens."""
    if ctx.key_mask is not None:
        raise SurgeryError(
            f"a key mask reached the operator {name!r}, whose positions depend on the whole grid.",
            "Use images without padding, or an operator that carries key masks.",
        )


LARGEST_OPTION = 4096
"""Features, landmarks or blocks of one head, whose width is a few dozen."""


def check_positive(name: str, **options: int | float) -> None:
    """Raise ``RecipeError`` for an option of operator ``name`` that is not above 0, or beyond reason."""
    for key, value in options.items():
        if not 0 < value <= LARGEST_OPTION:
            raise RecipeError(f"operator {name!r}: {key} is {value}, must be above 0 and at most {LARGEST_OPTION:,}.")
