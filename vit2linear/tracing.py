"""One traced program for any number of images, and of any size where that is asked for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.bench import NoRouting
from vit2linear.errors import UnsupportedModelError
from vit2linear.site import sites_of
from vit2linear.sizes import Size, show_size
from vit2linear.sources._description import first_line

ONE_SIZE = "Leave --dynamic out, and export once for each size with --img-size."


def trace(model: nn.Module, size: Size, patch: Size | None = None) -> torch.export.ExportedProgram:
    """``torch.export`` of a timm model on the CPU, in eval mode.

    Args:
        model: built so that it takes images of other sizes, where ``patch`` is given.
        size: height and width in pixels that it is traced with.
        patch: take other sizes too, in multiples of this height and width.

    Raises:
        UnsupportedModelError: it cannot be traced so; the message tells whether that is due to the operators.
    """
    pooled = sorted({site.op.name for site in sites_of(model).values() if site.op.landmarks(4) is not None})
    if patch is not None and pooled:
        raise UnsupportedModelError(
            f"the operator {', '.join(pooled)} cannot be exported with --dynamic: its landmarks follow from the size "
            "of an image by rules that no graph holds.",
            ONE_SIZE,
        )
    if patch is not None and any(site.kind.window(site) is not None for site in sites_of(model).values()):
        raise UnsupportedModelError(
            f"a {type(model).__name__} attends inside windows, so it cannot be exported with --dynamic.", ONE_SIZE
        )
    try:
        return _trace(model, size, patch)
    except Exception as error:  # torch.export fails in many ways, and a model's code is anybody's
        operators = ", ".join(sorted({site.op.name for site in sites_of(model).values()}))
        who = (
            f"a {type(model).__name__}" if _fails_without_operators(model, size, patch) else f"the operator {operators}"
        )
        what = "with --dynamic" if patch else "at a fixed size"
        raise UnsupportedModelError(
            f"{who} cannot be exported {what}: {first_line(error)}.",
            ONE_SIZE if patch else None,
        ) from error


def patch_of(model: Any, size: Size) -> Size:
    """Height and width of a patch in pixels.

    Raises:
        UnsupportedModelError: the size is not in whole patches.
    """
    rows, columns = model.patch_embed.feat_ratio(as_scalar=False)
    if size[0] % rows or size[1] % columns:
        raise UnsupportedModelError(
            f"{show_size(size)} px are not in whole patches of {show_size((rows, columns))} px.",
            "With --dynamic, choose a multiple for --img-size.",
        )
    return rows, columns


def neighbour(size: Size, patch: Size) -> Size:
    """Another size, not square where ``size`` is: one patch less (or more, where there are few) by two patches more."""
    rows = -1 if size[0] > 2 * patch[0] else 1
    return size[0] + rows * patch[0], size[1] + 2 * patch[1]


def random_pixels(model: nn.Module, batch: int, size: Size) -> Float[Tensor, "batch channels height width"]:
    """Normal noise, always the same."""
    channels = int(getattr(model, "in_chans", 3))
    return torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0))


def _trace(model: nn.Module, size: Size, patch: Size | None) -> torch.export.ExportedProgram:
    shape = {0: torch.export.Dim("batch", min=1)}
    if patch is not None:
        shape[2] = patch[0] * torch.export.Dim("rows", min=2)
        shape[3] = patch[1] * torch.export.Dim("columns", min=2)
    try:
        program = torch.export.export(model, (random_pixels(model, 2, size),), dynamic_shapes=(shape,))
    finally:
        for site in sites_of(model).values():
            site.grid_ref.grid = (
                None  # a grid of symbols would keep all that was traced, and nobody could copy the model
            )
    if patch is not None:
        # Code that turns a size into a plain number fixes it, and only another size shows that.
        other = neighbour(size, patch)
        try:
            with torch.no_grad():
                program.module()(random_pixels(model, 1, other))
        except (AssertionError, RuntimeError) as error:
            raise ValueError(f"the graph takes {show_size(size)} px, but not {show_size(other)}") from error
    return program


def _fails_without_operators(model: nn.Module, size: Size, patch: Size | None) -> bool:
    bare = copy.deepcopy(model)
    for site in sites_of(bare).values():
        site.op = NoRouting(site.op.geometry, None)
    try:
        _trace(bare, size, patch)
    except Exception:
        return True
    return False
