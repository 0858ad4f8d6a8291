"""Landmarks: 2-D average pools of the patches, through which some operators route all tokens."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.ops._parts import check_positive, refuse_key_mask
from vit2linear.ops.base import PlainRule


class LandmarkOperator(PlainRule):
    """An operator whose features compare tokens with m landmarks; its options have a field ``landmarks``.

    Prefix tokens route like all others, but are not pooled. Padding would be pooled with the patches beside it, so a
    key mask is refused.
    """

    family = "landmark"
    carries = frozenset()

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        check_positive(self.name, landmarks=options.landmarks)

    def landmarks(self, patches: int) -> int:
        """The option, but never more than a quarter of the patches; a grid may round it down."""
        return max(1, min(int(self.options.landmarks), patches // 4))

    def pooled_grid(self, ctx: AttentionContext) -> tuple[int, int]:
        """Rows and columns of landmarks on the running grid."""
        refuse_key_mask(self.name, ctx)
        rows, columns = ctx.patch_grid()
        return landmark_grid(rows, columns, self.landmarks(rows * columns))

    def pool(
        self, x: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch heads landmarks head_dim"]:
        """Means of the patches, over the bins of torch's adaptive pooling."""
        (height, width), (rows, columns) = ctx.patch_grid(), self.pooled_grid(ctx)
        patches = x[:, :, ctx.num_prefix :].unflatten(2, (height, width))
        # Two small products are faster than channels-first pooling, and deterministic on a GPU, which that is not.
        pooled = _bins(height, rows, x) @ (_bins(width, columns, x) @ patches).flatten(3)
        landmarks: Tensor = pooled.unflatten(3, (columns, -1)).flatten(2, 3)
        return landmarks


def landmark_grid(rows: int, columns: int, landmarks: int) -> tuple[int, int]:
    """The grid of at most ``landmarks`` cells, about square, that divides ``rows`` x ``columns`` patches."""
    across = min(rows, landmarks, max(1, round((landmarks * rows / columns) ** 0.5)))
    return across, min(columns, landmarks // across)


def _bins(size: int, bins: int, like: Tensor) -> Float[Tensor, "bins size"]:
    """The matrix of adaptive average pooling along one axis."""
    return F.adaptive_avg_pool1d(torch.eye(size, dtype=like.dtype, device=like.device), bins).mT
