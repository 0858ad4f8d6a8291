"""The stages through ``convert`` and disk: which run, in which order, and what they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vit2linear import Recipe, convert
from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import DataError
from vit2linear.recipe import OPERATORS, override

SMALL: dict[str, Any] = {
    "source__model": "demo",
    "distill__batch_size": 8,
    "data__workers": 0,
    "data__eval_samples": 20,
    "run__device": "cpu",
}


def run(folder: Path, **changes: Any) -> dict[str, Any]:
    return convert(override(Recipe(), output__dir=str(folder), **SMALL, **changes)).report


def test_all_three_stages_and_the_calibrations_between(tmp_path: Path) -> None:
    report = run(
        tmp_path / "a",
        convert=[{"local": "dwc3", "center_keys": True}],
        distill__steps=6,
        distill__task__share=1.0,
        distill__ema=0.5,
        distill__calibration={"images": 8, "before": ["attention", "feature"]},
    )
    assert [h["moment"] for h in report["history"]] == [
        "before training",
        "after calibration",
        "after stage attention",
        "after calibration before stage feature",
        "after stage feature",
        "after stage task",
    ]
    assert {s["stage"]: s["steps"] for s in report["stages"]} == {"attention": 1, "feature": 2, "task": 3}
    assert [s["averaged"] is not None for s in report["stages"]] == [False, True, True]
    card = (tmp_path / "a" / "README.md").read_text()
    assert "calibrated in closed form on 7 images, distilled label-free from it: 1 steps of stage `attention`" in card
    assert "trained with labels beside it: 3 steps of stage `task` (24 images)" in card
    assert "`relu` with a depthwise 3x3 convolution of the values and centred keys: " in card
    assert list(report["calibration"]) == ["after calibration", "after calibration before stage feature"]


def test_calibration_may_come_last(tmp_path: Path) -> None:
    changes = {"distill__feature__share": 0.0, "distill__calibration": {"images": 8, "before": ["feature"]}}
    report = run(tmp_path / "a", distill__steps=2, **changes)
    assert [h["moment"] for h in report["history"]] == ["before training", "after stage attention", "after calibration"]


def test_stage_task_alone_reads_labels_and_no_teacher(tmp_path: Path) -> None:
    only = {"distill__attention__share": 0.0, "distill__feature__share": 0.0, "distill__task__share": 1.0}
    changes = {**only, "distill__task__losses": {"labels": 1.0}, "distill__steps": 2}
    report = run(tmp_path / "a", **changes)
    assert [(s["stage"], s["steps"]) for s in report["stages"]] == [("task", 2)]
    loss = report["stages"][0]["losses"][0][1]
    assert 0.5 < loss < 10, "a cross-entropy with smoothed labels"
    run(tmp_path / "b", **changes)
    a, b = (load_file(tmp_path / n / "model.safetensors") for n in "ab")
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_labels_that_do_not_exist_are_refused_before_any_work(tmp_path: Path, flat_folder: Path) -> None:
    with pytest.raises(DataError, match="no classes of the model, which the loss 'labels' of stage 'task' learns"):
        run(tmp_path / "a", data__path=str(flat_folder), distill__task__share=1.0, distill__steps=2)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", [n for n in OPERATORS.names() if OPERATORS.get(n).has_map])
def test_operators_know_whether_their_map_can_be_negative(name: str) -> None:
    torch.manual_seed(0)
    op = OPERATORS.get(name)
    model = op(HeadGeometry(width=32, num_heads=2, head_dim=16, scale=0.25), op.Options()).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    q, k = 2 * torch.randn(2, 4, 2, 20, 16)
    ctx = AttentionContext(grid=(4, 5), num_prefix=0, x=torch.randn(4, 20, 32))
    with torch.no_grad():
        lowest = float(model.map(q, k, ctx).min())
    assert (lowest < -1e-4) == op.signed
