"""Sets on the Hub, streamed and fetched whole: parquet, image files in folders, shards; with labels and without."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from tests.hub_user import User
from tests.test_images import as_tar, class_files, image

SCRIPT = """
import hashlib, json, sys
from vit2linear.errors import DataError
from vit2linear.images import ImageList, ImageOptions, open_images

def summary(images):
    rows = [images.read(i) for i in range(images.size)] if isinstance(images, ImageList) else list(images.start(0))
    named = {hashlib.sha1(d).hexdigest(): images.classes[y] if images.classes and y >= 0 else None for d, y in rows}
    return {"kind": type(images).__name__, "images": named}

found = {}
for name in sys.argv[1:]:
    for streaming in (True, False):
        sets = open_images(name, ImageOptions(streaming=streaming))
        parts = {"train": summary(sets.train), "validation": summary(sets.validation)}
        found[f"{name} {streaming}"] = parts | {"held_out": sets.held_out, "notes": sets.notes}
for paths, options in (((sys.argv[1], sys.argv[2]), ImageOptions()), (sys.argv[1], ImageOptions("absent"))):
    try:
        open_images(paths, options)
    except DataError as error:
        found.setdefault("errors", []).append(str(error))
mixed = open_images((sys.argv[1], sys.argv[2]), ImageOptions(streaming=False))
found["mixed"] = [mixed.train.size, mixed.validation.size]
print(json.dumps(found))
"""


def digests(files: dict[str, bytes], prefix: str = "") -> dict[str, str]:
    import hashlib

    return {hashlib.sha1(d).hexdigest(): n.split("/")[-2] for n, d in files.items() if n.startswith(prefix)}


@pytest.mark.slow
def test_sets_on_the_hub(user: User) -> None:
    import datasets

    folders = class_files(("train/", "test/"), 3)
    user.hub.add_repo("me/folders", folders, "dataset")
    flat = {f"{i}.png": image() for i in range(40)}
    user.hub.add_repo("me/flat", flat, "dataset")
    shard = {f"{i}.{end}": data for i in range(40) for end, data in (("png", image()), ("cls", str(i % 3).encode()))}
    path = as_tar(user.home / "train-0.tar", shard)
    user.hub.add_repo("me/shards", {"train-0.tar": path.read_bytes()}, "dataset")
    table = io.BytesIO()
    data = [image() for _ in range(6)]
    rows = {"image": [{"bytes": d, "path": None} for d in data], "label": [i % 2 for i in range(6)]}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(table)
    files = {f"data/{split}-00000-of-00001.parquet": table.getvalue() for split in ("train",)}
    files["data/validation-00000-of-00001.parquet"] = _other_rows(features)
    user.hub.add_repo("me/tables", files, "dataset")
    names = ["me/tables", "me/folders", "me/flat", "me/shards"]
    found: dict[str, Any] = json.loads(user.execute([sys.executable, "-c", SCRIPT, *names]).stdout)
    for streaming, kind in ((True, "ImageStream"), (False, "ImageList")):
        tables, labelled, plain, shards = (found[f"{name} {streaming}"] for name in names)
        assert {part[s]["kind"] for part in (tables, labelled, plain) for s in ("train", "validation")} == {kind}
        assert (len(tables["train"]["images"]), len(tables["validation"]["images"])) == (6, 2)
        assert sorted(tables["train"]["images"].values()) == ["a", "a", "a", "b", "b", "b"]
        assert labelled["train"]["images"] == digests(folders, "train")
        assert labelled["validation"]["images"] == digests(folders, "test")
        assert not labelled["held_out"] and plain["held_out"] and shards["held_out"]
        both = plain["train"]["images"] | plain["validation"]["images"]
        assert len(both) == 40 and set(both.values()) == {None}
        both = shards["train"]["images"] | shards["validation"]["images"]
        # A stream does not say how far its numbers go.
        assert len(both) == 40 and set(both.values()) == ({None} if streaming else {"0", "1", "2"})
        assert any("--no-stream" in note for note in shards["notes"]) is streaming
    mixing, absent = found["errors"]
    assert "is read as a stream, which cannot be mixed" in mixing and "--no-stream" in mixing
    assert "has no split 'absent'. It has 'train', 'validation'" in absent
    assert found["mixed"] == [6 + 6, 2 + 6]


def _other_rows(features: Any) -> bytes:
    import datasets

    table = io.BytesIO()
    rows = {"image": [{"bytes": image(), "path": None} for _ in range(2)], "label": [0, 1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(table)
    return table.getvalue()
