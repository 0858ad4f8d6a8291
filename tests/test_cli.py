"""Bad input as a user meets it: one sentence, the documented exit code, and nothing written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Run, write_images
from vit2linear.cli.main import EXIT_CODES


def one_sentence(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    assert lines[-1].startswith("error: "), text
    return lines[-1]


def test_plan_opens_no_weight_file(checkpoint: Path, cli: Run, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    done = cli("convert", folder, "--op", "relu", "--data", tmp_path, "--dry-run", "--json")
    plan = json.loads(done.stdout)
    assert plan["output"] == "source-relu" and plan["steps"] == 2000 and len(plan["plan"]) == 4
    assert plan["plan"][0]["site"] == {
        "path": "blocks.0.attn",
        "kind": "attention",
        "geometry": {"width": 48, "num_heads": 3, "head_dim": 16, "scale": 0.25},
        "window": None,
    }
    shown = cli("convert", folder, "--op", "elu", "--dry-run")
    assert "blocks.3.attn" in shown.stdout and "elu" in shown.stdout and "about 7 GB" in shown.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_json_is_all_there_is_on_stdout(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    args = ("--data", class_folders, "--distill-steps", 2, "-b", 4, "-j", 0)
    report = json.loads(cli("convert", checkpoint, "--op", "relu", *args, "--json").stdout)
    assert report["evaluation"]["images"] == 12
    evaluation = json.loads(cli("eval", "--json", "-j", 0).stdout)
    assert evaluation["teacher"]["top1"] == report["evaluation"]["teacher"]["top1"]
    assert evaluation["model"] == "local-dir:tiny-relu"
    text = cli("eval", "-j", 0)
    assert "top-1" in text.stdout and "tiny-relu" in text.stderr
    other = json.loads(cli("eval", "--data", class_folders / "val", "--ignore-labels", "--json", "-j", 0).stdout)
    assert other["student"]["top1"] is None and other["agreement"] is not None


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["demo", "--op", "rellu"], 2, "unknown operator 'rellu'. Did you mean 'relu'"),
        (["demo", "--op", "relu", "--distill-steps", "-1"], 2, "distill.steps: -1 is out of range"),
        (["--op", "relu"], 2, "source.model: name a model"),
        (["demo", "--recipe", "absent.toml"], 2, "cannot read the recipe 'absent.toml'"),
        (["demo", "--recipe", "bad.toml"], 2, "unknown key; did you mean 'steps'?"),
        (["demo", "--mixed-precision", "fp16"], 2, "needs a CUDA GPU"),
        (["demo", "--device", "tpu"], 2, "run.device: 'tpu' is not one of"),
        (["demo", "--data", "absent/"], 5, "there is no folder 'absent/'"),
        (["demo", "--data", "empty"], 5, "holds no images"),
        (["demo", "--data", "text"], 5, "holds no images"),
        (["demo", "--data", "broken"], 5, "(no image that can be decoded)"),
        (["demo", "--data", "classes", "--split", "train"], 5, "has no split 'train'. It has 'cat', 'dog'"),
        (["demo", "--data", "classes", "--data", "classes"], 2, "names nothing, or a set twice"),
        (["demo", "--split", "test", "--val-split", "test"], 2, "they are never the same images"),
        (["demo", "--data", "classes", "--class-map", "bad.toml"], 5, "--class-map: 'bad.toml': 'distill'"),
        (["demo", "--class-map", "absent.json"], 5, "--class-map: 'absent.json' cannot be read"),
        (["no-such-model"], 3, "neither a folder nor a name that timm knows"),
        (["absent/model"], 3, "HF_HUB_OFFLINE"),
        (["empty"], 3, "has no config.json"),
        (["clap"], 4, "Supported model types: vit, deit"),
        (["garbage"], 4, "is not JSON"),
        (["demo", "--output", "empty"], 7, "exists"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input(args: list[str], code: int, text: str, cli: Run, tmp_path: Path) -> None:
    for name, content in (("text/notes.txt", "hello"), ("clap/config.json", '{"model_type": "clap"}')):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    (tmp_path / "garbage").mkdir()
    (tmp_path / "garbage/config.json").write_text("{nope")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.toml").write_text("[distill]\nstepz = 3")
    (tmp_path / "broken").mkdir()
    for i in range(4):
        (tmp_path / f"broken/{i}.png").write_bytes(bytes([i]) * 50)
    for name in ("cat", "dog"):
        write_images(tmp_path / "classes" / name, 3, seed=len(name) + ord(name[0]))
    before = sorted(tmp_path.rglob("*"))
    done = cli("convert", *args, code=code)
    message = one_sentence(done.stderr)
    assert text in message
    assert not done.stdout and "stage" not in done.stderr, "nothing was trained"
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written"
    assert f"{code} " in EXIT_CODES


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (["eval"], 7, "no artifact was found"),
        (["push"], 7, "no artifact was found"),
        (["eval", "."], 7, "is not an artifact"),
        (["eval", "absent/model"], 7, "there is no artifact 'absent/model'"),
        (["eval", "--num-samples", "0"], 2, "data.eval_samples: 0 is out of range"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_eval_and_push_without_an_artifact(args: list[str], code: int, text: str, cli: Run) -> None:
    assert text in one_sentence(cli(*args, code=code).stderr)


def test_traceback_on_request(tmp_path: Path) -> None:
    env = {**os.environ, "VIT2LINEAR_TRACEBACK": "1"}
    command = [sys.executable, "-m", "vit2linear", "convert", "demo", "--op", "rellu"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "RecipeError" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before training", "step 1/", "after stage attention"])
def test_interrupted_at_any_point_leaves_a_checkpoint_and_nothing_else(
    moment: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A short first stage and an endless second one: the signal always comes in time.
    recipe = tmp_path_factory.mktemp("recipe") / "long.toml"
    text = "[distill]\nsteps = 8000\nbatch_size = 8\n[distill.attention]\nshare = 0.01\n[data]\neval_samples = 50\n"
    recipe.write_text(text)
    command = [sys.executable, "-m", "vit2linear", "convert", "demo", "--op", "relu", "--recipe", str(recipe)]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    for line in process.stderr:
        if moment in line or time.monotonic() > deadline:
            assert moment in line
            break
    for _ in range(6):
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=10)
            break
        except subprocess.TimeoutExpired:
            continue  # Python ignores an interrupt that lands in a destructor; a person presses again
    assert process.returncode == 130
    assert [p.name for p in tmp_path.iterdir()] == ["demo-relu.run"]
    left = sorted(p.name for p in (tmp_path / "demo-relu.run").iterdir())
    assert len([name for name in left if name.startswith("checkpoint-")]) == 1
    assert {name for name in left if not name.startswith("checkpoint-")} <= {"lock", "metrics.jsonl"}
