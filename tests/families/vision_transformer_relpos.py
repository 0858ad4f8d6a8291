"""ViTs with relative positions: network or table, of each block or of all, with and without class token."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "depth": 3, "rel_pos_dim": 16}
NAMES = ["vit_relpos_small_patch16_224", "vit_srelpos_small_patch16_224", "vit_relpos_medium_patch16_cls_224"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_relpos_base_patch16_cls_224", {**SMALL, "img_size": (64, 96), "rel_pos_type": "bias"}),
    ("vit_relpos_small_patch16_rpn_224", {**SMALL, "img_size": 64, "rel_pos_type": "mlp-swin", "qk_norm": True}),
    ("vit_srelpos_small_patch16_224", {**SMALL, "img_size": 64, "rel_pos_type": "bias"}),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    return {**SMALL, "img_size": 128 if "patch32" in name else 64}
