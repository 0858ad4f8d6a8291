"""BEiT and BEiT v2: biases of each block, of all blocks, of both, of none."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 3}
NAMES = ["beit_base_patch16_224", "beitv2_base_patch16_224"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("beit_base_patch16_224", {**SMALL, "use_rel_pos_bias": False, "use_shared_rel_pos_bias": True}),
    ("beit_base_patch16_224", {**SMALL, "use_shared_rel_pos_bias": True, "img_size": (64, 96)}),
    ("beit_base_patch16_224", {**SMALL, "use_rel_pos_bias": False, "use_abs_pos_emb": True, "qkv_bias": False}),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    return SMALL
