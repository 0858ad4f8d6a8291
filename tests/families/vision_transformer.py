"""Plain ViTs: class token, registers, mean pooling, SigLIP, CLIP, qk-norm; parallel and differential blocks."""

from __future__ import annotations

import re
from typing import Any

SMALL: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "depth": 4}
NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_clip_quickgelu_224",
    "vit_base_patch16_rpn_224",
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_xp_224",
    "vit_pwee_patch16_reg1_gap_256",
    "vit_dwee_patch16_reg1_gap_256",
    "vit_dpwee_patch16_reg1_gap_256",
    "beit3_base_patch16_224",
    "aimv2_large_patch14_224",
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {"img_size": (64, 96), **SMALL}),
    ("vit_tiny_patch16_224", {"img_size": 64, "qk_norm": True, "scale_attn_norm": True, **SMALL}),
    ("vit_tiny_patch16_224", {"img_size": 64, "dynamic_img_size": True, **SMALL}),
    ("vit_base_patch16_224", {"img_size": 64, "global_pool": "avg", "class_token": False, **SMALL}),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    named = re.search(r"_patch(\d+)_", name)
    return {"img_size": 4 * (int(named[1]) if named else 16), **SMALL}
