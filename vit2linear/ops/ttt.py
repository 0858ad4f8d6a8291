"""Test-time training: an inner model, trained on keys and values by one step, answers the queries."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry, no_autocast
from vit2linear.operator import Operator
from vit2linear.ops._parts import linear
from vit2linear.ops.base import count_keys

SCALE = 1 / 3
"""Factor on the inner loss: 9^(-1/2) for the nine weights of a 3 x 3 kernel, for both inner models."""


class TTTAttention(Operator):
    """f(q; W - dL/dW) with f(x) = (x W1) * silu(x W2) and L = -mean_j f(k_j) . v_j / 3 (ViT^3, arXiv 2512.01643)."""

    name = "ttt"
    family = "test-time training"
    summary = "f(q; W - dL/dW), f(x) = (x W1) * silu(x W2), L = -mean f(k) . v / 3, and the same with a 3x3 convolution"
    reference = "ViT^3, arXiv 2512.01643"
    notes = (
        "The paper's extra head, a 3x3 convolution as inner model, has projections of its own and a zero-initialised "
        "map into the copied heads in place of d more inputs of the output projection; it sees patches only. "
        "Not linear in v, so there is no routing map. At 196 patches it is slower than softmax."
    )
    cost = "6 N d^2"
    has_map = False

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        heads, dim = geometry.num_heads, geometry.head_dim
        self.w1 = nn.Parameter(torch.empty(heads, dim, dim))
        self.w2 = nn.Parameter(torch.empty(heads, dim, dim))
        self.kernel = nn.Parameter(torch.empty(dim, 9))
        self.inputs = nn.Linear(geometry.width, 3 * dim)
        self.output = nn.Linear(dim, heads * dim, bias=False)
        for weight in (self.w1, self.w2, self.kernel, self.inputs.weight):
            nn.init.trunc_normal_(weight, std=0.02)
        nn.init.zeros_(self.inputs.bias)
        nn.init.zeros_(self.output.weight)

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """The SwiGLU heads, and on patches the convolution."""
        wide = torch.promote_types(v.dtype, torch.float32)
        with no_autocast(v.device):
            heads = self._swiglu(q.to(wide), k.to(wide), v.to(wide), ctx)
            local = self._convolution(ctx.x.to(wide), ctx).unflatten(2, (q.shape[1], -1)).transpose(1, 2)
            prefix = ctx.num_prefix
            return torch.cat([heads[:, :, :prefix], heads[:, :, prefix:] + local], dim=2).to(v.dtype)

    def _swiglu(self, q: Tensor, k: Tensor, v: Tensor, ctx: AttentionContext) -> Tensor:
        """(q W1') * silu(q W2') with weights of each image and head."""
        if ctx.key_mask is not None:
            mask = ctx.key_mask[:, None, :, None]
            k, v = torch.where(mask, k, 0.0), torch.where(mask, v, 0.0)
        w1, w2 = self.w1.to(q.dtype), self.w2.to(q.dtype)
        z1, z2 = k @ w1, k @ w2
        gate = z2.sigmoid()
        error = v * (-SCALE / count_keys(k, ctx))  # dL / df(k)
        g1 = k.mT @ (error * z2 * gate)
        g2 = k.mT @ (error * z1 * gate * (1 + z2 * (1 - gate)))
        return (q @ (w1 - clipped(g1))) * F.silu(q @ (w2 - clipped(g2)))

    def _convolution(
        self, x: Float[Tensor, "batch tokens channels"], ctx: AttentionContext
    ) -> Float[Tensor, "batch patches outputs"]:
        """A depthwise convolution by the trained kernel of each image, mapped to the channels of the heads."""
        grid, prefix, dtype = ctx.patch_grid(), ctx.num_prefix, x.dtype
        qkv = linear(x[:, prefix:], self.inputs)
        count: Tensor | int = qkv.shape[1]
        if ctx.key_mask is not None:
            mask = ctx.key_mask[:, prefix:]
            qkv = torch.where(mask[:, :, None], qkv, 0.0)
            count = mask.sum(-1)[:, None, None].clamp_min(1)
        q, k, v = qkv.mT.chunk(3, dim=1)
        gradient = _windows(k, grid) @ (v * (-SCALE / count)).unsqueeze(-1)
        kernel = self.kernel.to(dtype).unsqueeze(-1) - clipped(gradient)
        answer = (kernel.mT @ _windows(q, grid)).squeeze(2).mT
        return F.linear(answer, self.output.weight.to(dtype))


def clipped(gradient: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch rows columns"]:
    """Each column divided by its length plus 1."""
    length: Tensor = torch.linalg.vector_norm(gradient, dim=-2, keepdim=True)
    return gradient / (length + 1)


def _windows(
    x: Float[Tensor, "batch channels patches"], grid: tuple[int, int]
) -> Float[Tensor, "batch channels 9 patches"]:
    """The 3 x 3 neighbourhood of every patch, zeros beyond the edge."""
    windows: Tensor = F.unfold(x.unflatten(2, grid), 3, padding=1).unflatten(1, (-1, 9))
    return windows
