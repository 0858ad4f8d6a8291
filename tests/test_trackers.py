"""``--track``: what trackers are given, read back from what they wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from accelerate.tracking import get_available_trackers
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.conftest import Run
from vit2linear.errors import RecipeError, UnknownNameError
from vit2linear.trackers import check_trackers

VALUES = {"loss", "gradient_norm", "lr", "images_per_second", "waiting", "skipped"}


def test_tensorboard_has_what_the_metrics_have(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    args = ["convert", checkpoint, "--data", class_folders, "-b", 4, "-j", 0, "--device", "cpu", "--num-samples", 2]
    cli(*args, "--distill-steps", 5, "--track", "tensorboard", "-o", "out/model")
    assert {p.name for p in Path("out").iterdir()} == {"model", "model-logs"}
    assert not [*Path("out/model").rglob("*tfevents*")] and "track" in Path("out/model/recipe.toml").read_text()
    events = EventAccumulator("out/model-logs/vit2linear").Reload()
    lines = [json.loads(line) for line in Path("out/model/metrics.jsonl").read_text().splitlines()]
    assert {*events.Tags()["scalars"]} == {f"{s}/{v}" for s in ("attention", "feature") for v in VALUES}
    for stage, before in (("attention", 0), ("feature", 2)):
        wanted = [(before + x["step"], x["loss"]) for x in lines if x["stage"] == stage]
        found = [(e.step, e.value) for e in events.Scalars(f"{stage}/loss")]
        assert [step for step, _ in found] == [step for step, _ in wanted]
        assert [v for _, v in found] == pytest.approx([v for _, v in wanted], rel=1e-5)
    assert "distill.steps: 5" in next(Path("out/model-logs").rglob("hparams.yml")).read_text()


def test_trackers_that_cannot_be_had_are_refused_before_any_work(cli: Run) -> None:
    said = cli("convert", "demo", "--track", "tensorbord", code=2).stderr
    assert "unknown tracker 'tensorbord'. Did you mean 'tensorboard'? Available: aim, " in said
    assert not [*Path().iterdir()]
    with pytest.raises(UnknownNameError):
        check_trackers(["all"])
    missing = {"aim", "clearml", "dvclive"} - {str(name) for name in get_available_trackers()}
    for name in missing:
        with pytest.raises(RecipeError, match=rf"'{name}' is not installed\. Install it, or use .*tensorboard"):
            check_trackers(["tensorboard", name])
