"""Qwen3's vision tower: classifiers with and without the merger, and the encoder, which has no head."""

from __future__ import annotations

from typing import Any

NAMES = ["qwen3_vit_88m", "qwen3_vit_306m_merge", "qwen3_vit_416m_enc"]


def small(name: str) -> dict[str, Any]:
    """Four patches by four, a narrow language model."""
    sizes = {"embed_dim": 48, "num_heads": 4, "depth": 4, "out_features": 40}
    return {"img_size": 64, "pos_embed_grid_size": 6, **sizes}
