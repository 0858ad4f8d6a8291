"""TNT: pixels inside patches, then patches."""

from __future__ import annotations

from typing import Any

NAMES = ["tnt_s_patch16_224", "tnt_s_legacy_patch16_224"]


def small(name: str) -> dict[str, Any]:
    """Four patches by four, of four pixels by four."""
    return {"img_size": 64, "embed_dim": 48, "inner_dim": 16, "num_heads_outer": 3, "depth": 2}


VARIANTS = [(NAMES[0], {**small(NAMES[0]), "img_size": (48, 64)})]
