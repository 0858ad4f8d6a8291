"""Splits, class maps and mixed sets through ``convert`` and ``eval``: what is said, recorded and opened again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from tests.conftest import Run, write_images
from tests.test_images import as_folder, as_tar, class_files
from vit2linear.compare import compare

FAST = ("--op", "relu", "--distill-steps", 2, "-b", 4, "-j", 0)


def converted(cli: Run, checkpoint: Path, *args: object) -> tuple[dict[str, Any], str]:
    done = cli("convert", checkpoint, *FAST, *args, "--overwrite", "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    return report, done.stderr


def judged(cli: Run, *args: object) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(cli("eval", "-j", 0, *args, "--json").stdout)
    return report


def test_an_unmatched_set_gives_agreement_and_no_accuracy(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    """Two of five classes, one of them the model's: not an error, and never an accuracy of the part that matches."""
    images = as_folder(tmp_path / "images", {n.replace("cat", "fox"): d for n, d in class_files(count=4).items()})
    report, said = converted(cli, checkpoint, "--data", images)
    assert (
        said.count("1 of its 2 classes are among the model's 5, such as 'apple', 'bread', 'cup', ...; not 'fox'") == 1
    )
    evaluation = report["evaluation"]
    assert evaluation["teacher"]["top1"] is None and evaluation["student"]["top1"] is None
    assert evaluation["agreement"] is not None and evaluation["feature_cosine"] > 0
    assert judged(cli)["teacher"]["top1"] is None
    recipe = tmp_path / "task.toml"
    recipe.write_text("[distill.task]\nshare = 0.5\n")
    error = cli("convert", checkpoint, *FAST, "--data", images, "--recipe", recipe, "-o", "x", code=5).stderr
    assert "has no classes of the model, which the loss 'labels' of stage 'task'" in error and "--class-map" in error


def test_a_class_map_is_recorded_with_the_artifact(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    images = as_folder(tmp_path / "images", class_files(count=4))
    table = tmp_path / "map.toml"
    table.write_text('cat = "egg"\ndog = 3\n')
    report, _ = converted(cli, checkpoint, "--data", images, "--class-map", table)
    assert report["data"]["class_map"] == {"cat": 4, "dog": 3}
    accuracy = report["evaluation"]["teacher"]["top1"]
    assert accuracy is not None
    # Against the same images in folders with the model's names.
    names = {"cat": "egg", "dog": "dog"}
    renamed = {f"{s}/{names[c]}": images / s / c for s in ("train", "val") for c in names}
    for name, folder in renamed.items():
        (tmp_path / "same" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "same" / name).symlink_to(folder)
    assert judged(cli, "--data", tmp_path / "same")["teacher"]["top1"] == accuracy
    table.unlink()
    assert judged(cli)["teacher"]["top1"] == accuracy
    assert judged(cli, "--ignore-labels")["teacher"]["top1"] is None
    # A class that the model has not takes no part in accuracy.
    table.write_text("cat = -1\ndog = 3\n")
    for split in ("train", "val"):
        (tmp_path / "dogs" / split).mkdir(parents=True)
        (tmp_path / "dogs" / split / "dog").symlink_to(images / split / "dog")
    partly = judged(cli, "--class-map", table)
    assert partly["images"] == 8
    assert partly["teacher"]["top5"] == judged(cli, "--data", tmp_path / "dogs")["teacher"]["top5"] == 100
    table.write_text('cat = "egg"\n')
    assert "1 of the 2 classes" in cli("eval", "--class-map", table, code=5).stderr
    table.write_text('cat = "cub"\ndog = 5\n')
    error = cli("convert", checkpoint, "--data", images, "--class-map", table, "--dry-run", code=5).stderr
    assert "did you mean 'cup'" in error and "'dog': 5 is no index from 0 to 4" in error


def test_mixed_sets_are_opened_again(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    """One with a validation split, one in an archive of which images are held out, one without labels."""
    first, second = as_folder(tmp_path / "a", class_files(count=4)), as_tar(tmp_path / "b.tar", class_files(("",), 15))
    write_images(tmp_path / "c", 20, seed=1)
    data = [x for path in (first, second, tmp_path / "c") for x in ("--data", path)]
    report, _ = converted(cli, checkpoint, *data, "--seed", 3)
    recorded = report["data"]
    assert recorded["path"] == [str(first), str(second), str(tmp_path / "c")]
    assert [t is None for t in recorded["held_out"]] == [True, False, False]
    assert report["evaluation"]["images"] == 8 + 2 + 1
    for again in (judged(cli), judged(cli, *data)):
        for key in ("data", "images", "agreement", "feature_cosine"):
            assert again[key] == report["evaluation"][key]
    # The recorded recipe runs again, and says the same.
    done = cli("convert", "--recipe", "tiny-relu/recipe.toml", "-j", 0, "--output", "again", "--json")
    assert json.loads(done.stdout)["evaluation"]["agreement"] == report["evaluation"]["agreement"]


def test_splits_are_chosen(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    files = class_files(("train/", "val/", "test/"), 3)
    images = as_folder(tmp_path / "images", {n: d for n, d in files.items() if "test/cat" not in n})
    report, _ = converted(cli, checkpoint, "--data", images, "--val-split", "test")
    assert (report["evaluation"]["images"], report["data"]["val_split"]) == (3, "test")
    assert judged(cli)["images"] == 3
    assert judged(cli, "--val-split", "val")["images"] == 6
    assert judged(cli, "--data", images, "--val-split", "train", "--split", "val")["images"] == 6
    assert "has no split 'dev'" in cli("eval", "--val-split", "dev", code=5).stderr


def test_neighbours_without_a_class_are_no_neighbours(checkpoint: Path) -> None:
    model = timm.create_model(f"local-dir:{checkpoint}", pretrained=True, num_classes=0).eval()
    torch.manual_seed(0)
    bank, queries, labels = torch.randn(12, 3, 32, 32), torch.randn(4, 3, 32, 32), torch.arange(12) % 2
    found = []
    for more in (0, 12):
        pixels = torch.cat([bank, queries.repeat(3, 1, 1, 1)[:more]])
        batches = iter([(pixels, torch.cat([labels, torch.full((more,), -1)]))])
        report = compare(model, model, iter([(queries, labels[:4])]), "x", torch.device("cpu"), bank=batches)
        found.append((report.teacher.knn, report.teacher.probe))
    assert found[0] == found[1] != (None, None)


@pytest.mark.parametrize("extra", ["notes.txt", "train/dog/labels.csv"])
def test_ignored_files_are_named(extra: str, checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    as_folder(tmp_path / "images", {**class_files(), extra: b""})
    _, said = converted(cli, checkpoint, "--data", tmp_path / "images", "--distill-steps", 0, "--calibrate", 0)
    assert f"images: 1 file is ignored, hidden or no image by name, such as {extra!r}" in " ".join(said.split())
