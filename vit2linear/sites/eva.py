"""timm's ``EvaAttention``: EVA, EVA-02, DINOv3, LingBot-Vision, timm's own ViTs with rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.models.eva import EvaAttention
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.sites._timm import RotarySite


class EvaSite(RotarySite):
    """One projection with its biases apart (none for the keys), or three projections."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is EvaAttention

    def projections(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, ...]:
        """One projection, or three."""
        if site.qkv is None:
            return site.q_proj(x), site.k_proj(x), site.v_proj(x)
        if site.q_bias is None:
            parts: tuple[Tensor, ...] = site.qkv(x).chunk(3, -1)  # called: an adapter may be wrapped around it
            return parts
        bias = torch.cat((site.q_bias, site.k_bias, site.v_bias))
        qkv: Tensor = site.qkv(x) + bias if site.qkv_bias_separate else F.linear(x, site.qkv.weight, bias)
        return qkv.chunk(3, -1)
