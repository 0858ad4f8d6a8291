from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from tests.conftest import write_images
from vit2linear.data import eval_batches, train_batches
from vit2linear.errors import DataError
from vit2linear.images import ImageList, ImageSets, ImageStream, content_digest, open_images
from vit2linear.samples import seeded_view
from vit2linear.views import eval_view, train_view

CONFIG: dict[str, Any] = {
    "input_size": (3, 32, 32),
    "interpolation": "bicubic",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "crop_pct": 1.0,
    "crop_mode": "center",
}


def listed(images: object) -> ImageList:
    assert isinstance(images, ImageList)
    return images


def batches(images: Any, steps: int, **kwargs: Any) -> torch.Tensor:
    options = {"batch_size": 6, "seed": 3, "workers": 0} | kwargs
    return torch.stack([x for x, _ in train_batches(images, train_view(CONFIG, "mild"), steps=steps, **options)])


def test_augmentation_by_flips_alone(class_folders: Path) -> None:
    images = listed(open_images(str(class_folders)).train)
    data, where = images.read(0)[0], images.where(0)
    plain, flips = eval_view(CONFIG)(data, where), train_view(CONFIG, "flip")
    torch.manual_seed(0)
    seen = [flips(data, where) for _ in range(10)]
    mirrored = [not torch.equal(x, plain) for x in seen]
    assert 0 < sum(mirrored) < 10
    # Mirrored before it is resized, which is the same but for rounding.
    assert all((x.flip(-1) - plain).abs().max() < 0.02 for x, m in zip(seen, mirrored, strict=True) if m)


def test_class_folders(class_folders: Path) -> None:
    sets = open_images(str(class_folders))
    assert sets.held_out is None
    assert listed(sets.train).size == 24 and listed(sets.validation).size == 12
    assert sets.train.classes == ("bread", "dog", "egg")
    labels = torch.cat([y for _, y in eval_batches(sets.validation, eval_view(CONFIG), 5, None, 0)])
    assert labels.bincount().tolist() == [4, 4, 4]


def test_without_validation_the_smallest_digests_are_held_out(flat_folder: Path, tmp_path: Path) -> None:
    sets = open_images(str(flat_folder))
    train, held = listed(sets.train), listed(sets.validation)
    assert (train.size, held.size) == (38, 2) and train.classes is None
    digests = [content_digest(images.read(i)[0]) for images in (train, held) for i in range(images.size)]
    assert len(set(digests)) == 40 and max(digests[38:]) < min(digests[:38]) and max(digests[38:]) == sets.held_out
    # Content decides: other names, and other images beside them, hold the same ones out again.
    for i, path in enumerate(sorted(flat_folder.iterdir())):
        shutil.copy(path, tmp_path / f"{100 - i}{path.suffix}")
    write_images(tmp_path, 3, seed=9)
    again = open_images(str(tmp_path), held_out=sets.held_out)
    kept = {content_digest(listed(again.validation).read(i)[0]) for i in range(listed(again.validation).size)}
    assert set(digests[38:]) <= kept and not kept & set(digests[:38])


def test_the_same_samples_with_other_workers_and_more_processes(flat_folder: Path) -> None:
    images = open_images(str(flat_folder)).train
    alone = batches(images, 15)  # 90 samples of 38 images: three epochs
    assert torch.equal(alone, batches(images, 15, workers=2))
    parts = [batches(images, 15, rank=rank, world=3) for rank in range(3)]
    assert torch.equal(alone, torch.cat(parts, 1))
    assert not torch.equal(alone, batches(images, 15, seed=4))


def test_every_image_once_in_an_epoch(flat_folder: Path) -> None:
    images = listed(open_images(str(flat_folder)).train)
    seen: list[int] = []

    class Counting:
        where = images.where

        def read(self, i: int) -> tuple[bytes, int]:
            seen.append(i)
            return images.read(i)

    batches(ImageList("x", images.size, Counting()), 13)
    first, second = seen[:38], seen[38:76]
    assert sorted(first) == sorted(second) == list(range(38)) and first != second


def test_views_leave_global_randomness_alone(flat_folder: Path) -> None:
    images = listed(open_images(str(flat_folder)).train)
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    wanted = torch.rand(1), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    seeded_view(train_view(CONFIG, "mild"), images.read(0)[0], images.where(0), (0, 0, 0))
    assert random.random() == wanted[1]
    batches(images, 2)  # where the type checker of the tests draws from ``random``
    assert (torch.rand(1), np.random.rand()) == (wanted[0], wanted[2])


def save_parquet(folder: Path, splits: dict[str, int], labelled: bool = True) -> Path:
    write_images(folder / "raw", max(splits.values()), seed=5)
    paths = sorted(map(str, (folder / "raw").iterdir()))
    (folder / "table" / "data").mkdir(parents=True)
    features = datasets.Features(
        {"image": datasets.Image()} | ({"label": datasets.ClassLabel(names=["a", "b"])} if labelled else {})
    )
    for split, count in splits.items():
        rows = {"image": paths[:count]} | ({"label": [i % 2 for i in range(count)]} if labelled else {})
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(folder / "table" / "data" / f"{split}-00000-of-00001.parquet")
    return folder / "table"


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")
    # datasets rests five seconds at the end of every epoch of a shuffled stream.
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)


def test_tables(tmp_path: Path) -> None:
    sets = open_images(str(save_parquet(tmp_path, {"train": 6, "test": 4})))
    assert (listed(sets.train).size, listed(sets.validation).size) == (6, 4)
    assert sets.validation.classes == ("a", "b") and sets.held_out is None
    assert torch.cat([y for _, y in eval_batches(sets.validation, eval_view(CONFIG), 3, None, 0)]).tolist() == [
        0,
        1,
        0,
        1,
    ]
    unlabelled = open_images(str(save_parquet(tmp_path / "u", {"train": 6}, labelled=False)))
    assert unlabelled.train.classes is None and unlabelled.held_out is not None


def stream_sets(tmp_path: Path) -> ImageSets:
    from vit2linear.images.held_out import hold_out
    from vit2linear.images.streams import RowStream
    from vit2linear.images.tables import rows_of

    table = datasets.load_dataset(str(save_parquet(tmp_path, {"train": 40})), split="train", streaming=True)
    rows = rows_of("stream", table, ignore_labels=False)
    images = ImageStream("stream", RowStream(rows, None, 7), rows.classes)
    return hold_out("stream", images, f"{2**62:016x}")


def test_streams_are_split_shuffled_and_shared_alike(tmp_path: Path) -> None:
    sets = stream_sets(tmp_path)
    assert isinstance(sets.train, ImageStream) and isinstance(sets.validation, ImageStream)
    train, held = ({content_digest(d) for d, _ in s.start(0)} for s in (sets.train, sets.validation))
    assert not train & held and len(train | held) == 40 and 2 <= len(held) <= 20
    order = [[content_digest(d) for d, _ in sets.train.start(epoch)] for epoch in (0, 0, 1)]
    assert order[0] == order[1] != order[2] and set(order[1]) == set(order[2])
    alone = batches(sets.train, 12)
    assert torch.equal(alone, batches(sets.train, 12, workers=2))
    assert torch.equal(alone, torch.cat([batches(sets.train, 12, rank=r, world=2) for r in range(2)], 1))
    count = sum(len(y) for _, y in eval_batches(sets.validation, eval_view(CONFIG), 3, 2, 0))
    assert count == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda d: d / "absent", "there is no folder"),
        (lambda d: d, "holds no images"),
        (lambda d: (write_images(d, 1, 0), d)[1], "at least 2 are needed"),
        (lambda d: (write_images(d, 2, 0), write_images(d / "cat", 2, 1), d)[2], "beside class folders"),
        (lambda d: ((d / "x.parquet").write_bytes(b"no"), d)[1], "cannot be read by datasets"),
    ],
    ids=["absent", "empty", "one", "mixed", "broken table"],
)
def test_folders_that_are_no_image_sets(make: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=text):
        open_images(str(make(tmp_path)))
