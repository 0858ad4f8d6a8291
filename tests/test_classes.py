"""Which class of the model a class of an image set is; an unsure answer is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from timm.data import ImageNetInfo

from vit2linear.class_map import read_class_map
from vit2linear.classes import match_classes
from vit2linear.errors import DataError

LABELS = ["T-shirt", "Trouser", "crane, bird", "crane, machine", "tench, Tinca tinca"]


@pytest.mark.parametrize(
    ("classes", "labels", "num_classes", "indices"),
    [
        (["trouser", "t_shirt", "tench"], LABELS, 5, [1, 0, 4]),
        (None, LABELS, 5, None),
        (["a", "b"], None, 0, None),
        (["2", "0", "1"], None, 3, [2, 0, 1]),
        (["0", "1"], None, 3, None),
        (["u", "v", "w", "x", "y"], LABELS, 5, None),
        (["crane", "trouser"], LABELS, 5, None),
        (["same", "other"], ["same", "same", "other"], 3, None),
    ],
)
def test_classes_are_matched_or_there_is_no_accuracy(
    classes: list[str] | None, labels: list[str] | None, num_classes: int, indices: list[int] | None
) -> None:
    found = match_classes(classes, labels, num_classes, "x")
    assert found.indices == indices
    # Labelled, a head, and no accuracy: never in silence.
    assert bool(found.note) == bool(classes and num_classes and indices is None)


def test_what_did_not_match_is_named() -> None:
    note = match_classes(["crane", "trouser", "tench"], LABELS, 5, "my set").note or ""
    assert note.startswith("my set: 2 of its 3 classes are among the model's 5, such as 'T-shirt', ")
    assert "not 'crane'. So there is no accuracy" in note and "--class-map" in note
    assert "have no names" in (match_classes(["a", "b"], None, 5, "my set").note or "")


def test_synsets_are_matched_by_timms_tables() -> None:
    info = ImageNetInfo("imagenet-1k")
    synsets = info.label_names()
    words = info.label_descriptions()
    assert match_classes([synsets[7], synsets[500]], None, 1000, "x").indices == [7, 500]
    assert match_classes([synsets[7], synsets[500]], words, 1000, "x").indices == [7, 500]
    assert match_classes([synsets[7], synsets[500]], synsets, 1000, "x").indices == [7, 500]
    assert match_classes([synsets[7], "goldfish"], words, 1000, "x").indices == [7, 1]
    assert match_classes([synsets[7], synsets[500]], words[::-1], 1000, "x").indices is None
    assert len(match_classes(synsets[:10], None, 21843, "x").indices or []) == 10


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("map.json", '{"pants": "trouser", "bird": 2, "fish": "tench"}'),
        ("map.toml", 'pants = "Trouser"\nbird = 2\nfish = 4\n'),
        ("map.txt", "shirts\npants\nbird\nlift\nfish\n\n"),
    ],
)
def test_class_maps(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    table = read_class_map(str(tmp_path / name), LABELS, 5)
    assert match_classes(["bird", "Fish", "pants"], LABELS, 5, "x", table) == ([2, 4, 1], None)
    with pytest.raises(DataError, match=r"1 of the 2 classes of my set are not in it: 'cat'\. Give each class"):
        match_classes(["bird", "cat"], LABELS, 5, "my set", table)
    with pytest.raises(DataError, match="my set has no classes to map"):
        match_classes(None, LABELS, 5, "my set", table)


def test_classes_that_the_model_has_not(tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"bird": 2, "cat": -1}')
    table = read_class_map(str(path), LABELS, 5)
    found = match_classes(["bird", "cat"], LABELS, 5, "x", table)
    assert found.indices == [2, -1] and "'cat'" in (found.note or "")
    none = match_classes(["cat"], LABELS, 5, "x", table)
    assert none.indices is None and "no accuracy" in (none.note or "")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("map.json", '{"a": "trousers", "b": 5, "c": 1.5, "d": true}', "'a'.* did you mean 'trouser'.*'b': 5 is.*'d'"),
        ("map.json", "[1, 2]", "holds no table"),
        ("map.json", "{", "cannot be read"),
        ("map.json", "[" * 100_000, "cannot be read"),
        ("map.toml", "a = ", "cannot be read"),
        ("map.txt", "a\nb\na", "twice"),
        ("map.txt", "a\n\nb", "empty line"),
        ("map.txt", "a\nb\nc\nd\ne\nf", "'f': 5 is no index from 0 to 4"),
        ("map.txt", None, "cannot be read"),
    ],
)  # fmt: skip
def test_wrong_class_maps(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        read_class_map(str(tmp_path / name), LABELS, 5)
    with pytest.raises(DataError, match="the model has no classes"):
        read_class_map(str(tmp_path / name), None, 0)
