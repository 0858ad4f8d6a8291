"""T5: test-time training made to inherit the weights of a softmax model."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry, no_autocast
from vit2linear.modifiers import LocalBranch, centered
from vit2linear.operator import Operator
from vit2linear.ops.base import count_keys


class T5Attention(Operator):
    """f(q; W - dL/dW), f(x) = (silu(x W1) * (x W2)) W3, L = -s mean_j f(k_j) . v_j (T^5, arXiv 2605.02772)."""

    name = "t5"
    family = "test-time training"
    summary = "f(q; W - dL/dW), f(x) = (silu(x W1) * (x W2)) W3, L = -mean f(k) . v / sqrt(d), keys normalised"
    reference = "T^5, arXiv 2605.02772"
    notes = (
        "Keys are normalised over tokens, channel by channel, so a shift of all keys changes nothing. The 3x3 "
        "convolutions of q and k start at zero (in the code at random) and see patches only; prefix tokens, which the "
        "paper drops, train the inner model and query it like patches. Not linear in v, so there is no routing map. "
        "At 196 patches it is slower than softmax."
    )
    cost = "9 N d^2"
    has_map = False

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        heads, dim = geometry.num_heads, geometry.head_dim
        self.w1 = nn.Parameter(torch.empty(heads, dim, dim))
        self.w2 = nn.Parameter(torch.empty(heads, dim, dim))
        self.w3 = nn.Parameter(torch.empty(heads, dim, dim))
        for weight in (self.w1, self.w2, self.w3):
            nn.init.trunc_normal_(weight, std=0.02)
        self.q_local = LocalBranch(heads * dim, "dwc3")
        self.k_local = LocalBranch(heads * dim, "dwc3")

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Local q and k, one step of the inner model on (k, v), its answer to q."""
        k = _normalized(k, ctx)
        q, k = self.q_local(q, q, ctx), self.k_local(k, k, ctx)
        wide = torch.promote_types(v.dtype, torch.float32)
        with no_autocast(v.device):
            values = v.to(wide)
            if ctx.key_mask is not None:
                values = torch.where(ctx.key_mask[:, None, :, None], values, 0.0)
            w1, w2, w3 = self._step(k.to(wide), values, ctx)
            q = q.to(wide)
            return ((F.silu(q @ w1) * (q @ w2)) @ w3).to(v.dtype)

    def _step(self, k: Tensor, v: Tensor, ctx: AttentionContext) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of each image and head after one step of gradient descent with rate 1."""
        w1, w2, w3 = self.w1.to(k.dtype), self.w2.to(k.dtype), self.w3.to(k.dtype)
        z1, z2 = k @ w1, k @ w2
        gate = z1.sigmoid()
        active = z1 * gate
        error = v * (-self.geometry.scale / count_keys(k, ctx))  # dL / df(k)
        hidden = error @ w3.mT
        g1 = k.mT @ (hidden * z2 * gate * (1 + z1 * (1 - gate)))
        g2 = k.mT @ (hidden * active)
        g3 = (active * z2).mT @ error
        return w1 - g1, w2 - g2, w3 - g3


def _normalized(
    k: Float[Tensor, "batch heads keys head_dim"], ctx: AttentionContext
) -> Float[Tensor, "batch heads keys head_dim"]:
    """Keys with mean 0 and variance below 1 over the valid tokens (the paper adds 1 to the variance)."""
    wide = centered(k.to(torch.promote_types(k.dtype, torch.float32)), ctx.key_mask)
    if ctx.key_mask is not None:
        wide = torch.where(ctx.key_mask[:, None, :, None], wide, 0.0)
    variance = wide.square().sum(-2, keepdim=True) / count_keys(wide, ctx)
    return (wide * (variance + 1).rsqrt()).to(k.dtype)
