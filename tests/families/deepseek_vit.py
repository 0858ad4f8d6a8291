"""DeepSeek's vision tower: classifiers with and without the projector, and the encoder, which has no head."""

from __future__ import annotations

from typing import Any

NAMES = ["deepseek_vit_412m", "deepseek_vit_412m_align", "deepseek_vit_412m_enc"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_vit_412m", {"img_size": (50, 84), "dynamic_img_pad": True, "embed_dim": 48, "num_heads": 4, "depth": 4}),
    ("deepseek_vit_412m_enc", {"img_size": 56, "global_pool": "avg", "embed_dim": 48, "num_heads": 4, "depth": 4}),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four, a narrow language model."""
    return {"img_size": 56, "embed_dim": 48, "num_heads": 4, "depth": 4, "out_features": 40}
