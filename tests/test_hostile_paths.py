"""Names that lead elsewhere, paths that are no files, made-up artifacts, and outputs that would do harm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.conftest import Run
from tests.hostile import Payload, listing, without_weights
from tests.test_sources import load
from vit2linear.artifact import check_output, newest, open_artifact
from vit2linear.errors import ArtifactError, SourceError, SourceNotFoundError, UnsupportedModelError
from vit2linear.prepare import prepare
from vit2linear.recipe import Recipe, override
from vit2linear.resolve import resolve


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A source of one's own to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


LEADS_AWAY = ["../../etc/x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "", ".", r"..\x.safetensors"]


@pytest.mark.parametrize("name", [*LEADS_AWAY, "config.json", 5, None, ["x.safetensors"], "x\0"], ids=repr)
def test_shards_beside_the_index_only(folder: Path, name: Any) -> None:
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": name}}))
    with pytest.raises(SourceError, match=r"index\.json of .* lists .*no file of weights beside it.*download it again"):
        load(folder)


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": "x.safetensors"}, {"weight_map": 3}])
def test_indices_that_are_none(folder: Path, index: Any) -> None:
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises((SourceError, UnsupportedModelError)):
        load(folder)


def test_links_to_files_elsewhere_are_followed(folder: Path, tmp_path: Path) -> None:
    """As in the cache of the Hub, where every file is a link."""
    before = load(folder).module.state_dict()
    for path in list(folder.iterdir()):
        path.rename(tmp_path / f"blob-{path.name}")
        path.symlink_to(tmp_path / f"blob-{path.name}")
    after = load(folder).module.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """A folder with what is neither a folder nor a file."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "a").symlink_to(tmp_path / "b")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "null").symlink_to("/dev/null")
    return tmp_path


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pipe", "is a device, pipe or socket"),
        ("null", "is a device, pipe or socket"),
        ("loop", "cannot be read: Too many levels of symbolic links"),
        ("a", "cannot be read: Too many levels of symbolic links"),
        ("gone", "is a link to what is not there"),
        ("absent", "neither an existing folder nor"),
        ("x" * 300, "neither an existing folder nor"),
        ("x" * 5000, "is no name of a model"),
        ("nul\0l", "neither an existing folder nor"),
    ],
    ids=lambda text: text[:10],
)
def test_paths_that_are_no_models(odd: Path, name: str, message: str) -> None:
    for arch in (None, "vit_tiny_patch16_224"):
        with pytest.raises(SourceNotFoundError, match=message):
            resolve(f"{odd}/{name}", arch=arch)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe", "loop", "gone", "null"])
def test_files_of_a_model_that_are_none(odd: Path, folder: Path, name: str) -> None:
    for file, message in (("model.safetensors", "has no weights"), ("config.json", "has no config.json")):
        (folder / file).unlink()
        (odd / name).rename(folder / file)
        with pytest.raises(SourceNotFoundError, match=message):
            load(folder)
        (folder / file).rename(odd / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_folders_that_may_not_be_read(folder: Path) -> None:
    folder.chmod(0)
    try:
        with pytest.raises(SourceNotFoundError, match="may not be read by this user"):
            resolve(str(folder))
    finally:
        folder.chmod(0o755)


@pytest.mark.timeout(20)
def test_pipes_under_the_names_of_an_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fake").mkdir()
    os.mkfifo(tmp_path / "fake/config.json")
    (tmp_path / "fake/report.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no artifact was found"):
        newest(tmp_path)
    with pytest.raises(ArtifactError, match="is not an artifact"):
        check_output(tmp_path / "fake", overwrite=True)


def test_the_command_says_so(odd: Path, cli: Run) -> None:
    assert "pipe or socket" in cli("convert", odd / "pipe", "--dry-run", code=3).stderr
    (odd / "recipe.toml").write_text("[run]\nseed = 1\nseed = 2")
    assert "not valid TOML" in cli("convert", "demo", "--recipe", odd / "recipe.toml", code=2).stderr


REPORT: dict[str, Any] = {"source": {"name": "x"}, "data": {"path": "y", "held_out": None, "ignore_labels": False}}
CONFIG: dict[str, Any] = {
    "architecture": "vit2linear",
    "model_args": {"base": "test_vit", "operators": {}},
    "pretrained_cfg": {},
}


def stranger(folder: Path, report: Any = REPORT, **args: Any) -> str:
    """An artifact that somebody made up."""
    folder.mkdir(exist_ok=True)
    config = CONFIG | {"model_args": CONFIG["model_args"] | args}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "report.json").write_text(json.dumps(report))
    return str(folder)


def test_artifacts_with_pickles_are_not_loaded(tmp_path: Path) -> None:
    name = stranger(tmp_path / "made")
    torch.save({"x": Payload(tmp_path / "owned")}, tmp_path / "made/pytorch_model.bin")
    with pytest.raises(ArtifactError, match=r"has no model\.safetensors"):
        open_artifact(name).model()
    (tmp_path / "made/pytorch_model.bin").rename(tmp_path / "made/model.safetensors")
    with pytest.raises(ArtifactError, match=r"model\.safetensors of .* cannot be read"):
        open_artifact(name).model()
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"checkpoint_path": "/etc/passwd"}, "checkpoint_path is no property of a model"),
        ({"embed_dim": 10**9}, "embed_dim is 1000000000, beyond"),
        ({"embed_dim": 96_000}, "does not fit its config.json"),
        ({"base": "../x"}, "which timm .* does not know"),
        ({"operators": {"blocks.0.attn": {"op": "nothing"}}}, "unknown operator 'nothing'"),
        ({"operators": {"blocks.0.attn": {"op": "os.path:join"}}}, "is not a complete"),
        ({"operators": {"../x": {"op": "relu"}}}, "'../x' is not a softmax attention module"),
        ({"operators": []}, "which operators are where"),
    ],
)
def test_artifacts_that_describe_no_model(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    name = stranger(tmp_path / "made", **args)
    save_file({"x": torch.zeros(1)}, tmp_path / "made/model.safetensors")
    with pytest.raises(ArtifactError, match=message):
        open_artifact(name).model()


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ([], "is not a JSON object"),
        ({}, "lacks, or has of another kind: source.name, data.path"),
        (REPORT | {"data": {"path": 3}}, "of another kind: data.path, data.held_out"),
        (REPORT | {"data": REPORT["data"] | {"streaming": 7}}, "of another kind: data.streaming"),
        (REPORT | {"data": REPORT["data"] | {"class_map": {"a": -1}}}, "of another kind: data.class_map"),
        (REPORT | {"source": {"name": "x", "repo": "a/x"}}, "of another kind: source.commit"),
        (REPORT | {"files": {"../config.json": "0"}}, "of another kind: files"),
        (REPORT | {"format": 99}, "by a later vit2linear.*Upgrade"),
    ],
)
def test_reports_that_say_nothing(tmp_path: Path, report: Any, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        open_artifact(stranger(tmp_path / "made", report))


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("file/out", "file' is not a folder"),
        ("file/deep/er/out", "file' is not a folder"),
        ("gone/out", "gone' is not a folder"),
        ("gone", "exists"),
        ("loop", "exists"),
        ("loop/out", "loop' is not a folder|symbolic links"),
        ("pipe", "exists"),
        ("x" * 250, "more than 240 bytes"),
        ("x" * 300, "more than 240 bytes|too long"),
        ("é" * 125, "more than 240 bytes"),
        ("/".join(["deep"] * 2000), "can be no output: .*too long"),
        ("nul\0l", "can be no output"),
    ],
    ids=lambda text: text[:16],
)
def test_outputs_that_cannot_be_written(odd: Path, output: str, message: str) -> None:
    (odd / "file").write_text("x")
    before = listing(odd)
    with pytest.raises(ArtifactError, match=message):
        check_output(odd / output, overwrite=False)
    if message == "exists":
        with pytest.raises(ArtifactError, match="is not an artifact"):
            check_output(odd / output, overwrite=True)
    assert listing(odd) == before


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A folder that not even root may write."""
    place = tmp_path / "read-only"
    place.mkdir()
    if os.geteuid() != 0:
        place.chmod(0o555)
        yield place
        place.chmod(0o755)
        return
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", place], capture_output=True, check=False).returncode:
        pytest.skip("no read-only folder can be made here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_read_only_outputs_are_refused_before_any_work(read_only: Path) -> None:
    for output in (read_only / "out", read_only / "deep/er/out"):
        with pytest.raises(ArtifactError, match=r"cannot be written: it is read-only"):
            check_output(output, overwrite=False)


def test_the_source_is_never_overwritten(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Path(stranger(tmp_path / "made"))
    source = Path(shutil.copytree(checkpoint, made / "source"))
    inside = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    for output, message in (("made/source", "is not an artifact"), ("made", "holds 'made/source', which is read")):
        recipe = override(Recipe(), source__model="made/source", output__dir=output)
        with pytest.raises(ArtifactError, match="exists"):
            prepare(recipe)
        with pytest.raises(ArtifactError, match=message):
            prepare(recipe, overwrite=True)
    lone = override(
        Recipe(), source__model="made/source/model.safetensors", source__arch="test_vit", output__dir="made"
    )
    with pytest.raises(ArtifactError, match="holds 'made/source', which is read"):
        prepare(lone, overwrite=True)
    images = override(Recipe(), source__model="other", data__path="made/source", output__dir="made")
    with pytest.raises(ArtifactError, match="holds 'made/source', which is read"):
        prepare(images, overwrite=True)
    beside = prepare(override(Recipe(), source__model="other", output__dir="other/converted"))
    assert beside.output == Path("other/converted") and listing(tmp_path) == before
    assert source.is_dir() and inside.is_dir()
