"""EVA and EVA-02, rotary ViTs (axial, mixed, DINOv3), Perception Encoder, LingBot-Vision, Sapiens2."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"embed_dim": 48, "num_heads": 4, "depth": 4}
NAMES = [
    "vit_small_patch16_dinov3_qkvb",
    "eva_giant_patch14_224",
    "eva02_base_patch16_clip_224",
    "eva02_enormous_patch14_clip_224",
    "vit_mediumd_patch16_rope_reg1_gap_256",
    "vit_pe_core_tiny_patch16_384",
    "vit_base_patch16_rope_mixed_ape_224",
    "vit_base_patch16_sapiens2",
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_small_patch16_dinov3", {"img_size": (64, 96), "qk_norm": True, **SMALL}),
    (
        "vit_small_patch16_rope_ape_224",
        {"img_size": (64, 96), "rope_type": "mrope", "rope_grid_indexing": "ij", "scale_attn_inner": True, **SMALL},
    ),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four; Sapiens2 has fewer key heads in its middle."""
    patch = 14 if "patch14" in name else 16
    groups = {"num_kv_heads": (4, 2, 2, 4)} if "sapiens2" in name else {}
    return {"img_size": 4 * patch, **SMALL, **groups}
