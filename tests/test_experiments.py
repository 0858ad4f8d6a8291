"""Experiments run, go on where they stopped, and their tables are those of their results."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import experiment
import fashion_mnist
import numpy as np
import pytest
from experiment_file import read_experiment
from experiment_run import jobs_of
from experiment_tables import BLOCK, updated

from vit2linear.errors import RecipeError
from vit2linear.images import ImageList, open_images

SHIPPED = sorted(experiment.FILES.glob("*.toml"))
TINY = """
title = "Tiny"
select = "$FLAT"
test = "$IMAGES"
plot = true
[base]
source.model = "$TINY/tiny"
distill = { steps = 2, batch_size = 4 }
data = { eval_samples = 6, workers = 0 }
run.device = "cpu"
[[column]]
name = "relu"
convert = [{ op = "relu" }]
[[cell]]
name = "plain"
[[cell]]
name = "local"
convert.0.local = "dwc3"
"""


@pytest.fixture
def tiny(
    tmp_path: Path, checkpoint: Path, class_folders: Path, flat_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    for name, path in (("TINY", checkpoint.parent), ("IMAGES", class_folders), ("FLAT", flat_folder)):
        monkeypatch.setenv(name, str(path))
    (tmp_path / "results.md").write_text("# Results\n\nKept.\n")
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def run(path: Path, *args: str, jobs: int = 0) -> int:
    return experiment.main([str(path), "--docs", str(path.parent), "--jobs", str(jobs), *args])


def test_it_runs_goes_on_and_reruns_what_changed(tiny: Path, flat_folder: Path) -> None:
    assert run(tiny, "--only", "plain*") == 0
    results = tiny.parent / "results" / "tiny"
    plain, local = results / "plain-relu-0.json", results / "local-relu-0.json"
    first = plain.read_text()
    assert run(tiny) == 0
    assert {p.name for p in results.iterdir()} == {plain.name, local.name}
    assert plain.read_text() == first, "a finished cell was run again"
    result = json.loads(local.read_text())
    assert result["plan"][0]["modifiers"]["local"] == "dwc3" and len(result["plan"][0]["sites"]) == 4
    assert (result["test"]["data"], result["test"]["images"]) == ("$IMAGES (val)", 6)
    assert (result["select"]["data"], result["select"]["images"]) == ("$FLAT, held-out 5%", 2)
    assert [stage["steps"] for stage in result["stages"]] == [1, 1]
    assert str(flat_folder.parent.parent) not in first and len(first) < 6000

    assert run(tiny, "--table") == run(tiny, "--table") == 0
    page = (tiny.parent / "results.md").read_text()
    assert page.startswith("# Results\n\nKept.\n") and page.count("<!-- experiment: tiny -->") == 1
    top1 = {name: json.loads(path.read_text())["test"]["student"]["top1"] for name, path in ((0, plain), (1, local))}
    for i, row in enumerate(("plain", "local")):
        assert any(f"| {row} | {'**' * bold}{top1[i]:.2f}{'**' * bold} |" in page for bold in (0, 1))
    assert (tiny.parent / "tiny.png").is_file()

    tiny.write_text(TINY.replace('"dwc3"', '"dwc5"'))
    assert run(tiny, "--table") == 0
    assert "| local | - |" in (tiny.parent / "results.md").read_text(), "an old result under new settings was shown"
    assert run(tiny) == 0
    assert json.loads(local.read_text())["plan"][0]["modifiers"]["local"] == "dwc5"
    assert plain.read_text() == first


@pytest.mark.slow
def test_cells_run_in_processes_of_their_own(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tiny.write_text(TINY + '[[cell]]\nname = "broken"\nconvert.0.sites = "nowhere"\n')
    assert run(tiny, jobs=2) == 1
    assert {p.stem for p in (tiny.parent / "results" / "tiny").iterdir()} == {"plain-relu-0", "local-relu-0"}
    assert "broken-relu-0" in capfd.readouterr().err


def test_what_is_wrong_with_a_file_is_said(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in (
        (TINY + '[[cell]]\nname = "plain"\n', "same name: plain-relu"),
        (TINY + '[[cell]]\nname = "other"\nrow = "local"\n', "same row and column"),
        (TINY + '[[cell]]\nname = "x"\ndistil.steps = 1\n', "cell 'x': distil: unknown key; did you mean 'distill'"),
        (TINY + '[[cell]]\nname = "x"\nconvert.1.local = "dwc3"\n', "no rule 1"),
        (TINY + '[[cell]]\nname = "x"\ncolumns = ["elu"]\n', "no column 'elu'"),
        (TINY.replace("plot =", "plots ="), "plots: unknown key"),
    ):
        tiny.write_text(text)
        with pytest.raises(RecipeError, match=message):
            read_experiment(tiny)
    tiny.write_text(TINY)
    monkeypatch.delenv("IMAGES")
    assert run(tiny) == RecipeError.exit_code


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_experiments_are_readable(path: Path, tmp_path: Path) -> None:
    found = read_experiment(path)
    assert len(jobs_of(found, tmp_path)) == len(found.cells) * len(found.seeds) > 0
    assert path.stem == "dinov2" or found.test == "data/fashion-mnist-test"


def test_tables_are_those_of_the_results() -> None:
    page = (experiment.DOCS / "results.md").read_text("utf-8")
    experiments = [read_experiment(path) for path in SHIPPED]
    assert updated(page, experiment.DOCS, experiments) == page, "run python scripts/experiment.py --table"
    assert {match[1] for match in BLOCK.finditer(page)} <= {e.name for e in experiments}


def test_fashion_mnist_becomes_three_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 12), ("t10k", 4)):
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        (tmp_path / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(bytes(16) + images.tobytes()))
        (tmp_path / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(bytes(8) + labels.tobytes()))
    monkeypatch.setattr(fashion_mnist, "VALIDATION", 3)
    monkeypatch.setattr(fashion_mnist, "FEW", 4)
    fashion_mnist.write_sets(tmp_path, tmp_path / "data")
    names = ("fashion-mnist", "fashion-mnist-test", "fashion-mnist-few")
    sets = [
        images
        for s in (open_images(str(tmp_path / "data" / name)) for name in names)
        for images in (s.train, s.validation)
        if isinstance(images, ImageList)
    ]
    assert [images.size for images in sets] == [9, 3, 3, 4, 4, 3]
    train, validation, again, test, few, once_more = ({images.read(i) for i in range(images.size)} for images in sets)
    assert again == once_more == validation and few < train and len(train | validation | test) == 16
