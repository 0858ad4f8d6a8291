"""The demo's bar, and proof that it is the teacher who meets it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vit2linear import Recipe, convert
from vit2linear.artifact import Artifact
from vit2linear.losses import Objective, Outputs
from vit2linear.recipe import override

BELOW, ABOVE = 1.5, 20.0
"""Points of top-1: at most below the teacher, at least above the student before training."""


def run(output: Path, steps: int | None = None) -> Artifact:
    options = {"source__model": "demo", "output__dir": str(output), "distill__steps": steps, "run__device": "cpu"}
    options |= {"data__eval_samples": None if steps is None else 500}
    return convert(override(Recipe(), **options))


def scores(artifact: Artifact) -> tuple[float, float, float]:
    """Top-1 of the teacher, of the student before training, of the student."""
    report = artifact.report
    return (
        report["evaluation"]["teacher"]["top1"],
        report["history"][0]["student"]["top1"],
        report["evaluation"]["student"]["top1"],
    )


def meets_the_bar(artifact: Artifact) -> bool:
    teacher, before, after = scores(artifact)
    print(f"teacher {teacher:.2f}, before {before:.2f}, after {after:.2f}")
    return teacher - after <= BELOW and after - before >= ABOVE


def shuffle_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image learns another image's target."""

    def rolled(values: Any) -> Any:
        return None if values is None else values.roll(1, 0)

    plain = Objective.__call__

    def shuffled(self: Objective, student: Outputs, teacher: Outputs) -> torch.Tensor:
        sites = {path: rolled(y) for path, y in teacher.sites.items()}
        tokens = tuple(map(rolled, teacher.tokens))
        mixed = replace(
            teacher, sites=sites, tokens=tokens, pooled=rolled(teacher.pooled), logits=rolled(teacher.logits)
        )
        return plain(self, student, mixed)

    monkeypatch.setattr(Objective, "__call__", shuffled)


@pytest.mark.slow
def test_the_demo_meets_its_bar(tmp_path: Path) -> None:
    assert meets_the_bar(run(tmp_path / "a"))


@pytest.mark.slow
def test_shuffled_targets_do_not_meet_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shuffle_targets(monkeypatch)
    assert not meets_the_bar(run(tmp_path / "a"))


@pytest.mark.slow
def test_it_is_the_teacher_who_teaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in few steps: with its own targets the student rises, with shuffled ones it does not."""
    teacher, before, after = scores(run(tmp_path / "a", steps=40))
    assert after > before + 0.5 * (teacher - before)
    shuffle_targets(monkeypatch)
    _, before, after = scores(run(tmp_path / "b", steps=40))
    assert after < before
