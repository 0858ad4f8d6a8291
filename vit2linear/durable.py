"""Folders and files that are complete or absent, even if the power fails: written aside, flushed, renamed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(folder: Path) -> Iterator[Path]:
    """A temporary folder beside ``folder`` that takes its name at the end, and is gone if anything fails.

    ``folder`` must not exist; what an earlier attempt left aside is removed.

    Raises:
        OSError: the disk refused.
    """
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        flush(aside)
        aside.rename(folder)
        _flush(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def file_written_aside(file: Path) -> Iterator[Path]:
    """The path of ``file`` in a temporary folder beside it, to be written; at the end it takes its place.

    So does whatever else was written beside it in that folder, before it: files that it refers to by name. All is gone
    if anything fails, and what an earlier attempt left aside is removed.

    Raises:
        OSError: the disk refused.
    """
    aside = file.with_name(f"{file.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside / file.name
        flush(aside)
        for path in sorted(aside.iterdir(), key=lambda path: path.name == file.name):
            path.replace(file.with_name(path.name))
        _flush(file.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def drop(folder: Path) -> None:
    """Delete a folder that is complete or absent: half of it is never seen under its name."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def flush(folder: Path) -> None:
    """Have the disk hold all files of a folder before anything is renamed or deleted."""
    for path in (*folder.iterdir(), folder):
        _flush(path)


def _flush(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows has no such thing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def space_words(needed: int, folder: Path) -> str:
    """How many bytes were wanted, and how many the disk of ``folder`` has left."""
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    return f"It takes {_words(needed)}, and {_words(free)} are free on the disk of {str(there)!r}."


def _words(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB" if size > 2**19 else f"{size / 2**10:,.1f} KiB"
