"""Multi-head linear attention: heads along the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry, no_autocast
from vit2linear.operator import Operator
from vit2linear.ops._parts import check_positive, refuse_key_mask

EPS = 1e-6
"""Floor of the row mean, as in the operator relu."""


class MultiHeadLinearAttention(Operator):
    """A_ij = |W[b(i), b(j)]| relu(q_i) . relu(k_j), rows divided by their sum, b the block (arXiv 2601.07832)."""

    name = "mhla"
    family = "block"
    summary = "|W[b(i), b(j)]| relu(q_i) . relu(k_j) with blocks b of the grid and W learned, rows sum to 1"
    reference = "MHLA, arXiv 2601.07832"
    notes = (
        "The paper's equation 4; its code normalises with queries of other blocks, which is another map. W enters by "
        "its absolute value, so that no row sum can vanish, and prefix tokens, which the paper has not, are a block. "
        "The paper adds a 5x5 depthwise convolution (--local dwc5)."
    )
    cost = "2 N d^2 + (blocks^2 + 1)^2 d^2"
    carries = frozenset()

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """How the grid is cut."""

        blocks: int = 2
        """Blocks along each side of the grid. The paper takes 2 for 14 x 14 patches."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        check_positive(self.name, blocks=options.blocks)
        side = torch.arange(options.blocks, dtype=torch.float32)
        centres = torch.cartesian_prod(side, side)
        distance = (centres[:, None] - centres).square().sum(-1).sqrt()
        mixing = torch.ones(len(centres) + 1, len(centres) + 1)
        # Block 0 is the prefix. The paper's linear rule, whose normalisation of rows cancels in the map, gives the
        # farthest blocks 0, where |W| has no gradient.
        mixing[1:, 1:] = (1 - distance / distance.max().clamp_min(1)).clamp_min(0.05)
        self.mixing = nn.Parameter(mixing)

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Queries times their block's mixture of all blocks' states."""
        (rows, columns), prefix = self._grid(ctx), ctx.num_prefix
        wide = torch.promote_types(v.dtype, torch.float32)
        with no_autocast(v.device):
            phi_q, phi_k = F.relu(q.to(wide)), F.relu(k.to(wide))
            values = torch.cat([v.to(wide), v.new_ones(*v.shape[:3], 1, dtype=wide)], dim=-1)
            (q0, qb), (k0, kb), (v0, vb) = (self._cut(t, rows, columns, prefix) for t in (phi_q, phi_k, values))
            states = torch.cat([(k0.mT @ v0).unsqueeze(2), kb.mT @ vb], dim=2) / v.shape[2]
            mixed = torch.einsum("ab,zhbfd->zhafd", self.mixing.to(wide).abs(), states)
            patches = self._join(qb @ mixed[:, :, 1:], rows, columns)
            out = torch.cat([q0 @ mixed[:, :, 0], patches], dim=2)
            return (out[..., :-1] / (out[..., -1:] + EPS)).to(v.dtype)

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """The routing matrix A."""
        wide = torch.promote_types(q.dtype, torch.float32)
        block = self._block_of(ctx, q.device)
        with no_autocast(q.device):
            mixing = self.mixing.to(wide).abs()[block][:, block]
            kernel = mixing * (F.relu(q.to(wide)) @ F.relu(k.to(wide)).mT)
            return kernel / (kernel.sum(-1, keepdim=True) + EPS * k.shape[2])

    def _block_of(self, ctx: AttentionContext, device: torch.device) -> Int64[Tensor, " tokens"]:
        """The block of every token: 0 for the prefix, then blocks of the grid row by row."""
        rows, columns = self._grid(ctx)
        height, width = self._block(rows, columns)
        row, column = torch.arange(rows, device=device) // height, torch.arange(columns, device=device) // width
        patches = 1 + row[:, None] * self.options.blocks + column
        return F.pad(patches.flatten(), (ctx.num_prefix, 0))

    def _grid(self, ctx: AttentionContext) -> tuple[int, int]:
        refuse_key_mask(self.name, ctx)
        return ctx.patch_grid()

    def _block(self, rows: int, columns: int) -> tuple[int, int]:
        """Rows and columns of a block; at the lower and right edges blocks may be smaller."""
        return -(-rows // self.options.blocks), -(-columns // self.options.blocks)

    def _cut(
        self, x: Float[Tensor, "batch heads tokens dim"], rows: int, columns: int, prefix: int
    ) -> tuple[Float[Tensor, "batch heads prefix dim"], Float[Tensor, "batch heads blocks block_tokens dim"]]:
        """Prefix tokens, and patches block by block, zeros where a block is smaller."""
        (height, width), side = self._block(rows, columns), self.options.blocks
        patches = x[:, :, prefix:].unflatten(2, (rows, columns))
        patches = F.pad(patches, (0, 0, 0, side * width - columns, 0, side * height - rows))
        patches = patches.unflatten(3, (side, width)).unflatten(2, (side, height)).transpose(3, 4)
        return x[:, :, :prefix], patches.flatten(4, 5).flatten(2, 3)

    def _join(
        self, x: Float[Tensor, "batch heads blocks block_tokens dim"], rows: int, columns: int
    ) -> Float[Tensor, "batch heads patches dim"]:
        """Patches row by row again: the inverse of ``_cut``."""
        (height, width), side = self._block(rows, columns), self.options.blocks
        x = x.unflatten(3, (height, width)).unflatten(2, (side, side)).transpose(3, 4)
        return x.flatten(4, 5).flatten(2, 3)[:, :, :rows, :columns].flatten(2, 3)
