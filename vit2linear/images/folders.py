"""Files under a folder; links to folders are followed, each folder once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vit2linear.images.splits import Splits
from vit2linear.images.tree import Entry, is_image, open_tree


@dataclass(frozen=True)
class Walk:
    """What lies under a folder."""

    files: tuple[str, ...]
    """Paths inside the folder, with ``/``."""
    notes: tuple[str, ...]


def walk(root: Path) -> Walk:
    """All files under ``root``.

    A link to a folder that is read already, its own parent for example, is not followed: the images would count twice,
    or without end (``os.walk(followlinks=True)``, which timm uses, does that). Real folders come before links.
    """
    files: list[str] = []
    repeated: list[str] = []
    unreadable: list[str] = []
    seen: set[tuple[int, int]] = set()
    todo = deque([(root, "")])
    while todo:
        folder, inside = todo.popleft()
        try:
            status = folder.stat()
            if (status.st_dev, status.st_ino) in seen:
                repeated.append(inside)
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
        except OSError:
            unreadable.append(inside)
            continue
        for entry in entries:
            with suppress(OSError):  # a link to itself
                if entry.is_dir():
                    place = (Path(entry.path), f"{inside}{entry.name}/")
                    todo.append(place) if entry.is_symlink() else todo.appendleft(place)
                elif entry.is_file():
                    files.append(inside + entry.name)
    notes = [f"{root}: {_count(repeated)} not followed, to what is read already."] if repeated else []
    notes += [f"{root}: {_count(unreadable)} not readable."] if unreadable else []
    return Walk(tuple(files), tuple(notes))


def _count(folders: list[str]) -> str:
    return f"{len(folders)} {'folder or link' if len(folders) == 1 else 'folders or links'} such as {folders[0]!r}"


@dataclass(frozen=True)
class FolderStore:
    """Files of a folder by their path inside it."""

    root: str

    def read(self, key: str) -> bytes:
        """The content of a file; ``OSError`` where it cannot be read."""
        return Path(self.root, key).read_bytes()

    def where(self, key: str) -> str:
        """The file's path, quoted."""
        return repr(str(Path(self.root, key)))


def open_folder(path: str, root: Path, files: Iterable[str], wanted: set[str], ignore_labels: bool) -> Splits:
    """Class folders (directly, or under folders that are splits), or a flat folder.

    Raises:
        DataError: no images, or some beside class folders.
    """
    entries: list[Entry] = []
    others: list[str] = []
    for file in files:
        if is_image(file):
            entries.append(Entry(file, file))
        else:
            others.append(file)
    return open_tree(path, FolderStore(str(root)), entries, others, wanted, ignore_labels)
