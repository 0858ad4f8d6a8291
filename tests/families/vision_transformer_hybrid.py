"""ViTs on the features of a ResNet or of a convolutional stem."""

from __future__ import annotations

from typing import Any

NAMES = ["vit_tiny_r_s16_p8_224", "vit_small_resnet26d_224", "vit_base_mci_224"]


def small(name: str) -> dict[str, Any]:
    """Few tokens; the stem of MobileCLIP fixes the width."""
    width = 768 if "mci" in name else 48
    return {"img_size": 96, "embed_dim": width, "num_heads": 3, "depth": 2}
