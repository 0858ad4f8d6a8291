"""NaFlexVit with its own settings, SigLIP 2, C-RADIO, and with the rotary attentions of EVA."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "num_heads": 4, "depth": 4}
NAMES = ["naflexvit_base_patch16_gap", "naflexvit_base_patch16_siglip", "naflexvit_base_patch16_radio_v3"]
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("naflexvit_base_patch16_parfac_gap", {**SMALL, "img_size": (64, 96), "rope_type": "axial", "attn_type": "eva"}),
    ("naflexvit_base_patch16_map", {**SMALL, "rope_type": "mixed", "attn_gated": True}),
    (
        "naflexvit_base_patch16_gap",
        {**SMALL, "rope_type": "dinov3", "num_kv_heads": 2, "qkv_fused": False, "use_key_only_attn_mask": True},
    ),
]


def small(name: str) -> dict[str, Any]:
    """Four patches by four."""
    return SMALL
