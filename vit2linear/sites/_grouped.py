"""Maps cut into windows from the upper left corner, padded with zeros at the right and at the bottom."""

from __future__ import annotations

from jaxtyping import Float
from timm.models.davit import window_partition, window_reverse
from torch import Tensor
from torch.nn import functional as F


def into_windows(
    x: Float[Tensor, "batch rows columns channels"], window: tuple[int, int]
) -> Float[Tensor, "windows tokens channels"]:
    """Every window as a sequence, the windows of an image one after the other."""
    rows, columns = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, -columns % window[1], 0, -rows % window[0]))
    windows: Tensor = window_partition(x, window)
    return windows.flatten(1, 2)


def from_windows(
    x: Float[Tensor, "windows tokens channels"], window: tuple[int, int], grid: tuple[int, int]
) -> Float[Tensor, "batch rows columns channels"]:
    """The inverse of ``into_windows`` on a map of ``grid`` tokens: the padding is cut off."""
    rows, columns = (side + -side % part for side, part in zip(grid, window, strict=True))
    whole: Tensor = window_reverse(x.unflatten(1, window), window, rows, columns)
    return whole[:, : grid[0], : grid[1]]
