"""Image sizes as people write them: ``384``, ``512x768``."""

from __future__ import annotations

from vit2linear.errors import RecipeError

Size = tuple[int, int]
"""Height and width in pixels."""


def parse_size(text: str) -> Size:
    """``384`` or ``512x768``.

    Raises:
        RecipeError: anything else.
    """
    sides = text.strip().lower().split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise RecipeError(f"--img-size: {text!r} is no size in pixels.", "Write 384, or height and width: 512x768.")
    return int(sides[0]), int(sides[-1])


def parse_sizes(text: str) -> list[Size]:
    """``224,512x768``.

    Raises:
        RecipeError: anything else.
    """
    return [parse_size(part) for part in text.split(",")]


def show_size(size: Size) -> str:
    """As ``parse_size`` reads it."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"
