"""Damaged images, folders that vanish and loader processes that die, on real files and real processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Run
from tests.test_data import CONFIG, listed
from vit2linear.bad_images import BadImages
from vit2linear.cli._options import share
from vit2linear.data import Batch, eval_batches, train_batches
from vit2linear.errors import DataError, RecipeError
from vit2linear.evaluation import ImageRequest, open_judge
from vit2linear.images import ImageList, Images, ImageStream, open_images
from vit2linear.pipeline import convert
from vit2linear.recipe import Recipe, override
from vit2linear.reporting import Progress, Reporter
from vit2linear.samples import StepBatches
from vit2linear.views import eval_view, train_view

BAD = (0, 1, 9, 22, 23)
"""Of the 24 training images; the last ones are replaced by what follows the end."""


def damage(path: Path, i: int) -> None:
    """In turn: cut off, empty, not an image."""
    path.write_bytes([path.read_bytes()[:80], b"", b"not an image"][i % 3])


@pytest.fixture
def images(class_folders: Path, tmp_path: Path) -> ImageList:
    """8 images of each of three classes, some of them damaged."""
    shutil.copytree(class_folders, tmp_path / "images")
    found = listed(open_images(str(tmp_path / "images")).train)
    for i in BAD:
        damage(Path(found.where(i).strip("'")), i)
    return found


@pytest.fixture
def stream(images: ImageList) -> ImageStream:
    """The same images in another order every epoch."""

    def start(epoch: int) -> Iterator[tuple[bytes, int]]:
        order = np.random.default_rng(epoch).permutation(images.size)
        return (images.read(int(i)) for i in order)

    return ImageStream("a stream", start, images.classes)


def run(images: Images, steps: int, augment: str = "mild", **options: Any) -> tuple[list[Batch], dict[str, str]]:
    """The batches, and the bad images met on the way."""
    bad = BadImages(1.0, None)
    options = {"batch_size": 6, "seed": 3, "workers": 0} | options
    return list(train_batches(images, train_view(CONFIG, augment), steps=steps, bad=bad, **options)), bad.found


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def test_the_next_good_image_and_its_class_stand_in(images: ImageList) -> None:
    batches, found = run(images, 8, "none")
    keys = [key for batch in StepBatches(24, 6, 0, 8, 3, 0, 1) for key in batch]
    good = [next(j % 24 for j in range(i, 48) if j % 24 not in BAD) for _, i in keys]
    view = eval_view(CONFIG)
    assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([view(images.read(i)[0], "x") for i in good]))
    assert torch.cat([y for _, y in batches]).tolist() == [images.read(i)[1] for i in good]
    assert set(found) == {images.where(i) for i in BAD}
    assert {found[images.where(i)] for i in (1, 22)} == {"an empty file"}


@pytest.mark.parametrize("kind", ["images", "stream"])
def test_the_same_samples_whatever_the_workers_and_processes_and_from_any_step(
    kind: str, request: pytest.FixtureRequest
) -> None:
    images: Images = request.getfixturevalue(kind)
    whole, found = run(images, 13)  # 78 samples of 24 images
    assert len(found) == (5 if kind == "images" else 4)  # the two empty ones have the same content
    assert len(whole) == 13 and all(x.shape == (6, 3, 32, 32) for x, _ in whole)
    again, named = run(images, 13, workers=2)
    assert equal(whole, again) and named == found
    parts = [run(images, 13, rank=rank, world=3)[0] for rank in range(3)]
    assert equal(
        whole, [(torch.cat([p[0] for p in b]), torch.cat([p[1] for p in b])) for b in zip(*parts, strict=True)]
    )
    for start in (1, 7, 13):
        assert equal(whole[start:], run(images, 13, start=start)[0])
    assert equal(whole[5:], run(images, 13, start=5, workers=2)[0])


def test_a_stream_goes_on_where_the_bad_image_was_the_last_of_its_epoch() -> None:
    data = [b"bad 1", *(png(i) for i in range(4)), b"bad 2"]
    stream = ImageStream("s", lambda epoch: zip(data, range(6), strict=True))
    batches, found = run(stream, 6, "none", batch_size=2)
    assert [y.tolist() for _, y in batches] == [[1, 1], [2, 3], [4, 1], [1, 1], [2, 3], [4, 1]]
    assert len(found) == 2


def png(seed: int) -> bytes:
    import io

    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize("kind", ["images", "stream"])
@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_leaves_them_out(kind: str, workers: int, request: pytest.FixtureRequest) -> None:
    images, bad = request.getfixturevalue(kind), BadImages(1.0, None)
    batches = list(eval_batches(images, eval_view(CONFIG), 2, None, workers, bad))
    assert sum(len(y) for _, y in batches) == 19 and all(len(x) == len(y) > 0 for x, y in batches)
    if kind == "images":
        assert torch.cat([y for _, y in batches]).tolist() == [images.read(i)[1] for i in range(24) if i not in BAD]
        assert set(bad.found) == {images.where(i) for i in BAD}
    with pytest.raises(
        DataError, match=r"at most 0% may be so: .* Repair or remove them, or allow more with --max-bad 5%"
    ):
        list(eval_batches(images, eval_view(CONFIG), 2, None, workers))


def test_the_ledger_counts_each_image_once_and_stops_above_its_limit() -> None:
    bad = BadImages(0.1, 200)
    for i in [*range(20), *range(20)]:
        bad.add([(f"'{i}.png'", "an empty file")], good=3)
    assert len(bad.found) == 20
    assert bad.summary is not None and bad.summary.startswith(
        "20 images could not be used and were left out: '0.png' ("
    )
    resumed = BadImages(0.1, 200, json.loads(json.dumps(bad.found)))
    resumed.add([("'7.png'", "an empty file")])
    for ledger in (bad, resumed):
        with pytest.raises(DataError) as caught:
            ledger.add([("'21.png'", "an empty file"), ("'22.png'", "an empty file")])
        assert caught.value.message.startswith(
            "22 of 200 images cannot be used, and at most 10% may be so: '0.png' (an"
        )
        assert caught.value.message.endswith("'19.png' (an empty file), and 2 more.")
        assert caught.value.hint == "Repair or remove them, or allow more with --max-bad 20%."
    assert BadImages(0.1, 200).summary is None
    with pytest.raises(DataError, match=r"^1 of 1,000,000 images cannot be used, and at most 0% may be so: a \(b\)\."):
        BadImages(0.0, 1_000_000).add([("a", "b")], good=5)
    one = BadImages(0.01, 100)
    one.add([("a", "b")])
    assert one.summary == "1 image could not be used and was left out: a (b)."


def test_a_stream_is_judged_by_what_was_seen() -> None:
    bad = BadImages(0.01, None)
    for i in range(9):
        bad.add([(str(10 * i + k), "broken") for k in range(9)], good=91)  # 9%, of too few to tell
    with pytest.raises(DataError, match=r"^90 of 1,000 images read so far cannot be used, and at most 1% may be so"):
        bad.add([("x", "broken")] * 9, good=91)
    at_once = BadImages(0.01, None)
    at_once.add([], good=50)
    at_once.add([("x", "broken")] * 60)
    with pytest.raises(DataError, match=r"^110 of 160 images read so far cannot be used"):
        at_once.add([("x", "broken")] * 50)
    few = BadImages(0.01, None)
    few.add([], good=20_000)
    few.add([("x", "broken")] * 150)
    assert few.found == {"x": "broken"}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_set_without_any_good_image_ends(images: ImageList, stream: ImageStream, workers: int) -> None:
    for i in range(24):
        damage(Path(images.where(i).strip("'")), i)
    view = train_view(CONFIG, "flip")
    for limit, text in (
        (0.1, r"^[34] of 24 .* at most 10% may be so"),
        (1.0, r"gave no image .*24 images could"),
    ):
        with pytest.raises(DataError, match=text):
            list(eval_batches(images, view, 64 if limit == 1 else 3, None, workers, BadImages(limit, 24)))
    for limit, text in (
        (0.1, r"^24 of 24 .* at most 10% may be so"),
        (1.0, "and all of the 23 images after it"),
    ):
        with pytest.raises(DataError, match=text):
            list(train_batches(images, view, 6, 8, 0, workers, bad=BadImages(limit, 24)))
    with pytest.raises(DataError, match="a stream gave no image that can be used"):
        list(eval_batches(stream, view, 64, None, workers, BadImages(0.1, None)))
    for limit, text in (
        (0.1, r"^100 of 100 images read so far"),
        (1.0, r"^1000 images in a row of a stream"),
    ):
        with pytest.raises(DataError, match=text):
            list(train_batches(stream, view, 6, 8, 0, workers, bad=BadImages(limit, None)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", ["removed", "emptied"])
def test_a_folder_that_vanishes_is_not_a_bad_image(flat_folder: Path, tmp_path: Path, workers: int, how: str) -> None:
    folder = shutil.copytree(flat_folder, tmp_path / "drive")
    images, bad = open_images(str(folder)).train, BadImages(1.0, 40)
    batches = train_batches(images, train_view(CONFIG, "flip"), 6, 50, 0, workers, bad=bad)
    next(batches)
    folder.rename(tmp_path / "away")
    if how == "emptied":  # as a drive leaves its place when it is unmounted
        folder.mkdir()
    with pytest.raises(DataError, match=r"the folder '.*drive' of .* is gone or can no longer be read\. .*--resume"):
        list(batches)
    assert not bad.found


def test_a_file_that_vanishes_is_a_bad_image(flat_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(flat_folder, tmp_path / "drive")
    images, bad = listed(open_images(str(folder)).train), BadImages(1.0, 40)
    Path(images.where(3).strip("'")).unlink()
    assert sum(len(y) for _, y in eval_batches(images, eval_view(CONFIG), 8, None, 0, bad)) == images.size - 1
    assert bad.found == {images.where(3): "cannot be read: No such file or directory"}


def test_a_stream_that_breaks_off_says_so() -> None:
    def start(epoch: int) -> Iterator[tuple[bytes, int]]:
        yield png(0), 0
        raise FileNotFoundError(2, "No such file or directory", "shard-1.tar")

    stream = ImageStream("a stream", start)
    text = "a stream can no longer be read: .*shard-1.tar'. Bring it back; a conversion then continues with --resume"
    with pytest.raises(DataError, match=text) as caught:
        run(stream, 3)
    assert "Traceback" not in str(caught.value)
    with pytest.raises(DataError, match=text):
        list(eval_batches(stream, eval_view(CONFIG), 4, None, 0))


@pytest.mark.slow  # torch looks every five seconds
def test_a_killed_loader_process_is_said_in_a_sentence_and_interrupts_nothing(flat_folder: Path) -> None:
    images = open_images(str(flat_folder)).train
    before = set(multiprocessing.active_children())
    batches = train_batches(images, train_view(CONFIG, "flip"), 6, 500, 0, 2)
    next(batches)
    worker = (set(multiprocessing.active_children()) - before).pop()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    time.sleep(0.2)  # torch would raise here
    with pytest.raises(DataError, match=r"^a loader process was killed, .*memory.*--workers.*--resume"):
        list(batches)
    time.sleep(0.2)  # and here, for the other process


def test_the_probe_of_the_images_passes_over_bad_ones(class_folders: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(class_folders, tmp_path / "images")
    paths = sorted((folder / "val").rglob("*.png"))
    damage(paths[0], 0)
    judge = open_judge(ImageRequest(str(folder)), CONFIG, 5, None, max_bad=1 / 36)
    assert set(judge.bad.found) == {repr(str(paths[0]))} and judge.bad.total == 36
    with pytest.raises(DataError, match=r"^1 of 36 images cannot be used, and at most 1% may be so: .*val/bread/"):
        open_judge(ImageRequest(str(folder)), CONFIG, 5, None)
    for i, path in enumerate(paths):
        damage(path, i)
    with pytest.raises(DataError, match=r"\(val\) gave no image that can be used"):
        open_judge(ImageRequest(str(folder)), CONFIG, 5, None, max_bad=1.0)


def test_shares() -> None:
    assert [share(t, "--max-bad") for t in ("1%", "0.01", "0", "0%", "100%", "1", " 2.5 % ", "1e-3")] == [
        *(0.01, 0.01, 0.0, 0.0, 1.0, 1.0, 0.025, 0.001)
    ]
    for text in ("", "%", "5", "101%", "-1%", "nan", "inf", "1%%", "1% or so", "few"):
        with pytest.raises(RecipeError, match=r"--max-bad: .* is no share of the images\. Give 0% to 100%"):
            share(text, "--max-bad")


def test_commands_name_bad_images(cli: Run, checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(class_folders, tmp_path / "images")
    names = [sorted((folder / split).rglob("*.png"))[i] for split, i in (("train", 5), ("val", 2))]
    for i, path in enumerate(names):
        damage(path, i)
    convert = ("convert", checkpoint, "--data", folder, "--distill-steps", 2, "-b", 8, "-j", 0, "-o", "out")
    few = cli(*convert, code=5)
    assert (
        "error: 1 of 36 images cannot be used, and at most 1% may be so: " in few.stderr
        and "--max-bad 5%" in few.stderr
    )
    assert not Path("out").exists()
    assert "'1 percent' is no share" in cli(*convert, "--max-bad", "1 percent", code=2).stderr
    done = cli(*convert, "--max-bad", "10%", "--resume")
    assert "2 images could not be used and were left out: " in done.stderr
    record = json.loads(Path("out/report.json").read_text())
    assert record["data"]["bad"]["count"] == 2 and set(record["data"]["bad"]["images"]) == {repr(str(p)) for p in names}
    assert record["evaluation"]["images"] == 11 and "max_bad = 0.1" in Path("out/recipe.toml").read_text()
    judged = cli("eval", "out", "-j", 0, "--max-bad", 0.1, "--json")
    assert "1 image could not be used and was left out: " in judged.stderr and json.loads(judged.stdout)["images"] == 11
    assert "--max-bad" in cli("eval", "out", "-j", 0, "--max-bad", "0", code=5).stderr


class Breaks(Reporter):
    """Like a crash in the midst of a stage."""

    def progress(self, progress: Progress) -> None:
        if progress.step == 6:
            raise MemoryError


def test_a_resumed_run_sees_the_same_samples_and_names_the_same_images(
    images: ImageList, checkpoint: Path, tmp_path: Path
) -> None:
    def recipe(name: str, workers: int) -> Recipe:
        return override(
            Recipe(),
            source__model=str(checkpoint),
            distill__steps=10,
            distill__batch_size=6,
            distill__augment="mild",
            distill__attention__share=0.0,
            data__path=str(tmp_path / "images"),
            data__workers=workers,
            data__max_bad=0.2,
            run__checkpoint_every=4,
            output__dir=str(tmp_path / name),
        )

    whole = convert(recipe("whole", 0))
    with pytest.raises(MemoryError):
        convert(recipe("broken", 0), reporter=Breaks())
    resumed = convert(recipe("broken", 2), resume=True)
    weights = [load_file(a.folder / "model.safetensors") for a in (whole, resumed)]
    assert weights[0].keys() == weights[1].keys() and all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])
    assert whole.report["data"]["bad"] == resumed.report["data"]["bad"]
    assert set(whole.report["data"]["bad"]["images"]) == {images.where(i) for i in BAD}
