"""cosFormer on a grid: ReLU attention that falls off with distance."""

from __future__ import annotations

from math import pi

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext
from vit2linear.ops._parts import refuse_key_mask
from vit2linear.ops.base import SumRule


class CosFormerAttention(SumRule):
    """K_ij = relu(q_i) . relu(k_j) cos(a_i - a_j) cos(b_i - b_j), rows divided by their sum.

    a = pi row / 2 rows and b = pi column / 2 columns (cosFormer, arXiv 2202.08791, and its product form
    on images, Vicinity Attention, arXiv 2206.10552).
    """

    name = "cosformer"
    family = "kernel"
    summary = "K = relu(q) relu(k)^T cos(row angle) cos(column angle) between tokens, rows sum to 1"
    reference = "cosFormer, arXiv 2202.08791; Vicinity Attention, arXiv 2206.10552"
    notes = (
        "The two-dimensional form, since raster order puts vertical neighbours far apart; the product of the two "
        "cosines, where Vicinity Attention by default takes their sum. Prefix tokens stand at the first patch. Four "
        "times the cost of relu."
    )
    cost = "8 N d^2"
    carries = frozenset()

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """relu(x) times the four products of cosines and sines of its token's angles."""
        refuse_key_mask(self.name, ctx)
        waves = _waves(ctx, q)[:, :, None]
        return (F.relu(q)[..., None, :] * waves).flatten(-2), (F.relu(k)[..., None, :] * waves).flatten(-2)


def _waves(ctx: AttentionContext, like: Tensor) -> Float[Tensor, "tokens 4"]:
    """cos a cos b, cos a sin b, sin a cos b, sin a sin b of every token; angles of prefix tokens are 0."""
    rows, columns = (torch.arange(n, dtype=like.dtype, device=like.device) * (pi / 2 / n) for n in ctx.patch_grid())
    angles = F.pad(torch.cartesian_prod(rows, columns), (0, 0, ctx.num_prefix, 0))
    a, b = angles[:, :1], angles[:, 1:]
    return torch.cat([a.cos() * b.cos(), a.cos() * b.sin(), a.sin() * b.cos(), a.sin() * b.sin()], dim=-1)
