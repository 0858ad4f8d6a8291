"""What any operator can be combined with: a local branch and centred keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext


@dataclass(frozen=True)
class Modifiers:
    """What any operator can be combined with; all of it inert at step 0 but for the centring."""

    local: Literal["none", "dwc3", "dwc5"] = "none"
    """Depthwise convolution of the values on the patch grid, zero-initialised, added to patch rows."""
    center_keys: bool = False
    """Subtract the mean key over tokens, which softmax does not see (T5, arXiv 2605.02772)."""

    @property
    def words(self) -> str:
        """What they add, to follow the operator's name; empty where there are none."""
        size = self.local.removeprefix("dwc")
        parts = [f"a depthwise {size}x{size} convolution of the values"] if self.local != "none" else []
        parts += ["centred keys"] if self.center_keys else []
        return f" with {' and '.join(parts)}" if parts else ""


class LocalBranch(nn.Module):
    """The modifier ``local``: a depthwise convolution of v over the patch grid, added to the patch rows of the heads.

    Prefix tokens take part in the operator only. Zero-initialised (references start at random), so that a converted
    model starts from the copied weights.
    """

    def __init__(self, channels: int, kind: str) -> None:
        super().__init__()
        size = {"dwc3": 3, "dwc5": 5}[kind]
        self.conv = nn.Conv2d(channels, channels, size, padding=size // 2, groups=channels)
        nn.init.zeros_(self.conv.weight)
        assert self.conv.bias is not None
        nn.init.zeros_(self.conv.bias)

    def forward(
        self,
        heads: Float[Tensor, "batch heads tokens value_dim"],
        v: Float[Tensor, "batch heads tokens value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads tokens value_dim"]:
        """``heads`` with the branch added."""
        grid, prefix = ctx.patch_grid(), ctx.num_prefix
        if ctx.key_mask is not None:
            v = torch.where(ctx.key_mask[:, None, :, None], v, 0.0)
        patches = v[:, :, prefix:].transpose(2, 3).flatten(1, 2).unflatten(2, grid)
        local = self.conv(patches).flatten(2).unflatten(1, v.shape[1::2]).transpose(2, 3)
        return torch.cat([heads[:, :, :prefix], heads[:, :, prefix:] + local], dim=2)


def centered(
    k: Float[Tensor, "batch heads keys head_dim"], key_mask: Bool[Tensor, "batch keys"] | None
) -> Float[Tensor, "batch heads keys head_dim"]:
    """Keys minus their mean over valid tokens, the mean in float32."""
    wide = k.to(torch.promote_types(k.dtype, torch.float32))
    if key_mask is None:
        return (wide - wide.mean(-2, keepdim=True)).to(k.dtype)
    mask = key_mask[:, None, :, None]
    count = mask.sum(-2, keepdim=True).clamp_min(1)
    return (wide - torch.where(mask, wide, 0.0).sum(-2, keepdim=True) / count).to(k.dtype)
