"""CrossViT: two branches, patches cut out at once or by several convolutions (dagger)."""

from __future__ import annotations

from typing import Any

NAMES = ["crossvit_9_240", "crossvit_9_dagger_240"]


def small(name: str) -> dict[str, Any]:
    """Eight patches by eight and four by four."""
    if name == "crossvit_18_240":  # its entry point in timm takes no argument that it sets itself
        return {"img_size": 120}
    return {
        "img_size": 96,
        "img_scale": [1.0, 2 / 3],
        "embed_dim": [24, 48],
        "num_heads": [3, 3],
        "depth": [[1, 2, 0], [1, 1, 0]],
    }


VARIANTS = [(NAMES[0], {**small(NAMES[0]), "img_size": (72, 96)})]
