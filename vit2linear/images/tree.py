"""Images under names such as ``train/cat/1.jpg``, in a folder or in archives: their splits, and the folder as class."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol, runtime_checkable

from timm.utils.misc import natural_key

from vit2linear.errors import DataError
from vit2linear.images.labels import Label, as_classes
from vit2linear.images.sets import EXTENSIONS, ImageList
from vit2linear.images.splits import Splits, are_splits


@runtime_checkable
class Store(Protocol):
    """Where files lie."""

    def read(self, key: Any) -> bytes:
        """The content of a file; ``OSError`` where it cannot be read."""

    def where(self, key: Any) -> str:
        """What to call a file in a message."""


class Entry(NamedTuple):
    """A file."""

    path: str
    """Inside the set, with ``/``."""
    key: Hashable
    """For the store."""
    label: Label = None
    """Stated beside it, whatever its folder."""


def is_image(path: str) -> bool:
    """Whether a file is an image by its name: a known extension, and nothing hidden on the way."""
    parts = PurePosixPath(path)
    return parts.suffix.lower() in EXTENSIONS and not any(part.startswith(".") for part in parts.parts)


def open_tree(
    path: str, store: Store, entries: Sequence[Entry], others: Sequence[str], wanted: set[str], ignore_labels: bool
) -> Splits:
    """Sort files into splits and classes.

    Args:
        path: what the user typed.
        store: reads the entries.
        entries: the images.
        others: paths of files that are ignored, which is said.
        wanted: names of splits that the user asked for.
        ignore_labels: read no classes.

    Raises:
        DataError: no images, or some beside class folders.
    """
    if not entries:
        raise DataError(f"--data: {path!r} holds no images.{_ignored(others)}", f"Read are {', '.join(EXTENSIONS)}.")
    ordered = sorted(entries, key=lambda entry: (natural_key(entry.path), entry.path))
    parts = [entry.path.split("/") for entry in ordered]
    depth = _depth_of_splits(parts, {name.lower() for name in wanted})
    groups: dict[str, list[int]] = {}
    if depth is None:
        groups["train"] = list(range(len(ordered)))
        depth = -1
    else:
        others = [*others, *("/".join(p) for p in parts if len(p) <= depth + 1)]
        for i, p in enumerate(parts):
            if len(p) > depth + 1:
                groups.setdefault(p[depth], []).append(i)
    stated = not ignore_labels and any(entry.label is not None for entry in ordered)
    notes = [f"{path}:{_ignored(others)}"] if others else []
    images = {}
    for split, chosen in groups.items():
        name = path if depth < 0 else f"{path} ({split})"
        labels: Sequence[Label] = [None] * len(chosen)
        if stated:
            labels = [ordered[i].label for i in chosen]
        elif not ignore_labels:
            labels = _folders(name, [parts[i][depth + 1 :] for i in chosen])
        elif any(len(parts[i]) > depth + 2 for i in chosen) and any(len(parts[i]) == depth + 2 for i in chosen):
            notes.append(f"{name} holds images beside folders; all {len(chosen):,} are read, without classes.")
        indices, classes = as_classes(labels, name)
        keys = tuple(ordered[i].key for i in chosen)
        images[split] = ImageList(name, len(chosen), _Stored(store, keys, tuple(indices)), classes)
    return Splits(path, images, tuple(notes))


def _depth_of_splits(parts: Sequence[Sequence[str]], wanted: set[str]) -> int | None:
    """How many folders the splits lie below the root, in folders that hold nothing else; ``None``: no splits."""
    for depth in range(min(map(len, parts)) + 1):
        folders = {p[depth] for p in parts if len(p) > depth + 1}
        if are_splits(folders) or wanted & {name.lower() for name in folders}:
            return depth
        if len(folders) != 1 or any(len(p) == depth + 1 for p in parts):
            break
    # A split that is not there is an error, which names the folders that are.
    return 0 if wanted and any(len(p) > 1 for p in parts) else None


def _folders(name: str, parts: Sequence[Sequence[str]]) -> list[Label]:
    """The folder of each file, where there are folders."""
    loose = sum(len(p) == 1 for p in parts)
    if not loose:
        return [p[-2] for p in parts]
    if loose < len(parts):
        raise DataError(
            f"--data: {name!r} holds {loose:,} images beside class folders, so their class is unclear.",
            "Move them into class folders, or all into one flat folder, or read them without classes: --ignore-labels.",
        )
    return [None] * len(parts)


def _ignored(others: Sequence[str]) -> str:
    if not others:
        return ""
    files = "file is" if len(others) == 1 else "files are"
    return f" {len(others):,} {files} ignored, hidden or no image by name, such as {min(others)!r}."


@dataclass(frozen=True)
class _Stored:
    store: Store
    keys: tuple[Any, ...]
    labels: tuple[int, ...]

    def read(self, i: int) -> tuple[bytes, int]:
        return self.store.read(self.keys[i]), self.labels[i]

    def where(self, i: int) -> str:
        return self.store.where(self.keys[i])
