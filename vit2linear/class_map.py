"""``--class-map``: which class of the model each class of an image set is, as a file says it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from vit2linear.classes import model_names, normal
from vit2linear.errors import DataError

ClassMap = dict[str, int]
"""Name of a set's class to the model's index; -1: none of the model's classes."""


def read_class_map(path: str, labels: Sequence[str] | None, num_classes: int) -> ClassMap:
    """The model's index of every class that a file names.

    It is a table ``{"set's class": index or name of the model's class}`` in JSON or TOML, or a text of the set's class
    names, one a line, in the order of the model's classes, as timm's ``--class-map`` reads it.

    Args:
        path: the file; its ending decides, anything but ``.json`` and ``.toml`` is text.
        labels, num_classes: the model's, as in ``match_classes``.

    Raises:
        DataError: unreadable, or every entry that is no class of the model, together.
    """
    if not num_classes:
        raise DataError(
            f"--class-map: the model has no classes, so {path!r} maps to nothing.", "Leave --class-map out."
        )
    table = _table(path)
    names = model_names(labels, num_classes)
    found, problems = {}, []
    for name, value in table.items():
        index = names.get(normal(value)) if isinstance(value, str) else value
        if type(index) is int and -1 <= index < num_classes:
            found[name] = index
        elif isinstance(value, str):
            close = get_close_matches(normal(value), names, n=1)
            problems.append(
                f"{name!r}: the model has no class {value!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        else:
            problems.append(f"{name!r}: {value!r} is no index from 0 to {num_classes - 1}, nor -1 for none")
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise DataError(f"--class-map: {path!r}: {'; '.join(problems[:5])}{more}.")
    return found


def _table(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text("utf-8")
        suffix = Path(path).suffix.lower()
        table = json.loads(text) if suffix == ".json" else tomllib.loads(text) if suffix == ".toml" else None
    except (OSError, ValueError, RecursionError) as error:  # tomllib's and json's errors are ValueErrors
        raise DataError(f"--class-map: {path!r} cannot be read: {error}.") from error
    if table is None:
        lines = [line.strip() for line in text.rstrip().splitlines()]
        if not all(lines) or len({*lines}) < len(lines):
            raise DataError(f"--class-map: {path!r} has an empty line, or one twice.", "A line is a class of the set.")
        table = {name: i for i, name in enumerate(lines)}
    if not isinstance(table, dict) or not table:
        raise DataError(f"--class-map: {path!r} holds no table of classes.", 'For example: {"my cats": "tabby"}.')
    return table
