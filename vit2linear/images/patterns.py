"""Patterns that name several files: ``shards/train-{000..003}.tar``, ``shards/*.tar``, ``{train,val}.parquet``."""

from __future__ import annotations

import glob
import itertools
import re
from pathlib import Path

from vit2linear.errors import DataError

_BRACES = re.compile(r"\{(?:(\d+)\.\.(\d+)|([^{},]+(?:,[^{},]+)+))\}")
_MOST = 1_000_000


def is_pattern(path: str) -> bool:
    """Whether ``path`` names files by a pattern."""
    return bool(_BRACES.search(path)) or glob.has_magic(path)


def expand(path: str) -> list[Path]:
    """The files that a pattern names, in order, each once.

    Raises:
        DataError: one of the names in braces, or the whole pattern, leads to no file.
    """
    pieces, end = [], 0
    for match in _BRACES.finditer(path):
        first, last, names = match.groups()
        if first is not None and int(last) - int(first) >= _MOST:
            raise DataError(f"--data: {match[0]!r} in {path!r} names more than {_MOST:,} files.")
        numbers = [f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1)] if first is not None else []
        pieces += [[path[end : match.start()]], numbers or (names or "").split(",")]
        end = match.end()
    found: dict[Path, None] = {}
    for name in map("".join, itertools.product(*pieces, [path[end:]])):
        try:
            named = _matching(Path(name)) if glob.has_magic(name) else [Path(name)]
            files = [file for file in named if file.is_file()]
        except (OSError, ValueError):  # no path at all, or ``a**``
            files = []
        if not files:
            raise DataError(f"--data: there is no file {name!r}" + (f" of {path!r}." if name != path else "."))
        found |= dict.fromkeys(files)
    return list(found)


def _matching(path: Path) -> list[Path]:
    root = Path(path.anchor)
    return sorted(root.glob(str(path.relative_to(root))))
