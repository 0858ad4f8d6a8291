"""Which images are learned from and which judge: by the names of splits, never the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vit2linear.errors import DataError
from vit2linear.images.sets import Images

TRAIN = ("train", "training")
VALIDATION = ("validation", "val", "valid", "test", "eval")


@dataclass(frozen=True)
class Splits:
    """What one path holds, by the name of the split; a set without splits has one, ``train``."""

    path: str
    images: Mapping[str, Images]
    notes: tuple[str, ...] = ()
    validation: tuple[str, ...] = VALIDATION
    """Names that a validation split may have, the most wanted first."""

    def choose(self, split: str | None = None, val_split: str | None = None) -> tuple[str, str | None]:
        """The names of the split to learn from and of the one to judge by, ``None`` where images must be held out.

        Raises:
            DataError: no such split, the same for both, or a choice that only the user can make.
        """
        train = self._named(split, "--split")
        validation = self._named(val_split, "--val-split")
        if train is None:
            others = [name for name in self.images if name != validation]
            train = _first(TRAIN, others)
            if train is None and validation is not None and len(others) > 1:
                raise DataError(
                    f"--data: of {self.path!r} none is called a training split: {shown(others)}.",
                    "Name the one to learn from with --split.",
                )
            train = train or next(iter(others), validation)
        if validation is None:
            others = [name for name in self.images if name != train or split is None]
            validation = _first(self.validation, others)
            validation = validation if validation != train else None
        elif validation == train:
            raise DataError(
                f"--data: {self.path!r} cannot be learned from and judged by its split {train!r} alike.",
                f"Its splits: {shown(self.images)}. Without --val-split, 5% of the images are held out.",
            )
        assert train is not None
        return train, validation

    def unused(self, chosen: Iterable[str | None]) -> list[str]:
        """Names that are neither chosen nor usual for a split."""
        used = {*chosen}
        return [name for name in self.images if name not in used and name.lower() not in (*TRAIN, *VALIDATION)]

    def _named(self, name: str | None, option: str) -> str | None:
        found = _first((name.lower(),), self.images) if name is not None and name not in self.images else name
        if name is not None and found is None:
            raise DataError(f"{option}: {self.path!r} has no split {name!r}.", f"It has {shown(self.images)}.")
        return found


def _first(wanted: Iterable[str], names: Iterable[str]) -> str | None:
    """The name that is the first of ``wanted``, whatever its case."""
    by_lower = {name.lower(): name for name in names}
    return next((by_lower[name] for name in wanted if name in by_lower), None)


def are_splits(names: Iterable[str]) -> bool:
    """Whether folders of these names are splits: nothing else, or both a training and a validation split."""
    lower = {name.lower() for name in names}
    return bool(lower) and (lower <= {*TRAIN, *VALIDATION} or bool(lower & {*TRAIN} and lower & {*VALIDATION}))


def split_in(path: str) -> str | None:
    """The split that a file belongs to, by a word of its name or its folders, such as ``val-0003.tar``."""
    words = re.findall(r"[a-z]+", path.lower())
    return next((word for word in reversed(words) if word in (*TRAIN, *VALIDATION)), None)


def shown(names: Iterable[str], limit: int = 10) -> str:
    """Names for a message, at most ``limit`` of them."""
    listed = [repr(name) for name in names]
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
