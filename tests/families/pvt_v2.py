"""PVT v2: keys reduced by convolutions, or in the linear variant by pooling."""

from __future__ import annotations

from typing import Any

NAMES = ["pvt_v2_b0", "pvt_v2_b2_li"]


def small(name: str) -> dict[str, Any]:
    """Maps from 16 x 24 down to 2 x 3."""
    return {
        "pretrained_cfg_overlay": {"input_size": (3, 64, 96)},
        "depths": (1, 1, 1, 2),
        "embed_dims": (16, 32, 32, 48),
        "num_heads": (1, 1, 2, 2),
    }
