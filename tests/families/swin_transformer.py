"""Swin: shifted windows, several window sizes, padding, wider heads, dynamic sizes."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    "img_size": 32,
    "embed_dim": 32,
    "depths": (2, 2),
    "num_heads": (2, 4),
    "window_size": 4,
    "drop_path_rate": 0.0,
}
NAMES = ["swin_tiny_patch4_window7_224", "swin_s3_tiny_224"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("swin_tiny_patch4_window7_224", {**SMALL, "img_size": (24, 40), "always_partition": True}),
    ("swin_tiny_patch4_window7_224", {**SMALL, "head_dim": 8, "qkv_bias": False, "strict_img_size": False}),
]


def small(name: str) -> dict[str, Any]:
    """Two stages, of eight patches by eight and four by four."""
    return {**SMALL, "window_size": ((2, 2), (4, 4))} if "_s3_" in name else SMALL
