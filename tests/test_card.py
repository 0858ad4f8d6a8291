"""The model card: its front matter, and that everything it tells people to type runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from timm.models import save_for_hf

from vit2linear import convert, linearize, speed
from vit2linear.artifact import Artifact
from vit2linear.bench import Job
from vit2linear.card.card import render
from vit2linear.card.drawn import draw
from vit2linear.recipe import Recipe, Rule, override

SOURCES = ("classifier", "backbone", "demo")


def made(source: str, images: Path, output: Path, **values: Any) -> Artifact:
    base = {"source__model": source, "data__path": str(images), "output__dir": str(output), "data__workers": 0}
    base |= {"distill__steps": 2, "distill__batch_size": 8, "data__eval_samples": 20, "run__device": "cpu"}
    return convert(override(Recipe(), **(base | values)))


@pytest.fixture(scope="module")
def artifacts(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    """A classifier, a backbone without classes, and the demo, whose images are grey."""
    out = tmp_path_factory.mktemp("cards")
    torch.manual_seed(0)
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 0}
    backbone = timm.create_model("vit_tiny_patch16_224", **args)
    backbone.pretrained_cfg["license"] = None
    save_for_hf(backbone, out / "source", safe_serialization=True)
    hybrid = {"convert": (Rule(op="keep", sites="blocks.3.*"), Rule(op="relu", local="dwc3"))}
    return {
        "classifier": made(str(checkpoint), class_folders, out / "classifier", **hybrid),
        "backbone": made(str(out / "source"), class_folders, out / "backbone", output__license="mit"),
        "demo": made("demo", Path("demo"), out / "demo", output__bench=False),
    }


def text_of(artifact: Artifact) -> str:
    assert artifact.folder is not None
    return (artifact.folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("source", SOURCES)
def test_front_matter(source: str, artifacts: dict[str, Artifact]) -> None:
    artifact = artifacts[source]
    meta = yaml.safe_load(text_of(artifact).split("---\n")[1])  # no tags of Python objects, or this raises
    student = artifact.report["evaluation"]["student"]
    assert meta["library_name"] == "vit2linear"
    assert {"vit2linear", "linear-attention", "relu", "timm"} == set(meta["tags"])
    task = "image-feature-extraction" if source == "backbone" else "image-classification"
    assert meta["pipeline_tag"] == task
    assert meta["license"] == ("mit" if source == "backbone" else "apache-2.0")
    assert not {"base_model", "base_model_relation", "datasets"} & set(meta), "paths are no ids of the Hub"
    (model,) = meta["model-index"]
    metrics = {m["name"]: m["value"] for result in model["results"] for m in result["metrics"]}
    wanted = {"10-NN": "knn", "ridge probe": "probe"} if source == "backbone" else {"top-1": "top1", "top-5": "top5"}
    assert metrics == {name: pytest.approx(student[key] / 100, abs=1e-4) for name, key in wanted.items()}
    assert all(type(value) is float and math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("source", SOURCES)
def test_it_survives_being_read(source: str, artifacts: dict[str, Artifact]) -> None:
    text = text_of(artifacts[source])
    card = ModelCard(text)
    again = ModelCard(str(card))
    assert card.data.to_dict() == again.data.to_dict() == yaml.safe_load(text.split("---\n")[1])
    assert card.text == again.text


@pytest.mark.parametrize("source", SOURCES)
def test_it_is_written_from_the_record_alone(source: str, artifacts: dict[str, Artifact]) -> None:
    artifact = artifacts[source]
    assert artifact.folder is not None
    record = json.loads((artifact.folder / "report.json").read_text())
    assert render(artifact.folder.name, record, artifact.recipe) == text_of(artifact)
    published = render("m", record, artifact.recipe, repo="me/m")
    assert "OWNER" not in published and '"hf-hub:me/m"' in published


@pytest.mark.parametrize("source", SOURCES)
def test_snippets_run(
    source: str, artifacts: dict[str, Artifact], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = artifacts[source]
    Image.new("RGB", (50, 40), "red").save(tmp_path / "image.jpg")
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"```python\n(.*?)```", text_of(artifact), re.DOTALL)
    outputs = []
    for snippet in snippets:
        local = snippet.replace(f"hf-hub:OWNER/{source}", f"local-dir:{artifact.folder}")
        local = local.replace(f"OWNER/{source}", str(artifact.folder))
        assert "OWNER" not in local and "import vit2linear" in local
        found: dict[str, Any] = {}
        exec(local, found)
        outputs.append(found["output"])
    timms, theirs, own = outputs
    assert timms.isfinite().all() and own.shape == timms.shape
    if source != "backbone":  # there transformers gives the tokens
        assert torch.allclose(timms, theirs, atol=1e-5)


def test_no_paths(artifacts: dict[str, Artifact], class_folders: Path, checkpoint: Path) -> None:
    for artifact in artifacts.values():
        text = text_of(artifact)
        assert str(class_folders.parent) not in text and str(checkpoint.parent) not in text
    assert f"`{class_folders.name}`; {class_folders.name} (val)" in text_of(artifacts["classifier"])


def test_what_it_says(artifacts: dict[str, Artifact]) -> None:
    text, report = text_of(artifacts["classifier"]), artifacts["classifier"].report
    assert "replaced" in text and "3 of 4 attention modules" in text and "`blocks.3.attn`" in text
    assert "arXiv 2205.14756" in text and "eprint = {2205.14756}" in text and "eprint = {2609.35745}" in text
    assert f"| top-1, % | {report['evaluation']['teacher']['top1']:.2f} |" in text
    for moment in report["history"]:
        assert f"| {moment['moment']} | {moment['images']} | {moment['student']['top1']:.2f} |" in text
    assert "1 attention modules keep the softmax" in text and "](sites.png)" in text
    assert "That of the original, apache-2.0." in text
    assert "a depthwise 3x3 convolution of the values" in text
    assert "](speed.png)" not in text, "one size is no curve"
    assert "Speed against resolution" not in text_of(artifacts["demo"]) and artifacts["demo"].report["speed"] is None


def point(side: int, speedup: float) -> dict[str, Any]:
    rates = {"softmax": 2.0, "student": 2 * speedup, "speedup": speedup, "spread": [speedup - 0.1, speedup + 0.1]}
    return {"size": [side, side], "tokens": side, **rates}


@pytest.mark.parametrize(
    ("speedups", "told"),
    [
        ((0.9, 0.95), "It is not faster than the original at 32 or 64 px"),
        ((0.9, 1.3), "faster than the original not at 32 px, and from 64 px on"),
        ((1.1, 1.3), "faster than the original from 32 px on"),
        ((1.1, 0.9), "It is not faster than the original at 32 or 64 px"),
    ],
)
def test_from_which_size_it_is_faster(speedups: tuple[float, float], told: str, artifacts: dict[str, Artifact]) -> None:
    artifact = artifacts["classifier"]
    points = [point(side, s) for side, s in zip((32, 64), speedups, strict=True)]
    record = {**artifact.report, "speed": {"device": "an abacus", "points": points}}
    assert told in render("m", record, artifact.recipe) and "an abacus" in render("m", record, artifact.recipe)
    assert "](speed.png)" in render("m", record, artifact.recipe)


def test_speed_at_larger_sizes(
    checkpoint: Path, class_folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SECONDS", 60.0)
    artifact = made(str(checkpoint), class_folders, tmp_path / "a", distill__steps=0, distill__calibration__images=0)
    assert artifact.folder is not None
    points = artifact.report["speed"]["points"]
    assert [p["size"] for p in points] == [[32, 32], [64, 64], [128, 128]]
    assert [p["tokens"] for p in points] == [17, 65, 257]
    assert all(p["softmax"] > 0 and p["spread"][0] <= p["speedup"] <= p["spread"][1] for p in points)
    with Image.open(artifact.folder / "speed.png") as picture:
        assert picture.width >= 800
    assert set(draw(artifact.report)) == {"speed.png", "sites.png"}


def test_what_cannot_be_built_larger_is_measured_at_its_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "SECONDS", 60.0)
    model = timm.create_model("test_vit", img_size=32).eval()
    teacher, student = (linearize(model, op) for op in ("softmax", "relu"))
    found = speed.measure_speed(teacher, student, Job("of_no_architecture", {}), (32, 32), torch.device("cpu"))
    assert [p.size for p in found.points] == [(32, 32)]
