"""DaViT: windows of 7 in turn with channel attention, and Florence-2's towers with windows of 12."""

from __future__ import annotations

from typing import Any

NAMES = ["davit_tiny", "davit_base_fl"]


def small(name: str) -> dict[str, Any]:
    """Maps from 16 x 24 down to 2 x 3 (or so)."""
    return {
        "pretrained_cfg_overlay": {"input_size": (3, 64, 96)},
        "depths": (1, 1, 1, 1),
        "embed_dims": (16, 32, 32, 48),
        "num_heads": (1, 1, 2, 2),
    }
