"""Labels as sets state them beside their images: numbers or names, in a column or in a file."""

from __future__ import annotations

from collections.abc import Sequence

from timm.utils.misc import natural_key

from vit2linear.errors import DataError

KEYS = ("label", "labels", "class", "cls", "target", "fine_label", "class_name", "category")
"""Names of a column, or of a key in a JSON file, that holds the label."""
MOST = 1_000_000
"""A number this large is no class."""

Label = int | str | None


def as_classes(labels: Sequence[Label], where: str) -> tuple[list[int], tuple[str, ...] | None]:
    """Class index of each image (-1 where there is none), and the classes: names in order, or ``"0"`` to the largest.

    Raises:
        DataError: numbers that are no class index, or names and numbers together.
    """
    known = [label for label in labels if label is not None]
    names = {label for label in known if isinstance(label, str)}
    numbers = {label for label in known if not isinstance(label, str)}
    if names and numbers:
        raise DataError(
            f"--data: {where} has labels that are names, such as {min(names)!r}, and others that are numbers."
        )
    if names:
        classes = tuple(sorted(names, key=lambda name: (natural_key(name), name)))
        index: dict[Label, int] = {name: i for i, name in enumerate(classes)}
        return [index[label] if label is not None else -1 for label in labels], classes
    check_range(min(numbers, default=-1), max(numbers, default=-1), MOST, where)
    classes = tuple(map(str, range(max(numbers, default=-1) + 1)))
    return [int(label) if label is not None else -1 for label in labels], classes or None


def check_range(low: int, high: int, classes: int, where: str) -> None:
    """Raise ``DataError`` unless all labels from ``low`` to ``high`` are one of so many classes, or -1 for none."""
    if low < -1 or high >= classes:
        raise DataError(
            f"--data: the labels of {where} run from {low} to {high}; allowed are 0 to {classes - 1}, and -1 for none.",
            "Repair the labels, or read the images alone with --ignore-labels.",
        )
