"""Plain ViTs: class token, registers, mean pooling, SigLIP, CLIP, qk-norm."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "depth": 4}
NAMES = [
    "vit_tiny_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_clip_quickgelu_224",
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {"img_size": (64, 96), **SMALL}),
    ("vit_tiny_patch16_224", {"img_size": 64, "qk_norm": True, "scale_attn_norm": True, **SMALL}),
    ("vit_tiny_patch16_224", {"img_size": 64, "dynamic_img_size": True, **SMALL}),
    ("vit_base_patch16_224", {"img_size": 64, "global_pool": "avg", "class_token": False, **SMALL}),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    patch = next(int(part[5:]) for part in name.split("_") if part.startswith("patch") and part[5:].isdigit())
    return {"img_size": 4 * patch, **SMALL}
