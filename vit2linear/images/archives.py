"""Images in tar and zip files, read in place: class folders, one archive for each class, or webdataset shards.

Nothing is unpacked, so names such as ``../../x`` are only names. A tar file is indexed once by the offsets of its
members (the standard library's ``tarfile``), which gives random access without a handle that processes would share.
"""

from __future__ import annotations

import functools
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vit2linear.errors import DataError
from vit2linear.images.labels import KEYS, Label
from vit2linear.images.splits import Splits, split_in
from vit2linear.images.tree import Entry, is_image, open_tree

LARGEST = 2**28
"""Bytes; a file that is larger, or becomes so when it is unpacked, is no image."""
_SIDECAR = 2**20
_DEPTH = 3
"""Tar files inside tar files are read so deep: ImageNet's training images are a tar file for each class in one."""


class Place(NamedTuple):
    """A member of an archive."""

    archive: int
    name: str
    offset: int = -1
    """First byte in a tar file; -1 in a zip file."""
    size: int = 0


@dataclass(frozen=True)
class ArchiveStore:
    """Members of tar and zip files."""

    files: tuple[str, ...]

    def read(self, key: Place) -> bytes:
        """The content of a member; ``OSError`` where it cannot be read."""
        if key.size > LARGEST:
            raise OSError(f"it has {key.size:,} bytes")
        if key.offset < 0:
            return self._from_zip(key)
        with Path(self.files[key.archive]).open("rb") as file:
            file.seek(key.offset)
            data = file.read(key.size)
        if len(data) < key.size:
            raise OSError("it is cut off")
        return data

    def where(self, key: Place) -> str:
        """The member and its archive."""
        return f"{key.name!r} in {self.files[key.archive]!r}"

    def _from_zip(self, key: Place) -> bytes:
        try:
            with _opened_zip(self.files[key.archive], os.getpid()).open(key.name) as file:
                # What the archive says of the size may be untrue.
                data = file.read(LARGEST + 1)
        except Exception as error:  # what zipfile raises for damaged files has no common base
            raise OSError(f"it cannot be unpacked: {error}") from error
        if len(data) > LARGEST:
            raise OSError(f"it has more than {LARGEST:,} bytes")
        return data


@functools.lru_cache(maxsize=16)
def _opened_zip(path: str, process: int) -> zipfile.ZipFile:
    """Opened once in each process: the list of members is read every time."""
    return zipfile.ZipFile(path)


def open_archives(path: str, files: Sequence[Path], wanted: set[str], ignore_labels: bool) -> Splits:
    """One set from one or more tar and zip files.

    A file named like a sample but ``.cls``, or ``.json`` with a label, gives its label (webdataset); otherwise the
    folder inside the archive does, or of several archives that are no numbered shards the archive. Splits are folders
    inside, or words in the names of the archives.

    Raises:
        DataError: damaged, compressed or encrypted archives, or no images in them.
    """
    store = ArchiveStore(tuple(map(str, files)))
    root = Path(os.path.commonpath([file.absolute().parent for file in files]))
    inside = [str(file.absolute().relative_to(root)) for file in files]
    splits = [split_in(name) for name in inside]
    entries: list[Entry] = []
    others: list[str] = []
    for i, file in enumerate(files):
        parts = [splits[i] or "train"] if any(splits) else []
        parts += (
            [file.stem] if _are_classes([f.stem for f, s in zip(files, splits, strict=True) if s == splits[i]]) else []
        )
        for name, place, label in _samples(store, list(_members(i, file)), others):
            entries.append(Entry("/".join([*parts, name]), place, label))
    return open_tree(path, store, entries, others, wanted, ignore_labels)


def _are_classes(stems: Sequence[str]) -> bool:
    """Whether the archives of a split are named for classes, not numbered; ImageNet's classes are n and a number."""
    differ = len({re.sub(r"\d+", "", stem) for stem in stems}) > 1
    return len(stems) > 1 and (differ or all(re.fullmatch(r"n\d{8}", stem) for stem in stems))


def _samples(
    store: ArchiveStore, members: Sequence[tuple[str, Place]], others: list[str]
) -> Iterator[tuple[str, Place, Label]]:
    """The images of an archive, with the labels beside them; files that are neither go to ``others``."""
    stems = {_stem(name) for name, _ in members if is_image(name)}
    labels: dict[str, Label] = {}
    for name, place in members:
        read = _SIDECARS.get(name.rpartition(".")[2].lower())
        if is_image(name):
            continue
        if read is not None and _stem(name) in stems and place.size <= _SIDECAR:
            with suppress(OSError):
                label = read(store.read(place))
                if label is not None:
                    labels.setdefault(_stem(name), label)
                continue
        others.append(name)
    for name, place in members:
        if is_image(name):
            yield name, place, labels.get(_stem(name))


def _stem(name: str) -> str:
    """What the files of a sample have in common in webdataset: everything up to the first dot of the name."""
    folder, slash, file = name.rpartition("/")
    return folder + slash + file.partition(".")[0]


def _cls(data: bytes) -> Label:
    text = data.decode("utf-8", "replace").strip()
    return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text or None


def _json(data: bytes) -> Label:
    try:
        table: Any = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found = (table.get(key) for key in KEYS) if isinstance(table, dict) else ()
    return next((value for value in found if isinstance(value, int | str) and not isinstance(value, bool)), None)


_SIDECARS: dict[str, Callable[[bytes], Label]] = {"cls": _cls, "json": _json}


def _members(archive: int, path: Path) -> Iterator[tuple[str, Place]]:
    """Path and place of every file in an archive."""
    try:
        if path.suffix.lower() == ".zip":
            with zipfile.ZipFile(path) as file:
                for info in {info.filename: info for info in file.infolist()}.values():
                    if info.flag_bits & 1:
                        raise DataError(f"--data: {str(path)!r} is encrypted.", "Unpack it first.")
                    if not info.is_dir():
                        yield _clean(info.filename), Place(archive, info.filename, -1, info.file_size)
        else:
            with tarfile.open(path, "r:") as tar:
                for name, offset, size in _tar_members(tar, "", 0, 0):
                    yield _clean(name), Place(archive, name, offset, size)
    except DataError:
        raise
    except Exception as error:  # what zipfile raises for damaged files has no common base
        raise DataError(
            f"--data: {str(path)!r} cannot be read as an archive: {error}.",
            "It may be cut off, or compressed: unpack .tar.gz to .tar first." if path.suffix != ".zip" else None,
        ) from error


def _tar_members(tar: tarfile.TarFile, prefix: str, start: int, depth: int) -> Iterator[tuple[str, int, int]]:
    end = 0
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # a gigabyte for a million members otherwise
        if member.size < 0 or member.offset_data < end:
            raise tarfile.ReadError("a member begins before the last one ends")
        end = member.offset_data + member.size
        if not member.isreg() or member.sparse is not None:
            continue  # links have no bytes of their own
        if member.name.lower().endswith(".tar") and depth < _DEPTH:
            content = tar.extractfile(member)
            assert content is not None
            with content, tarfile.open(fileobj=content, mode="r:") as inner:
                folder = f"{prefix}{member.name[:-4]}/"
                yield from _tar_members(inner, folder, start + member.offset_data, depth + 1)
        else:
            yield prefix + member.name, start + member.offset_data, member.size
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile itself ends in silence at a damaged header
        raise tarfile.ReadError(f"damaged after {end:,} bytes")


def _clean(name: str) -> str:
    """A member's path without ``.``, ``..`` and a leading ``/``."""
    return "/".join(part for part in name.replace("\\", "/").split("/") if part not in ("", ".", ".."))
