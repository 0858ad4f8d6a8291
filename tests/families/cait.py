"""CaiT: talking heads, then class attention, which stays."""

from __future__ import annotations

from typing import Any

NAMES = ["cait_xxs24_224"]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    return {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 3}
