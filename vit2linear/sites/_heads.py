"""What several kinds share: a fused qkv taken apart, heads brought through the output projection, a feature's name."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

BIAS = "relative-position-bias"
"""The feature by this name."""


def fused_heads(
    site: Any, x: Float[Tensor, "batch tokens channels"]
) -> tuple[
    Float[Tensor, "batch heads tokens head_dim"],
    Float[Tensor, "batch heads tokens head_dim"],
    Float[Tensor, "batch heads tokens head_dim"],
]:
    """q, k and v of a layer ``qkv``, whose bias may lie in ``q_bias``, ``k_bias`` and ``v_bias`` (BEiT, Swin V2)."""
    if getattr(site, "q_bias", None) is None:
        qkv = site.qkv(x)
    else:
        bias = torch.cat((site.q_bias, site.k_bias, site.v_bias))
        qkv = site.qkv(x) + bias if site.qkv_bias_separate else F.linear(x, site.qkv.weight, bias)
    q, k, v = qkv.unflatten(-1, (3, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def projected(site: Any, heads: Float[Tensor, "batch heads tokens head_dim"]) -> Float[Tensor, "batch tokens channels"]:
    """Heads side by side, output projection, dropout."""
    out: Tensor = site.proj_drop(site.proj(heads.transpose(1, 2).flatten(2)))
    return out


def set_window_size(site: Any, window_size: tuple[int, int]) -> None:
    """timm's resize of a bias table, where the table was not given up."""
    if site.relative_position_bias_table is not None:
        site.source_class.set_window_size(site, window_size)
