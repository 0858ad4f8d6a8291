"""What every kind with timm's newer signature starts from."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.errors import SurgeryError
from vit2linear.site import key_mask_or_bias


def context(site: Any, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> AttentionContext:
    """Grid and mask as timm hands them over."""
    if is_causal:
        raise SurgeryError("causal attention was asked of a converted site.", "Vision Transformers attend both ways.")
    key_mask, bias = key_mask_or_bias(attn_mask, x)
    return AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, key_mask, bias)
