"""What a conversion has done so far, carried by every checkpoint, and whether a resumed one is the same conversion."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from vit2linear.errors import RecipeError
from vit2linear.recipe import Recipe

FREE = ("output.", "data.workers", "data.max_bad", "run.checkpoint_every", "run.track")
"""Settings that change no weight, and so may change when a run is resumed."""


@dataclass
class Journal:
    """Plain JSON values; every list and table grows in the order of the moments."""

    settings: dict[str, Any]
    """Of ``settings_of``."""
    recipe: str
    """The recipe as it runs, as TOML: sites that keep the softmax are named."""
    images: int | None = None
    """Of the whole set; ``None`` for a stream."""
    keep_softmax: dict[str, Any] | None = None
    history: list[dict[str, Any]] = field(default_factory=list)
    calibration: dict[str, dict[str, Any]] = field(default_factory=dict)
    stages: list[dict[str, Any]] = field(default_factory=list)
    bad: dict[str, str] = field(default_factory=dict)
    """``found`` of ``BadImages``."""


def settings_of(recipe: Recipe, **more: Any) -> dict[str, Any]:
    """All that determines the weights, flat: dotted keys of the recipe, and whatever else is known of the run."""
    flat: dict[str, Any] = {}
    _flatten(dataclasses.asdict(recipe), "", flat)
    _flatten(more, "", flat)
    return {key: value for key, value in flat.items() if not key.startswith(FREE)}


def refuse_changes(
    before: dict[str, Any],
    now: dict[str, Any],
    hint: str = "Resume with the settings of the interrupted run, or start anew with --overwrite.",
) -> None:
    """Raise if a resumed run has other settings.

    Raises:
        RecipeError: naming every one, with ``hint``.
    """
    changed = [
        f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]
    if changed:
        raise RecipeError(f"--resume: {'; '.join(changed)}.", hint)


def _flatten(value: Any, where: str, flat: dict[str, Any]) -> None:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            _flatten(item, f"{where}.{key}".lstrip("."), flat)
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            _flatten(item, f"{where}.{i}", flat)
    elif value not in (None, {}, [], ()):
        flat[where] = list(value) if isinstance(value, tuple) else value
