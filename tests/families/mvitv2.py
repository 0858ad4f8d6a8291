"""MViT v2: pooled queries and keys, relative positions, with and without a class token, wider inside or after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from timm.models.mvitv2 import model_cfgs

NAMES = ["mvitv2_tiny", "mvitv2_large", "mvitv2_small_cls"]


def small(name: str) -> dict[str, Any]:
    """Maps from 16 x 16 down to 2 x 2; timm takes sizes from its own table only, so that ours are put there."""
    sizes: dict[str, Any] = {"depths": (1, 2, 2, 1), "embed_dim": 16, "num_heads": 1, "stride_kv": None}
    model_cfgs[f"small_{name}"] = replace(model_cfgs[name], **sizes)
    return {"cfg_variant": f"small_{name}", "img_size": 64}
