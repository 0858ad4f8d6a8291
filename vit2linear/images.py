"""Sets of images: class folders, flat folders, and whatever ``datasets`` reads, behind two small shapes.

``ImageList`` has random access (folders, local tables); ``ImageStream`` is read in order (sets on the Hub). Both give
the encoded bytes, so that a held-out image is chosen by its content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vit2linear.errors import DataError
from vit2linear.resolve import DEMO, DEMO_FOLDER

EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif", ".ppm")
DEFAULT_SET = "timm/mini-imagenet"
DEFAULT_NOTE = (
    f"No --data given: streaming {DEFAULT_SET} from the Hub (50,000 ImageNet images of 100 classes, about 7 GB whole, "
    "ImageNet's research terms). Choose your own images with --data FOLDER or --data OWNER/DATASET."
)
HELD_OUT = 0.05
_TRAIN = ("train", "training")
_VALIDATION = ("validation", "val", "valid", "test", "eval")
_TABLES = ("*.parquet", "*.arrow", "dataset_dict.json", "state.json", "*.csv", "*.jsonl", "*.zip", "*.tar")


@runtime_checkable
class Reader(Protocol):
    """Random access to encoded images."""

    def read(self, i: int) -> tuple[bytes, int]:
        """Encoded bytes and class index (-1 where there is none) of image ``i``."""

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
        """Encoded bytes and class index (-1 where there is none) of image ``i``."""
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


@dataclass(frozen=True)
class ImageSets:
    """What the user's path holds: images to learn from and images to judge by."""

    path: str
    train: Images
    validation: Images
    held_out: str | None = field(default=None)
    """Without a validation split: images whose content hash is at most this are held out."""


@dataclass(frozen=True)
class _Picked:
    reader: Reader
    indices: tuple[int, ...]

    def read(self, i: int) -> tuple[bytes, int]:
        return self.reader.read(self.indices[i])

    def where(self, i: int) -> str:
        return self.reader.where(self.indices[i])


@dataclass(frozen=True)
class _Files:
    paths: tuple[str, ...]
    labels: tuple[int, ...]

    def read(self, i: int) -> tuple[bytes, int]:
        return Path(self.paths[i]).read_bytes(), self.labels[i]

    def where(self, i: int) -> str:
        return repr(self.paths[i])


@dataclass(frozen=True)
class _Rows:
    name: str
    table: Any
    image: str
    label: str | None

    def read(self, i: int) -> tuple[bytes, int]:
        return self.unpack(self.table[i])

    def where(self, i: int) -> str:
        return f"row {i} of {self.name}"

    def unpack(self, row: dict[str, Any]) -> tuple[bytes, int]:
        """A row of ``datasets`` with undecoded images."""
        cell = row[self.image]
        data = cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes()
        label = row[self.label] if self.label else None
        return data, -1 if label is None else int(label)


@dataclass(frozen=True)
class _Stream:
    rows: _Rows
    keep: Callable[[bytes], bool] | None
    shuffle_seed: int | None

    def __call__(self, epoch: int) -> Iterator[tuple[bytes, int]]:
        table = self.rows.table
        if self.shuffle_seed is not None:
            table = table.shuffle(seed=self.shuffle_seed + epoch, buffer_size=1000)
        for row in table:
            data, label = self.rows.unpack(row)
            if self.keep is None or self.keep(data):
                yield data, label


@dataclass(frozen=True)
class _Digest:
    threshold: str
    held_out: bool

    def __call__(self, data: bytes) -> bool:
        return (content_digest(data) <= self.threshold) is self.held_out


def content_digest(data: bytes) -> str:
    """16 hex digits that depend on the encoded image alone."""
    return hashlib.sha256(data).hexdigest()[:16]


def open_images(path: str, seed: int = 0, held_out: str | None = None) -> ImageSets:
    """Open a folder or a set on the Hub, without reading its images.

    Args:
        path: ``demo``, class folders (directly, or under ``train`` and ``val``), a flat folder, a folder of
            tables, or a ``datasets`` id.
        seed: for the order of a stream.
        held_out: threshold of an earlier conversion, so that the same images are held out again.

    Raises:
        DataError: nothing there, or no images in it.
    """
    folder = DEMO_FOLDER / "data" if path == DEMO else Path(path)
    if folder.is_dir():
        if any(next(folder.rglob(pattern), None) for pattern in _TABLES):
            splits = _tables(path, folder)
        else:
            splits = _folders(path, folder)
    elif folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or path.startswith("."):
        raise DataError(f"--data: there is no folder {path!r}.", "Give a folder of images or a Hub id OWNER/DATASET.")
    else:
        splits = _hub(path, seed)
    train = next((splits[s] for s in _TRAIN if s in splits), None) or next(iter(splits.values()))
    validation = next((splits[s] for s in _VALIDATION if s in splits), None)
    if validation is not None and validation is not train:
        return ImageSets(path, train, validation)
    return _hold_out(path, train, held_out)


def _hold_out(path: str, images: Images, threshold: str | None) -> ImageSets:
    """Split off the images with the smallest content hashes."""
    if isinstance(images, ImageStream):
        threshold = threshold or f"{int(HELD_OUT * 2**64):016x}"
        assert isinstance(images.start, _Stream)
        train = replace(images.start, keep=_Digest(threshold, False))
        kept = replace(images.start, keep=_Digest(threshold, True), shuffle_seed=None)
        validation = replace(images, name=f"{images.name}, held-out 5%", start=kept)
        return ImageSets(path, replace(images, start=train), validation, threshold)
    if images.size < 2:
        raise DataError(f"--data: {path!r} holds {images.size} image; at least 2 are needed, one is held out.")
    digests = [content_digest(images.read(i)[0]) for i in range(images.size)]
    threshold = threshold or sorted(digests)[max(1, round(HELD_OUT * images.size)) - 1]
    held = [i for i, d in enumerate(digests) if d <= threshold]
    rest = [i for i, d in enumerate(digests) if d > threshold]
    if not held or not rest:
        raise DataError(
            f"--data: {path!r} is not the set that this model was distilled on: no image of it was held out."
        )
    train_name, validation_name = f"{images.name}, without held-out", f"{images.name}, held-out 5%"
    return ImageSets(path, images.subset(rest, train_name), images.subset(held, validation_name), threshold)


def _folders(path: str, folder: Path) -> dict[str, Images]:
    subfolders = {p.name.lower(): p for p in folder.iterdir() if p.is_dir()}
    names = [s for s in (*_TRAIN, *_VALIDATION) if s in subfolders]
    roots = (
        {s: subfolders[s] for s in names} if names and set(subfolders) <= {*_TRAIN, *_VALIDATION} else {"train": folder}
    )
    return {split: _folder(f"{path} ({split})" if names else path, root) for split, root in roots.items()}


def _folder(name: str, root: Path) -> ImageList:
    """timm's folder reader: the class is the name of the leaf folder."""
    from timm.data.readers.reader_image_folder import find_images_and_targets

    found, class_to_index = find_images_and_targets(str(root), types=EXTENSIONS)
    if not found:
        raise DataError(f"--data: {str(root)!r} holds no images.", f"Read are {', '.join(EXTENSIONS)}.")
    paths, labels = zip(*found, strict=True)
    flat = list(class_to_index) == [""]
    if "" in class_to_index and not flat:
        raise DataError(
            f"--data: {str(root)!r} holds images beside class folders, so their class is unclear.",
            "Move them into class folders, or all into one flat folder.",
        )
    classes = None if flat else tuple(sorted(class_to_index, key=class_to_index.__getitem__))
    return ImageList(name, len(paths), _Files(paths, (-1,) * len(paths) if flat else labels), classes)


def _tables(path: str, folder: Path) -> dict[str, Images]:
    import datasets

    datasets.disable_progress_bars()
    saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
    try:
        loaded = datasets.load_from_disk(folder) if saved else datasets.load_dataset(str(folder))
    except Exception as error:  # datasets raises its own, pyarrow's and pandas' errors for unreadable files
        raise DataError(f"--data: {path!r} cannot be read by datasets: {str(error).splitlines()[0]}") from error
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    images: dict[str, Images] = {}
    for split, table in splits.items():
        rows, classes = _columns(path, table)
        images[split] = ImageList(f"{path} ({split})", len(table), rows, classes)
    return images


def _hub(path: str, seed: int) -> dict[str, Images]:
    """A set on the Hub, streamed."""
    import datasets

    from vit2linear.hub import friendly_errors

    datasets.disable_progress_bars()
    # It tells a counter outside the Hub which set is read, even where HF_ENDPOINT is a private mirror.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        with friendly_errors(path):
            loaded = datasets.load_dataset(path, streaming=True)
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise DataError(
            f"--data: {path!r} is neither a folder nor a readable set on the Hub ({str(error).splitlines()[0]}).",
            "Give a folder of images or a Hub id OWNER/DATASET.",
        ) from error
    if path == DEFAULT_SET:
        # Its validation images are from ImageNet's training set, which teachers have learned; those of test are not.
        loaded.pop("validation", None)
    images: dict[str, Images] = {}
    for split, table in loaded.items():
        rows, classes = _columns(path, table)
        shuffle = seed if split in _TRAIN else None
        images[split] = ImageStream(f"{path} ({split})", _Stream(rows, None, shuffle), classes)
    return images


def _columns(path: str, table: Any) -> tuple[_Rows, tuple[str, ...] | None]:
    """Find the image and the label column."""
    import datasets

    features = table.features or {}
    image = next((name for name, f in features.items() if isinstance(f, datasets.Image)), None)
    if image is None:
        raise DataError(f"--data: {path!r} has no image column.", f"Its columns: {', '.join(features) or 'unknown'}.")
    label = next((name for name, f in features.items() if isinstance(f, datasets.ClassLabel)), None)
    classes = tuple(features[label].names) if label else None
    return _Rows(path, table.cast_column(image, datasets.Image(decode=False)), image, label), classes
