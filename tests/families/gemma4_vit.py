"""Gemma 4's vision tower: classifiers, and encoders, which have no head; with and without clamps."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"img_size": 96, "embed_dim": 48, "depth": 4, "num_heads": 4, "head_dim": 16}
NAMES = ["gemma4_vit_167m", "gemma4_vit_570m_enc"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma4_vit_167m_enc", {**SMALL, "img_size": (96, 144), "intermediate_size": 64, "num_kv_heads": 2}),
]


def small(name: str) -> dict[str, Any]:
    """Six patches by six, which the encoders pool three by three."""
    return {**SMALL, "intermediate_size": 64, "position_embedding_size": 16}
