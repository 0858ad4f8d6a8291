"""InLine attention: softmax to first order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import RecipeError
from vit2linear.operator import Operator
from vit2linear.ops._parts import token_mean
from vit2linear.ops.base import AffineRule


class InLineAttention(AffineRule):
    """A_ij = 1/N + s (q_i . k_j - q_i . mean k) / N (InLine, arXiv 2412.06590, identity kernel)."""

    name = "inline"
    family = "affine"
    signed = True
    summary = "A = 1/N + s (q k^T - q mean(k)^T) / N, rows sum to 1, signed"
    reference = "InLine, arXiv 2412.06590"
    notes = (
        "The first-order expansion of softmax, and the map of ViTALiTy (arXiv 2211.05109). Copied weights act almost "
        "as before where logits are small. The paper adds 3x3 kernels predicted for each image: option `dyn3`, here "
        "zero at the start."
    )
    cost = "2 N d^2"
    carries = frozenset({"key_mask", "pooling"})

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """InLine's options."""

        dyn3: bool = False
        """Add the paper's local branch: depthwise 3x3 kernels, predicted from the mean token of each image."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        if options.dyn3 and geometry.width % geometry.num_heads:
            raise RecipeError(
                f"operator 'inline': dyn3 needs a width ({geometry.width}) that {geometry.num_heads} heads divide."
            )
        self.dyn3 = None
        if options.dyn3:
            self.dyn3 = DynamicKernels(geometry)
            self.carries = self.carries - {"pooling"}

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """s q, k."""
        return q * self.geometry.scale, k

    def finish(
        self,
        heads: Float[Tensor, "batch heads queries value_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Heads plus the local branch, where there is one."""
        return heads if self.dyn3 is None else self.dyn3(heads, v, ctx)


class DynamicKernels(nn.Module):
    """Kernels of each image from its mean block input, two layers grouped by heads (arXiv 2412.06590)."""

    def __init__(self, geometry: HeadGeometry) -> None:
        super().__init__()
        channels, heads = geometry.num_heads * geometry.head_dim, geometry.num_heads
        self.kernels = nn.Sequential(
            nn.Conv1d(geometry.width, channels, 1, groups=heads),
            nn.GELU(),
            nn.Conv1d(channels, 9 * channels, 1, groups=heads),
        )
        for parameter in self.kernels[2].parameters():
            nn.init.zeros_(parameter)

    def forward(
        self,
        heads: Float[Tensor, "batch heads tokens value_dim"],
        v: Float[Tensor, "batch heads tokens value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads tokens value_dim"]:
        """Patch rows plus the convolution of their values; the mean is over all tokens, prefix included."""
        prefix, mask = ctx.num_prefix, ctx.key_mask
        wide = ctx.x.to(torch.promote_types(ctx.x.dtype, torch.float32))
        mean = token_mean(wide, None if mask is None else mask[..., None]).to(ctx.x.dtype)
        kernels = self.kernels(mean.transpose(1, 2)).to(v.dtype)
        if mask is not None:
            v = torch.where(mask[:, None, :, None], v, 0.0)
        patches = v[:, :, prefix:].transpose(2, 3).flatten(1, 2).unflatten(2, ctx.patch_grid())
        local = _convolved(patches, kernels.unflatten(1, (-1, 9)).squeeze(3))
        local = local.unflatten(1, v.shape[1::2]).transpose(2, 3)
        return torch.cat([heads[:, :, :prefix], heads[:, :, prefix:] + local], dim=2)


def _convolved(
    patches: Float[Tensor, "batch channels rows columns"], kernels: Float[Tensor, "batch channels 9"]
) -> Float[Tensor, "batch channels patches"]:
    """Every channel of every image convolved with the 3 x 3 kernel of its own, zeros beyond the edge."""
    if torch.compiler.is_exporting():  # groups that grow with the batch cannot be told to an exported graph
        windows: Tensor = F.unfold(patches, 3, padding=1).unflatten(1, (-1, 9))
        return (kernels.unsqueeze(-1) * windows).sum(2)
    groups = patches.flatten(0, 1)
    local: Tensor = F.conv2d(groups[None], kernels.reshape(-1, 1, 3, 3), padding=1, groups=len(groups))[0]
    return local.view(*patches.shape[:2], -1)
