"""Attention whose queries and keys are different tokens of the same image."""

from __future__ import annotations

from vit2linear.site import Feature

POOLED_KEYS = Feature(
    "keys and values are pooled on the grid, so that they are fewer than the queries", "pooling", (), False
)
POOLED_QUERIES = Feature(
    "queries are pooled, so that they are other tokens than the module's input", "pooling", (), False
)


def pooled(keys: bool, queries: bool = False) -> dict[str, Feature]:
    """What a module with pooled keys or queries has; no operator can make up for the tokens that are not there."""
    return ({"pooled-keys": POOLED_KEYS} if keys else {}) | ({"pooled-queries": POOLED_QUERIES} if queries else {})
