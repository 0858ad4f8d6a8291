from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open

import vit2linear
from tests.conftest import Run
from vit2linear import Recipe, convert, evaluate, load
from vit2linear.artifact import FILES, Artifact, check_output, newest, open_artifact
from vit2linear.errors import ArtifactError
from vit2linear.recipe import Calibration, override, read_recipe
from vit2linear.site import sites_of


def recipe(checkpoint: Path, images: Path, output: Path, **values: Any) -> Recipe:
    base = {
        "source__model": str(checkpoint),
        "distill__steps": 4,
        "distill__batch_size": 8,
        "data__path": str(images),
        "data__workers": 0,
        "output__dir": str(output),
        "run__device": "cpu",
    }
    return override(Recipe(), **(base | values))


@pytest.fixture(scope="module")
def artifact(checkpoint: Path, class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return convert(recipe(checkpoint, class_folders, tmp_path_factory.mktemp("out") / "tiny-relu"))


def folder_of(artifact: Artifact) -> Path:
    assert artifact.folder is not None
    return artifact.folder


def test_files(artifact: Artifact) -> None:
    folder = folder_of(artifact)
    # One size has no curve, and this source no text of a licence.
    assert {p.name for p in folder.iterdir()} == set(FILES) - {"speed.png", "LICENSE", "NOTICE"}
    assert not [p for p in folder.parent.iterdir() if p != folder], "no temporary folder is left"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((folder / "config.json").read_text())
    assert config["architecture"] == "vit2linear" and "num_classes" not in config["model_args"]
    assert config["num_classes"] == 5 and config["label_names"][1] == "bread"
    assert str(folder.parent) not in "".join(
        (folder / f).read_text() for f in FILES if f.endswith((".json", ".jsonl", ".toml", ".md"))
    )


def test_report(artifact: Artifact) -> None:
    report = json.loads((folder_of(artifact) / "report.json").read_text())
    assert report == json.loads(json.dumps(artifact.report))
    audit = report["audit"]
    assert audit["softmax_left"] == 0 and not audit["dropped"] and not audit["new"] and len(audit["trained"]) > 20
    assert [s["stage"] for s in report["stages"]] == ["attention", "feature"]
    assert sum(s["steps"] for s in report["stages"]) == 4 and sum(s["images"] for s in report["stages"]) == 32
    assert [h["moment"] for h in report["history"]] == [
        "before training",
        "after stage attention",
        "after stage feature",
    ]
    assert set(report["evaluation"]["site_errors"]) == {f"blocks.{i}.attn" for i in range(4)}
    assert report["evaluation"]["images"] == 12 and 0 <= report["evaluation"]["student"]["top1"] <= 100


RELOAD = """
{order}
import sys, torch
folder = sys.argv[1]
model = timm.create_model(f"local-dir:{{folder}}", pretrained=True).eval()
x = torch.load(folder + "/../x.pt")
with torch.inference_mode():
    torch.save(model(x), folder + "/../y.pt")
"""


@pytest.mark.parametrize("order", ["import timm, vit2linear", "import vit2linear, timm"])
def test_reloads_bit_equal_in_a_fresh_process(artifact: Artifact, order: str) -> None:
    folder = folder_of(artifact)
    x = torch.randn(2, 3, 32, 32)
    torch.save(x, folder.parent / "x.pt")
    subprocess.run([sys.executable, "-c", RELOAD.format(order=order), str(folder)], check=True)
    with torch.inference_mode():
        assert torch.equal(torch.load(folder.parent / "y.pt"), load(str(folder))(x))
    for name in ("x.pt", "y.pt"):
        (folder.parent / name).unlink()


def test_stock_timm_fails_loudly(artifact: Artifact) -> None:
    code = f"import timm; timm.create_model('local-dir:{folder_of(artifact)}', pretrained=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Unknown model (vit2linear)" in done.stderr


@pytest.mark.parametrize(
    ("args", "shape"),
    [
        ({"img_size": 48}, (1, 5)),
        ({"img_size": (32, 64)}, (1, 5)),
        ({"num_classes": 0}, (1, 48)),
        ({"num_classes": 9}, (1, 9)),
        ({"in_chans": 1}, (1, 5)),
    ],
    ids=str,
)
def test_timms_own_arguments_work_on_reload(artifact: Artifact, args: dict[str, Any], shape: tuple[int, int]) -> None:
    model = timm.create_model(artifact.name, pretrained=True, **args).eval()
    assert len(sites_of(model)) == 4
    size = args.get("img_size", 32)
    with torch.inference_mode():
        y = model(torch.randn(1, args.get("in_chans", 3), *((size, size) if isinstance(size, int) else size)))
    assert y.shape == shape and y.isfinite().all()


def test_features_only(artifact: Artifact) -> None:
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        features = timm.create_model(artifact.name, pretrained=True, features_only=True).eval()(x)
        whole = load(artifact.name).forward_intermediates(x, intermediates_only=True, norm=False)
    assert [f.shape for f in features] == [(1, 48, 4, 4)] * 3
    assert all(torch.equal(f, w) for f, w in zip(features, whole[-3:], strict=True))


def test_timm_exports_a_reloaded_model_again(artifact: Artifact, tmp_path: Path) -> None:
    from timm.models import save_for_hf

    model = load(artifact.name)
    save_for_hf(model, tmp_path / "again", safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path / 'again'}", pretrained=True).eval()
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(again(x), model(x))


def test_transformers_loads_it(artifact: Artifact) -> None:
    import transformers
    from PIL import Image

    folder = str(folder_of(artifact))
    x = torch.randn(2, 3, 32, 32)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        assert torch.equal(theirs(x).logits, load(folder)(x))
    assert theirs.config.id2label[1] == "bread"
    pipe = transformers.pipeline("image-classification", model=folder, device="cpu")
    answer = pipe(Image.new("RGB", (50, 40), "red"))
    assert {a["label"] for a in answer} == {"apple", "bread", "cup", "dog", "egg"}


def test_evaluate_finds_the_teacher_and_the_images_again(artifact: Artifact) -> None:
    report = evaluate(artifact, workers=0)
    recorded = artifact.report["evaluation"]
    assert report.data == recorded["data"] and report.images == 12
    assert (report.teacher.top1, report.student.top1) == (recorded["teacher"]["top1"], recorded["student"]["top1"])
    assert report.agreement == recorded["agreement"] and report.speedup > 0


def test_held_out_images_are_held_out_again(checkpoint: Path, flat_folder: Path, tmp_path: Path) -> None:
    made = convert(recipe(checkpoint, flat_folder, tmp_path / "a", distill__steps=2))
    assert made.report["data"]["held_out"] and made.report["evaluation"]["images"] == 2
    report = evaluate(made, workers=0)
    assert report.data.endswith("held-out 5%") and report.images == 2 and report.student.top1 is None
    assert report.agreement == made.report["evaluation"]["agreement"]


def test_the_recorded_recipe_gives_the_same_weights(artifact: Artifact, tmp_path: Path) -> None:
    again = read_recipe(folder_of(artifact) / "recipe.toml")
    assert again.output.dir is None
    convert(override(again, output__dir=str(tmp_path / "again")))
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        folder_of(artifact) / "model.safetensors"
    ).read_bytes()


def test_teacher_that_is_not_the_one_that_was_converted(artifact: Artifact, checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    weights = load_file(checkpoint / "model.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, tmp_path / "model.safetensors")
    with pytest.raises(ArtifactError, match="are not those that were converted"):
        evaluate(artifact, teacher=str(tmp_path), workers=0)


def test_output_folders_that_are_refused(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="exists"):
        check_output(folder_of(artifact), overwrite=False)
    check_output(folder_of(artifact), overwrite=True)
    (tmp_path / "thesis.txt").write_text("three years")
    with pytest.raises(ArtifactError, match="is not an artifact of vit2linear"):
        check_output(tmp_path, overwrite=True)
    with pytest.raises(ArtifactError, match="is not a folder"):
        check_output(tmp_path / "thesis.txt" / "out", overwrite=False)


def test_overwrite_replaces_at_the_last_moment(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    options = recipe(
        checkpoint, class_folders, tmp_path / "a", distill__steps=0, distill__calibration=Calibration(images=0)
    )
    first = convert(options)
    assert not first.report["stages"] and not first.report["audit"]["trained"]
    broken = override(
        options, distill__steps=2, distill__attention=replace(options.distill.attention, lr=0.0, lr_new=0.0)
    )
    with pytest.raises(vit2linear.errors.DistillError):
        convert(broken, overwrite=True)
    assert open_artifact(str(tmp_path / "a")).report == first.report
    second = convert(override(options, distill__steps=2), overwrite=True)
    assert open_artifact(str(tmp_path / "a")).report == json.loads(json.dumps(second.report))
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_newest(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    import os

    with pytest.raises(ArtifactError, match="no artifact was found"):
        newest(tmp_path)
    for i, name in enumerate(("old", "runs/new")):
        made = convert(recipe(checkpoint, class_folders, tmp_path / name, distill__steps=0))
        os.utime(folder_of(made) / "report.json", (i, i))
    assert newest(tmp_path) == tmp_path / "runs/new"
    with pytest.raises(ArtifactError, match="is not an artifact"):
        open_artifact(str(tmp_path))


def test_evaluation_at_another_size(checkpoint: Path, class_folders: Path, tmp_path: Path, cli: Run) -> None:
    made = convert(recipe(checkpoint, class_folders, tmp_path / "a"))
    small, wide = evaluate(made, workers=0), evaluate(made, workers=0, size=(48, 64))
    assert wide.images == small.images and wide.feature_cosine != small.feature_cosine
    done = cli("eval", tmp_path / "a", "--img-size", "48x64", "-j", 0, "--json")
    assert json.loads(done.stdout)["feature_cosine"] == pytest.approx(wide.feature_cosine, abs=1e-5)
    assert "input of 48x64 pixels; resized for it: pos_embed 1x17x48 -> 1x49x48" in done.stderr


def test_another_image_size(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    made = convert(recipe(checkpoint, class_folders, tmp_path / "a", source__img_size=48))
    model = made.model()
    assert model.pos_embed.shape[1] == 37 and tuple(model.pretrained_cfg["input_size"]) == (3, 48, 48)
    assert evaluate(made, workers=0).agreement == made.report["evaluation"]["agreement"]


def test_kept_sites_stay_softmax(checkpoint: Path, class_folders: Path, tmp_path: Path) -> None:
    from vit2linear.recipe import Rule

    rules = (Rule(op="keep", sites="blocks.3.*"), Rule(op="elu"))
    made = convert(recipe(checkpoint, class_folders, tmp_path / "a", convert=rules))
    assert made.report["audit"]["softmax_left"] == 1 and len(sites_of(made.model())) == 3
    assert [p["op"] for p in made.report["plan"]] == ["elu", "elu", "elu", "keep"]
    assert evaluate(made, workers=0).agreement == made.report["evaluation"]["agreement"]
