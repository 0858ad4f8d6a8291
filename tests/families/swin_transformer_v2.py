"""Swin V2: cosine attention, windows larger than those of the pretraining, padding, dynamic sizes."""

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
NAMES = ["swinv2_tiny_window8_256", "swinv2_base_window12to16_192to256"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("swinv2_tiny_window8_256", {**SMALL, "img_size": (24, 40), "strict_img_size": False, "qkv_bias": False}),
]


def small(name: str) -> dict[str, Any]:
    """Two stages, of eight patches by eight and four by four."""
    return SMALL
