"""Hiera: mask units and global attention, pooled queries, with and without absolute window positions."""

from __future__ import annotations

from typing import Any

NAMES = ["hiera_tiny_224", "hiera_base_plus_224", "hiera_small_abswin_256"]
SMALL: dict[str, Any] = {"embed_dim": 16, "stages": (1, 2, 2, 1)}
VARIANTS: list[tuple[str, dict[str, Any]]] = [("hiera_tiny_224", {"img_size": (64, 96), **SMALL})]


def small(name: str) -> dict[str, Any]:
    """Mask units two by two."""
    return {"img_size": 64, **SMALL}
