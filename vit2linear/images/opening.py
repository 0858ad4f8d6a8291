"""Open what the user's path is: which kind of place, which split, what is held out, and several sets as one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from vit2linear.errors import DataError
from vit2linear.images.archives import open_archives
from vit2linear.images.folders import open_folder, walk
from vit2linear.images.held_out import hold_out
from vit2linear.images.patterns import expand, is_pattern
from vit2linear.images.sets import HeldOut, ImageList, ImageSets, ImageStream, joined, with_same_classes
from vit2linear.images.splits import Splits, shown
from vit2linear.images.streams import DEFAULT_SET, RowStream, open_hub_set
from vit2linear.images.tables import is_saved, open_table_files, open_table_folder
from vit2linear.images.tree import is_image
from vit2linear.resolve import DEMO, DEMO_FOLDER

DEFAULT_NOTE = (
    f"No --data given: streaming {DEFAULT_SET} from the Hub (50,000 ImageNet images of 100 classes, about 7 GB whole, "
    "ImageNet's research terms). Choose your own images with --data FOLDER or --data OWNER/DATASET."
)
ARCHIVES, TABLES = (".tar", ".zip"), (".parquet", ".arrow")
_METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_KINDS = "a folder of images, .tar, .zip or .parquet files, or a Hub id OWNER/DATASET"


@dataclass(frozen=True)
class ImageOptions:
    """How a path is read."""

    split: str | None = None
    """Split to learn from; default: the one that is called so."""
    val_split: str | None = None
    """Split to judge by; default: the one that is called so, otherwise images are held out."""
    ignore_labels: bool = False
    """Read no classes."""
    streaming: bool = True
    """Read a set on the Hub while it is fetched; otherwise fetch it whole, which gives random access."""
    seed: int = 0
    """For the order of a stream."""

    @property
    def wanted(self) -> set[str]:
        """The splits that were asked for."""
        return {name for name in (self.split, self.val_split) if name is not None}


def open_images(
    path: str | Sequence[str], options: ImageOptions = ImageOptions(), held_out: HeldOut | Sequence[str | None] = None
) -> ImageSets:
    """Open image sets, without decoding their images; several are mixed into one.

    Args:
        path: each is ``demo``; a folder of class folders (directly, or under folders named for splits), of images, of
            tables or of archives; a file ``.tar``, ``.zip``, ``.parquet`` or ``.arrow``, or a pattern of them with
            ``*``, ``?``, ``{a,b}`` and ``{000..003}``; or a ``datasets`` id.
        options: which splits, with classes or without, how the Hub is read.
        held_out: threshold of an earlier conversion, one for each path, so that the same images are held out again.

    Raises:
        DataError: nothing there, no images in it, or labels and splits that cannot be used.
    """
    if isinstance(path, str):
        found = _open(path, options, held_out if isinstance(held_out, str) else None)
        train, validation = with_same_classes([found.train, found.validation])
        return replace(found, train=train, validation=validation)
    thresholds = [None] * len(path) if held_out is None else [held_out] if isinstance(held_out, str) else [*held_out]
    if len(thresholds) != len(path):
        raise DataError(f"--data: {len(path)} sets cannot be those of which {len(thresholds)} had images held out.")
    places = [Path(place).resolve() for place in path]
    if len(set(places)) < len(places):
        raise DataError(f"--data: {shown(path)} name the same set twice.", "Name each set once.")
    sets = [_open(place, options, threshold) for place, threshold in zip(path, thresholds, strict=True)]
    parts = with_same_classes([part for found in sets for part in (found.train, found.validation)])
    lists = [part for part in parts if isinstance(part, ImageList)]
    if len(lists) < len(parts):
        streams = dict.fromkeys(found.path for found in sets if isinstance(found.train, ImageStream))
        raise DataError(
            f"--data: {' and '.join(map(str, streams))} is read as a stream, which cannot be mixed with other sets.",
            "--no-stream fetches it whole.",
        )
    return ImageSets(
        tuple(path),
        joined(lists[::2]),
        joined(lists[1::2]),
        tuple(found.held_out if isinstance(found.held_out, str) else None for found in sets),
        tuple(note for found in sets for note in found.notes),
    )


def on_hub(path: str) -> bool:
    """Whether a path is a set on the Hub: ``OWNER/DATASET`` that is neither a folder nor a file here."""
    return bool(re.fullmatch(r"[\w.-]+/[\w.-]+", path)) and not path.startswith(".") and not Path(path).exists()


def _open(path: str, options: ImageOptions, held_out: str | None) -> ImageSets:
    splits = _splits(path, options)
    chosen, judging = splits.choose(options.split, options.val_split)
    train, notes = splits.images[chosen], splits.notes
    if isinstance(train, ImageStream) and isinstance(train.start, RowStream):
        train = replace(train, start=replace(train.start, shuffle_seed=options.seed))
    unused = splits.unused((chosen, judging))
    if unused:
        notes = (*notes, f"{path}: learning from {chosen!r}; not read: {shown(unused)}. --split chooses.")
    if judging is not None:
        return ImageSets(path, train, splits.images[judging], None, notes)
    return replace(hold_out(path, train, held_out), notes=notes)


def _splits(path: str, options: ImageOptions) -> Splits:
    """By what the path is."""
    place = DEMO_FOLDER / "data" if path == DEMO else Path(path)
    try:
        folder, file = place.is_dir(), place.is_file()
    except (OSError, ValueError):  # no path at all, too long for one for example
        folder = file = False
    if folder:
        return _in_folder(path, place, options)
    if file:
        return _in_files(path, [place], options)
    if is_pattern(path):
        return _in_files(path, expand(path), options)
    if not on_hub(path):
        raise DataError(f"--data: there is no folder {path!r}, nor a file.", f"Give {_KINDS}.")
    return open_hub_set(path, options.streaming, options.ignore_labels)


def _in_folder(path: str, folder: Path, options: ImageOptions) -> Splits:
    """Tables, then images, then archives: what is beside the first of them that is there is no image set."""
    found = walk(folder)
    kinds = Counter(PurePosixPath(file).suffix.lower() for file in found.files)
    images = any(is_image(file) for file in found.files)
    described = images and any(PurePosixPath(file).name in _METADATA for file in found.files)
    if is_saved(folder) or described or any(kinds[suffix] for suffix in TABLES):
        splits = open_table_folder(path, folder, options.ignore_labels)
        if images and not described:
            splits = replace(splits, notes=(*splits.notes, f"{path}: the images beside the tables are not read."))
    elif images or not any(kinds[suffix] for suffix in ARCHIVES):
        splits = open_folder(path, folder, found.files, options.wanted, options.ignore_labels)
    else:
        files = [folder / file for file in found.files if PurePosixPath(file).suffix.lower() in ARCHIVES]
        splits = open_archives(path, files, options.wanted, options.ignore_labels)
    return replace(splits, notes=(*found.notes, *splits.notes))


def _in_files(path: str, files: Sequence[Path], options: ImageOptions) -> Splits:
    kinds = {file.suffix.lower() for file in files}
    if kinds <= {*ARCHIVES}:
        return open_archives(path, files, options.wanted, options.ignore_labels)
    if kinds <= {*TABLES}:
        return open_table_files(path, files, options.ignore_labels)
    other = next(file for file in files if file.suffix.lower() not in (*ARCHIVES, *TABLES))
    packed = other.name.lower().endswith((".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst"))
    raise DataError(
        f"--data: {str(other)!r} is no set of images.",
        "A compressed tar file has no random access: unpack it to .tar, or to a folder."
        if packed
        else f"Give {_KINDS}.",
    )
