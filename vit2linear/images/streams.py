"""Sets on the Hub: read in order while they are fetched, or fetched whole for random access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vit2linear.errors import DataError
from vit2linear.hub import friendly_errors
from vit2linear.images.sets import ImageStream
from vit2linear.images.splits import Splits
from vit2linear.images.tables import Rows, label_column, lists, rows_of

DEFAULT_SET = "timm/mini-imagenet"


@dataclass(frozen=True)
class RowStream:
    """``start`` of an ``ImageStream``: the rows of a table, those whose content ``keep`` accepts, shuffled or not."""

    rows: Rows
    keep: Callable[[bytes], bool] | None = None
    shuffle_seed: int | None = None

    def __call__(self, epoch: int) -> Iterator[tuple[bytes, int]]:
        """(bytes, class index) of one epoch."""
        table = self.rows.table
        if self.shuffle_seed is not None:
            table = table.shuffle(seed=self.shuffle_seed + epoch, buffer_size=1000)
        for row in table:
            data, label = self.rows.unpack(row)
            if self.keep is None or self.keep(data):
                yield data, label


def open_hub_set(path: str, streaming: bool, ignore_labels: bool) -> Splits:
    """A set on the Hub, as streams in reading order or as lists.

    Raises:
        DataError: no such set, or no column of images.
        SourceError: the Hub does not answer, or refuses.
    """
    tables = _loaded(path, streaming)
    # Its validation images are from ImageNet's training set, which teachers have learned; those of test are not.
    judged = {"validation": ("test",)} if path == DEFAULT_SET else {}
    if not streaming:
        found = lists(path, tables, ignore_labels)
        return Splits(path, found.images, found.notes, **judged)
    images: dict[str, ImageStream] = {}
    notes = []
    for split, table in tables.items():
        rows = rows_of(f"{path} ({split})", table, ignore_labels)
        images[split] = ImageStream(rows.name, RowStream(rows), rows.classes)
        column = label_column(table.features) if not ignore_labels else None
        if column is not None and rows.classes is None:
            notes.append(
                f"{rows.name}: the column {column!r} does not say what its classes are, and a stream cannot be "
                "searched for them, so it counts as unlabelled. --no-stream fetches the set whole."
            )
    return Splits(path, images, tuple(notes), **judged)


def _loaded(path: str, streaming: bool) -> dict[str, Any]:
    import datasets

    datasets.disable_progress_bars()
    # It tells a counter outside the Hub which set is read, even where HF_ENDPOINT is a private mirror.
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        with friendly_errors(path):
            return dict(datasets.load_dataset(path, streaming=streaming))
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError, ValueError) as error:
        raise DataError(
            f"--data: {path!r} is neither a folder nor a readable set on the Hub ({' '.join(str(error).split())}).",
            "Give a folder of images or a Hub id OWNER/DATASET.",
        ) from error
