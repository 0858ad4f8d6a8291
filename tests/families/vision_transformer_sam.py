"""SAM's image encoder: windows with and without padding, whole maps, decomposed biases, rope, neither."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "img_size": 64,
    "embed_dim": 48,
    "num_heads": 3,
    "depth": 4,
    "window_size": 2,
    "global_attn_indexes": (1, 3),
}
NAMES = ["samvit_base_patch16_224", "samvit_base_patch16"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("samvit_base_patch16_224", {**SMALL, "img_size": (64, 80), "window_size": 3}),
    ("samvit_base_patch16_224", {**SMALL, "use_rel_pos": False, "use_rope": True, "qk_norm": True}),
    (
        "samvit_base_patch16_224",
        {**SMALL, "use_rel_pos": False, "use_rope": True, "ref_feat_shape": (3, 3), "use_abs_pos": True},
    ),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four, in windows of two by two in every second block."""
    neck = {} if name.endswith("_224") else {"neck_chans": 16}
    return {**SMALL, **neck}
