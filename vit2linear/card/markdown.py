"""What the sections of a card share: tables, lists, and how data and sizes are called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vit2linear.sizes import show_size

Record = Mapping[str, Any]
"""``report.json``."""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)


def paths(record: Record) -> list[str]:
    """The image sets, as the user named them."""
    path = record["data"]["path"]
    return [path] if isinstance(path, str) else [*path]


def images(record: Record) -> str:
    """The images that judged, without the folders above them."""
    name = str(record["evaluation"]["data"])
    for path in sorted(paths(record), key=len, reverse=True):
        name = name if path in record["data"]["on_hub"] else name.replace(path, last_name(path))
    return name


def native(record: Record) -> str:
    """The size of the model's own input in pixels."""
    height, width = record["input_size"][-2:]
    return show_size((height, width))


def last_name(path: str) -> str:
    """Of a path the last name: where it lay is nobody else's business."""
    return Path(path.removeprefix("local-dir:")).resolve().name
