"""PiT, with and without the distillation token."""

from __future__ import annotations

from typing import Any

NAMES = ["pit_ti_224", "pit_b_distilled_224"]


def small(name: str) -> dict[str, Any]:
    """Three stages of about eight, four and two patches a side."""
    return {"img_size": 64, "base_dims": [16, 16, 16], "heads": [1, 2, 4], "depth": [1, 2, 1]}


VARIANTS = [(NAMES[0], {**small(NAMES[0]), "img_size": (48, 64)})]
