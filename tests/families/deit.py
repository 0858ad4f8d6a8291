"""DeiT, with and without the distillation token, and DeiT III."""

from __future__ import annotations

from typing import Any

NAMES = ["deit_tiny_distilled_patch16_224", "deit3_small_patch16_224"]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    patch = 14 if "patch14" in name else 16
    return {"img_size": 4 * patch, "embed_dim": 48, "num_heads": 3, "depth": 4}
