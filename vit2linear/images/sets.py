"""The shapes of image sets, and what is done with them whatever they come from: picked, joined, relabelled."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif", ".ppm")
"""What counts as an image by its name, in folders and in archives."""


@runtime_checkable
class Reader(Protocol):
    """Random access to encoded images."""

    def read(self, i: int) -> tuple[bytes, int]:
        """Encoded bytes and class index (-1: none) of image ``i``; ``OSError`` where it cannot be read."""

    def where(self, i: int) -> str:
        """What to call image ``i`` in a message."""


@dataclass(frozen=True)
class ImageList:
    """Images with random access."""

    name: str
    size: int
    reader: Reader
    classes: tuple[str, ...] | None = None

    def read(self, i: int) -> tuple[bytes, int]:
        """Encoded bytes and class index (-1: none) of image ``i``; ``OSError`` where it cannot be read."""
        return self.reader.read(i)

    def where(self, i: int) -> str:
        """What to call image ``i`` in a message."""
        return self.reader.where(i)

    def subset(self, indices: Sequence[int], name: str) -> ImageList:
        """The images at ``indices``, in this order."""
        return ImageList(name, len(indices), _Picked(self.reader, tuple(indices)), self.classes)


@dataclass(frozen=True)
class ImageStream:
    """Images in reading order. ``start(epoch)`` gives a fresh iterator over (bytes, class index)."""

    name: str
    start: Callable[[int], Iterator[tuple[bytes, int]]]
    classes: tuple[str, ...] | None = None


Images = ImageList | ImageStream
HeldOut = str | tuple[str | None, ...] | None
"""Threshold of the content hash, one for each set where several are mixed."""


@dataclass(frozen=True)
class ImageSets:
    """What the user's path holds: images to learn from and images to judge by, with the same classes."""

    path: str | tuple[str, ...]
    train: Images
    validation: Images
    held_out: HeldOut = field(default=None)
    """Without a validation split: images whose content hash is at most this are held out."""
    notes: tuple[str, ...] = ()
    """What the user should know of them: files that are no images, splits that are not used."""


def content_digest(data: bytes) -> str:
    """16 hex digits that depend on the encoded image alone."""
    return hashlib.sha256(data).hexdigest()[:16]


def joined(lists: Sequence[ImageList]) -> ImageList:
    """All images of ``lists``, one list after the other; they have the same classes."""
    if len(lists) == 1:
        return lists[0]
    ends = tuple(sum(images.size for images in lists[: i + 1]) for i in range(len(lists)))
    name = " + ".join(images.name for images in lists)
    return ImageList(name, ends[-1], _Joined(tuple(lists), ends), lists[0].classes)


def with_same_classes(sets: Sequence[Images]) -> list[Images]:
    """The same images under one list of classes, the union by name; unlabelled ones stay without labels."""
    names = tuple(dict.fromkeys(name for images in sets for name in images.classes or ()))
    return [_relabelled(images, names) for images in sets] if names else list(sets)


def _relabelled(images: Images, names: tuple[str, ...]) -> Images:
    if images.classes is None or images.classes == names:
        return replace(images, classes=names)
    index = {name: i for i, name in enumerate(names)}
    # An image without a class has -1, which is the last entry.
    new = (*(index[name] for name in images.classes), -1)
    if isinstance(images, ImageStream):
        return replace(images, start=_RelabelledStream(images.start, new), classes=names)
    return replace(images, reader=_Relabelled(images.reader, new), classes=names)


@dataclass(frozen=True)
class _Picked:
    reader: Reader
    indices: tuple[int, ...]

    def read(self, i: int) -> tuple[bytes, int]:
        return self.reader.read(self.indices[i])

    def where(self, i: int) -> str:
        return self.reader.where(self.indices[i])


@dataclass(frozen=True)
class _Joined:
    lists: tuple[ImageList, ...]
    ends: tuple[int, ...]

    def _find(self, i: int) -> tuple[ImageList, int]:
        which = bisect_right(self.ends, i)
        return self.lists[which], i - (self.ends[which - 1] if which else 0)

    def read(self, i: int) -> tuple[bytes, int]:
        images, index = self._find(i)
        return images.read(index)

    def where(self, i: int) -> str:
        images, index = self._find(i)
        return images.where(index)


@dataclass(frozen=True)
class _Relabelled:
    reader: Reader
    new: tuple[int, ...]

    def read(self, i: int) -> tuple[bytes, int]:
        data, label = self.reader.read(i)
        return data, self.new[label]

    def where(self, i: int) -> str:
        return self.reader.where(i)


@dataclass(frozen=True)
class _RelabelledStream:
    start: Callable[[int], Iterator[tuple[bytes, int]]]
    new: tuple[int, ...]

    def __call__(self, epoch: int) -> Iterator[tuple[bytes, int]]:
        for data, label in self.start(epoch):
            yield data, self.new[label]
