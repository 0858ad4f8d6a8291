"""Every shipped recipe converts the kind of source that it is for, in a few steps of a few images."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from tests.sources.oracles import make

RECIPES = Path(__file__).parent.parent / "recipes"
SOURCES = {"dinov2": "dinov2-model", "siglip": "siglip_vision_model", "mae": "vit_mae-model"}
"""The transformers checkpoint of a recipe; all others convert a classifier."""
SIZES = {"dinov2": 42, "high-resolution": 64}


@pytest.fixture
def converted(cli: Run, tmp_path: Path, checkpoint: Path, class_folders: Path) -> Any:
    def convert(name: str) -> dict[str, Any]:
        source = checkpoint
        if name in SOURCES:
            source = tmp_path / name
            make(SOURCES[name]).save_pretrained(source)
        args = ["--data", class_folders, "-b", 8, "-j", 0, "--num-samples", 16, "--device", "cpu", "-o", "out"]
        args += ["--img-size", SIZES[name]] if name in SIZES else []
        args += [] if name == "training-free" else ["--distill-steps", 6]
        cli("convert", source, "--recipe", RECIPES / f"{name}.toml", *args)
        report: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
        return report

    return convert


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda p: p.stem)
def test_recipes_run(path: Path, converted: Any, tmp_path: Path) -> None:
    asked = tomllib.loads(path.read_text())
    report = converted(path.stem)
    effective = tomllib.loads((tmp_path / "out" / "recipe.toml").read_text())
    stages = {s["stage"]: s["steps"] for s in report["stages"]}
    assert sum(stages.values()) == (0 if path.stem == "training-free" else 6)
    assert ("task" in stages) == ("task" in asked["distill"] if "distill" in asked else False)
    assert {s["op"] for s in report["plan"]} - {"keep"} == {rule["op"] for rule in asked["convert"]} - {"keep"}
    assert effective["keep_softmax"] == 0 and len(report["history"]) == 1 + len(stages) + len(report["calibration"])
    kept = [s for s in report["plan"] if s["op"] == "keep"]
    assert len(kept) == asked.get("keep_softmax", 0)


def test_the_ones_asked_for_are_there() -> None:
    names = {p.stem for p in RECIPES.glob("*.toml")}
    assert names >= {
        "quick",
        "default",
        "best",
        "training-free",
        "hybrid",
        "dinov2",
        "siglip",
        "mae",
        "high-resolution",
    }
