"""Twins: PCPVT with global sub-sampled attention everywhere, SVT with locally grouped attention in between."""

from __future__ import annotations

from typing import Any

NAMES = ["twins_svt_small", "twins_pcpvt_small"]


def small(name: str) -> dict[str, Any]:
    """Maps from 16 x 24 down to 2 x 3, windows of 7 x 7 on all of them."""
    return {
        "img_size": (64, 96),
        "depths": (2, 1, 2, 1),
        "embed_dims": (16, 32, 32, 48),
        "num_heads": (1, 1, 2, 2),
    }
