"""Which class of the model an image set's class is; without a sure answer there is no accuracy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from timm.data import ImageNetInfo, infer_imagenet_subset

from vit2linear.errors import DataError


class Match(NamedTuple):
    """The model's index of every class of an image set, and what is to be said about it."""

    indices: list[int] | None
    """-1 where the user's map says that the model has no such class; ``None``: accuracy has no meaning here."""
    note: str | None = None


def match_classes(
    classes: Sequence[str] | None,
    labels: Sequence[str] | None,
    num_classes: int,
    where: str,
    class_map: Mapping[str, int] | None = None,
) -> Match:
    """Find the model's class of every class of an image set: all of them, or there is no accuracy.

    Matched are, in this order: by ``class_map``; equal names (case, ``_`` and ``-`` aside; the first of several
    comma-separated names counts where it is unique) or WordNet synsets by timm's ImageNet tables; and bare indices,
    where they are exactly 0 .. n-1 of the model's n classes.

    Args:
        classes: the set's class names, ``None`` if unlabelled.
        labels: the model's class names, ``None`` if unknown.
        num_classes: the model's number of classes, 0 if it is headless.
        where: the set's name, for messages.
        class_map: the set's class to the model's index (``read_class_map``).

    Raises:
        DataError: the map lacks a class of the set, or the set has none.
    """
    if class_map is not None:
        return _by_map(classes, class_map, where)
    if classes is None or not num_classes:
        return Match(None)
    names = model_names(labels, num_classes)
    found = [names.get(normal(name), -1) for name in classes]
    if -1 not in found:
        return Match(found)
    if sorted(classes) == sorted(map(str, range(num_classes))):
        return Match([int(name) for name in classes])
    return Match(None, _unmatched(classes, found, labels, num_classes, where))


def normal(name: str) -> str:
    """A class name without what spellings differ in."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def model_names(labels: Sequence[str] | None, num_classes: int) -> dict[str, int]:
    """The model's index by every name (``normal``) that can only mean one class, synsets of ImageNet included."""
    names: dict[str, int] = {}
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is not None:
        info = ImageNetInfo(subset)
        if not labels or _same_order(labels, info):
            names |= {synset: i for i, synset in enumerate(info.label_names())}
    for spelled in ([normal(label.split(",")[0]) for label in labels or ()], [normal(label) for label in labels or ()]):
        count = Counter(spelled)
        names |= {name: i for i, name in enumerate(spelled) if count[name] == 1}
    return names


def _by_map(classes: Sequence[str] | None, class_map: Mapping[str, int], where: str) -> Match:
    if classes is None:
        raise DataError(f"--class-map: {where} has no classes to map.", "Leave --class-map out.")
    indices = {normal(name): index for name, index in class_map.items()} | dict(class_map)
    missing = [name for name in classes if name not in indices and normal(name) not in indices]
    if missing:
        raise DataError(
            f"--class-map: {len(missing)} of the {len(classes)} classes of {where} are not in it: {_some(missing)}.",
            "Give each class of the set an entry; -1 where the model has no such class.",
        )
    found = [indices[name if name in indices else normal(name)] for name in classes]
    without = [name for name, index in zip(classes, found, strict=True) if index < 0]
    if len(without) == len(classes):
        return Match(None, f"{where}: --class-map says that the model has none of its classes: no accuracy.")
    note = (
        f"{where}: without {len(without)} classes that the model has not, {_some(without)}, accuracy is of the others."
    )
    return Match(found, note if without else None)


def _unmatched(
    classes: Sequence[str], found: Sequence[int], labels: Sequence[str] | None, num_classes: int, where: str
) -> str:
    others = [name for name, index in zip(classes, found, strict=True) if index < 0]
    matched = f"{len(classes) - len(others)} of its {len(classes)} classes are among the model's {num_classes}"
    model = f"such as {_some(labels)}" if labels else "which have no names here"
    return (
        f"{where}: {matched}, {model}; not {_some(others)}. So there is no accuracy, only agreement and features; "
        "--class-map FILE says which classes these are."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")


def _same_order(labels: Sequence[str], info: ImageNetInfo) -> bool:
    """Whether the model's labels are ImageNet's, in ImageNet's order (wordings differ a little between sources)."""
    known = zip(labels, info.label_names(), info.label_descriptions(), strict=False)
    same = sum(
        normal(label) == synset or normal(label.split(",")[0]) == normal(text.split(",")[0])
        for label, synset, text in known
    )
    return bool(same > 0.5 * len(labels))
