"""Images in the rows of tables: parquet, arrow, and sets that ``datasets`` has saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vit2linear.errors import DataError
from vit2linear.images.labels import KEYS, as_classes, check_range
from vit2linear.images.sets import EXTENSIONS, ImageList
from vit2linear.images.splits import Splits, split_in


@dataclass(frozen=True)
class Rows:
    """A table of ``datasets`` with undecoded images."""

    name: str
    table: Any
    image: str
    label: str | None
    """Column of class indices."""
    classes: tuple[str, ...] | None

    def unpack(self, row: dict[str, Any]) -> tuple[bytes, int]:
        """Encoded bytes and class index of a row.

        Raises:
            OSError: the image cannot be read.
            DataError: a label out of range.
        """
        label = row[self.label] if self.label is not None else None
        index = -1 if label is None else int(label)
        if self.classes is not None:
            check_range(index, index, len(self.classes), self.name)
        cell = row[self.image] or {"bytes": None, "path": None}
        # A row without an image gives no bytes, which is one more image that cannot be decoded.
        return (cell["bytes"] or b"") if cell["path"] is None or cell["bytes"] else _fetched(cell["path"]), index


@dataclass(frozen=True)
class _Table:
    rows: Rows
    labels: tuple[int, ...] | None
    """In the place of a column that holds names."""

    def read(self, i: int) -> tuple[bytes, int]:
        data, label = self.rows.unpack(self.rows.table[i])
        return data, label if self.labels is None else self.labels[i]

    def where(self, i: int) -> str:
        return f"row {i} of {self.rows.name}"


def open_table_files(path: str, files: Sequence[Path], ignore_labels: bool) -> Splits:
    """Parquet or arrow files; splits are words in their names.

    Raises:
        DataError: unreadable files, no column of images, or labels out of range.
    """
    kinds = {"parquet" if file.suffix.lower() == ".parquet" else "arrow" for file in files}
    if len(kinds) > 1:
        raise DataError(f"--data: {path!r} names parquet and arrow files.", "Name one kind.")
    by_split: dict[str, list[str]] = {}
    for file in files:
        by_split.setdefault(split_in(file.stem) or "train", []).append(str(file))
    return lists(path, _loaded(path, kinds.pop(), data_files=by_split), ignore_labels)


def open_table_folder(path: str, folder: Path, ignore_labels: bool) -> Splits:
    """A folder that ``datasets`` reads, or one that it has saved.

    Raises:
        DataError: unreadable files, no column of images, or labels out of range.
    """
    return lists(path, _loaded(path, str(folder)), ignore_labels)


def is_saved(folder: Path) -> bool:
    """Whether ``save_to_disk`` wrote the folder."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def lists(path: str, tables: Mapping[str, Any], ignore_labels: bool) -> Splits:
    """Tables with random access as lists of images."""
    images = {}
    for split, table in tables.items():
        name = f"{path} ({split})"
        rows = rows_of(name, table, ignore_labels)
        labels, classes = None, rows.classes
        column = label_column(table.features) if not ignore_labels else None
        if column is not None:
            values = table.select_columns([column]).with_format("arrow")[:].column(0).to_pylist()
            if classes is None:
                labels, classes = as_classes(values, name)
            else:
                seen = [value for value in values if value is not None]
                check_range(min(seen, default=-1), max(seen, default=-1), len(classes), name)
        reader = _Table(rows, tuple(labels) if labels is not None else None)
        images[split] = ImageList(name, len(table), reader, classes)
    if not any(image.size for image in images.values()):
        raise DataError(f"--data: {path!r} holds no images.", f"Read are {', '.join(EXTENSIONS)}.")
    return Splits(path, images)


def rows_of(name: str, table: Any, ignore_labels: bool) -> Rows:
    """The column of images, and that of labels where it knows the names of the classes.

    Raises:
        DataError: no column of images.
    """
    import datasets

    features = table.features or {}
    image = next((column for column, f in features.items() if isinstance(f, datasets.Image)), None)
    image = image or next((column for column, f in features.items() if _holds_bytes(f)), None)
    if image is None:
        raise DataError(f"--data: {name} has no image column.", f"Its columns: {', '.join(features) or 'unknown'}.")
    label = None if ignore_labels else label_column(features)
    named = label is not None and isinstance(features[label], datasets.ClassLabel)
    classes = tuple(features[label].names) if label is not None and named else None
    if isinstance(table, datasets.IterableDataset):
        table = table.decode(False)  # files of a repository are decoded by threads, whatever the column says
    return Rows(name, table.cast_column(image, datasets.Image(decode=False)), image, label if named else None, classes)


def label_column(features: Mapping[str, Any]) -> str | None:
    """The first column of class labels; otherwise the first one of whole numbers or names that is called so."""
    import datasets

    named = (column for column, f in features.items() if isinstance(f, datasets.ClassLabel))
    plain = (
        key
        for key in KEYS
        if isinstance(f := features.get(key), datasets.Value)
        and f.dtype.removeprefix("u").startswith(("int", "string"))
    )
    return next(named, None) or next(plain, None)


def _holds_bytes(feature: Any) -> bool:
    """Whether a column that ``datasets`` does not know as images may hold encoded ones."""
    import datasets

    if isinstance(feature, dict) and set(feature) == {"bytes", "path"}:
        feature = feature["bytes"]
    return isinstance(feature, datasets.Value) and feature.dtype in ("binary", "large_binary")


def _loaded(path: str, source: str, **options: Any) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    try:
        saved = not options and is_saved(Path(source))
        loaded = datasets.load_from_disk(source) if saved else datasets.load_dataset(source, **options)
    except Exception as error:  # datasets raises its own, pyarrow's and pandas' errors for unreadable files
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"--data: {path!r} cannot be read by datasets: {reason}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def _fetched(path: str) -> bytes:
    """A file that a row only names: on this disk, or inside an archive or a repository on the Hub."""
    if "://" not in path:
        return Path(path).read_bytes()
    from datasets.utils.file_utils import xopen

    with xopen(path, "rb") as file:
        data: bytes = file.read()
    return data
