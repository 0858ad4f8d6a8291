"""Which class of the model an image set's class is; without a sure answer there is no accuracy."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from timm.data import ImageNetInfo, infer_imagenet_subset

from vit2linear.errors import DataError


def match_classes(
    classes: Sequence[str] | None, labels: Sequence[str] | None, num_classes: int, where: str
) -> list[int] | None:
    """The model's index of every class of an image set, or ``None`` when accuracy has no meaning here.

    Matched are, in this order: equal names (case, ``_`` and ``-`` aside; the first of several comma-separated names
    counts where it is unique), WordNet synsets by timm's ImageNet tables, and bare indices 0 .. n-1.

    Args:
        classes: the set's class names, ``None`` if unlabelled.
        labels: the model's class names, ``None`` if unknown.
        num_classes: the model's number of classes, 0 if it is headless.
        where: the set's name, for the message.

    Raises:
        DataError: the set's classes are others than the model's.
    """
    if classes is None or not num_classes:
        return None
    matched = _by_name(classes, labels) or _by_synset(classes, labels, num_classes) or _by_index(classes, num_classes)
    if matched is None and len(classes) != num_classes:
        raise DataError(
            f"{where} has {len(classes)} classes and the model has {num_classes}, and their names do not match "
            f"({', '.join(classes[:3])}, ... against {', '.join(labels[:3]) if labels else 'unnamed ones'}, ...).",
            "Rename the class folders, or use --ignore-labels to distil and compare without accuracy.",
        )
    return matched


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _by_name(classes: Sequence[str], labels: Sequence[str] | None) -> list[int] | None:
    if not labels:
        return None
    names = {_normal(label): i for i, label in enumerate(labels)}
    first = [_normal(label.split(",")[0]) for label in labels]
    unique = {name for name, count in Counter(first).items() if count == 1}
    names = {name: i for i, name in enumerate(first) if name in unique} | names
    found = [names.get(_normal(c)) for c in classes]
    return None if None in found else [i for i in found if i is not None]


def _by_synset(classes: Sequence[str], labels: Sequence[str] | None, num_classes: int) -> list[int] | None:
    subset = infer_imagenet_subset({"num_classes": num_classes})
    if subset is None or not all(re.fullmatch(r"n\d{8}", c) for c in classes):
        return None
    info = ImageNetInfo(subset)
    if labels and not _same_order(labels, info):
        return None
    index = {synset: i for i, synset in enumerate(info.label_names())}
    found = [index.get(c) for c in classes]
    return None if None in found else [i for i in found if i is not None]


def _same_order(labels: Sequence[str], info: ImageNetInfo) -> bool:
    """Whether the model's labels are ImageNet's, in ImageNet's order (wordings differ a little between sources)."""
    known = zip(labels, info.label_names(), info.label_descriptions(), strict=False)
    same = sum(
        _normal(label) == synset or _normal(label.split(",")[0]) == _normal(text.split(",")[0])
        for label, synset, text in known
    )
    return bool(same > 0.5 * len(labels))


def _by_index(classes: Sequence[str], num_classes: int) -> list[int] | None:
    if sorted(classes) == sorted(map(str, range(num_classes))):
        return [int(c) for c in classes]
    return None
