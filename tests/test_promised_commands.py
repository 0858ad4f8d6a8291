"""The promised commands, typed as a user types them, against a Hub on loopback with tiny stand-ins for the real files.

What is checked here can only be seen from outside: what is fetched, what is uploaded, and what other programs can load.
"""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import ImageNetInfo
from transformers import ViTConfig, ViTForImageClassification

from tests.loopback_hub import OWNER, LoopbackHub

SOURCE, DATA, NAME = "google/vit-base-patch16-224", "timm/mini-imagenet", "vit-base-patch16-224-relu"
CLASSES = range(10, 60, 10)
"""The data set's classes, as indices among ImageNet's."""
# Enough for the steps of a stage and the batches read ahead: datasets sleeps for 5 s where a shuffled stream ends.
SPLITS = {"train": 320, "validation": 10, "test": 20}
LOAD = """
import json, sys
import timm, vit2linear
import torch
from transformers import AutoModelForImageClassification

pushed, local = sys.argv[1:]
pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
models = [timm.create_model(name, pretrained=True).eval() for name in (f"hf-hub:{pushed}", f"local-dir:{local}")]
wrapped = AutoModelForImageClassification.from_pretrained(pushed).eval()
with torch.inference_mode():
    remote, kept = (model(pixels) for model in models)
    seen = wrapped(pixel_values=pixels).logits
print(json.dumps({
    "operators": sorted({type(m).__module__ for m in models[0].modules() if ".ops." in type(m).__module__}),
    "timm": torch.equal(remote, kept), "transformers": torch.equal(seen, kept), "classes": kept.shape[1],
}))
"""


@dataclass(frozen=True)
class User:
    """Somebody in an empty folder, with an empty cache, logged in at the loopback Hub."""

    hub: LoopbackHub
    home: Path

    @property
    def folder(self) -> Path:
        return self.home / "work"

    def run(self, command: str, code: int = 0, **settings: str | None) -> subprocess.CompletedProcess[str]:
        """A command line of ``vit2linear``; ``settings`` change the environment, ``None`` removes."""
        program, *args = command.split()
        return self.execute([str(Path(sys.executable).parent / program), *args], code, **settings)

    def execute(self, args: list[str], code: int = 0, **settings: str | None) -> subprocess.CompletedProcess[str]:
        dropped = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
        env: dict[str, str | None] = {k: v for k, v in os.environ.items() if not k.upper().startswith(dropped)}
        env |= {"HF_ENDPOINT": self.hub.url, "HF_HOME": str(self.home / "cache"), "HF_TOKEN": self.hub.token}
        # One thread: on a busy machine several spend their time waiting for each other over so tiny a model.
        env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1", **self.hub.proxy_env, **settings}
        given = {k: v for k, v in env.items() if v is not None}
        done = subprocess.run(
            args, cwd=self.folder, env=given, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == code, f"{args} gave {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        assert self.hub.token not in done.stdout + done.stderr
        return done

    def fetched(self, repo: str) -> set[str]:
        """Names of the files that were asked for."""
        found = (re.search(rf"/{re.escape(repo)}/resolve/\w+/(.+)$", request.path) for request in self.hub.requests)
        return {match[1] for match in found if match}

    def elsewhere(self) -> list[str]:
        """Requests to other hosts. datasets makes up the viewer's host from the Hub's, and does without it."""
        viewer = self.hub.url.replace("://", "://datasets-server.")
        return [r.path for r in self.hub.requests if not r.path.startswith(("/", viewer))]


@pytest.fixture(scope="module")
def source_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A tiny ViT classifier of ImageNet's classes, as transformers saves it."""
    labels = dict(enumerate(ImageNetInfo("imagenet-1k").label_descriptions()))
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, id2label=labels))
    # Every image is taken for the set's first class, so the accuracy is known.
    model.classifier.bias.data[CLASSES[0]] = 10.0
    folder = tmp_path_factory.mktemp("source")
    model.save_pretrained(folder)
    # As ViTImageProcessor writes it.
    processor = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_processor_type": "ViTImageProcessor",
        "image_std": [0.5, 0.5, 0.5],
        "resample": 2,
        "rescale_factor": 1 / 255,
        "size": {"height": 32, "width": 32},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A stand-in\n")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def data_files() -> dict[str, bytes]:
    """Class-coloured noise in five of ImageNet's classes, in the splits of the default set."""
    names = ImageNetInfo("imagenet-1k").label_names()
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=[names[i] for i in CLASSES])}
    )
    rng = np.random.default_rng(0)
    files = {"README.md": b"---\nlicense: other\n---\n# A stand-in\n"}
    for split, count in SPLITS.items():
        labels = [i % len(CLASSES) for i in range(count)]
        pixels = [(rng.integers(0, 128, (50, 40, 3)) + 25 * label).astype(np.uint8) for label in labels]
        rows = {"image": [Image.fromarray(p) for p in pixels], "label": labels}
        file = io.BytesIO()
        datasets.Dataset.from_dict(rows, features=features).to_parquet(file)
        files[f"data/{split}-00000-of-00001.parquet"] = file.getvalue()
    return files


@pytest.fixture
def user(source_files: dict[str, bytes], data_files: dict[str, bytes], tmp_path: Path) -> Iterator[User]:
    with LoopbackHub() as hub:
        hub.add_repo(SOURCE, source_files)
        hub.add_repo(DATA, data_files, "dataset")
        (tmp_path / "work").mkdir()
        yield User(hub, tmp_path)


def test_convert_eval_push_and_load(user: User, source_files: dict[str, bytes]) -> None:
    hub, artifact, repo = user.hub, user.folder / NAME, f"{OWNER}/{NAME}"
    converted = user.run(f"vit2linear convert {SOURCE} --op relu --distill-steps 4")
    (announced,) = [line for line in converted.stderr.splitlines() if "No --data given" in line]
    assert DATA in announced
    assert re.search(r"\d GB", announced)
    assert [path.name for path in user.folder.iterdir()] == [NAME]
    report = json.loads((artifact / "report.json").read_text())
    assert report["source"]["repo"] == SOURCE
    assert report["source"]["commit"] == hub.commit(SOURCE)
    assert report["source"]["license"] == "apache-2.0"
    assert {stage["stage"] for stage in report["stages"]} == {"attention", "feature"}
    assert sum(stage["steps"] for stage in report["stages"]) == 4

    # From here on main is another model: eval must go on with the commit that was converted.
    hub.add_repo(SOURCE, {**source_files, "config.json": b'{"model_type": "bert"}'})
    shown = user.run("vit2linear eval").stdout
    assert f"{DATA} (test), {SPLITS['test']} images" in " ".join(shown.split())
    assert "top-1" in shown
    measured = json.loads(user.run("vit2linear eval --json").stdout)
    assert (measured["data"], measured["images"]) == (f"{DATA} (test)", SPLITS["test"])
    for model in ("teacher", "student"):
        assert measured[model]["top1"] == pytest.approx(100 / len(CLASSES))
        assert report["evaluation"][model]["top1"] == pytest.approx(100 / len(CLASSES))

    (artifact / "notes.txt").write_text("not for others")
    assert "not logged in" in one_line(user.run("vit2linear push", code=8, HF_TOKEN=None))
    assert f"{hub.url}/{repo}" in user.run("vit2linear push").stdout
    uploaded = hub.files(repo)
    uploaded.pop(".gitattributes")  # the Hub's own, in every new repository
    assert sorted(uploaded) == ["README.md", "config.json", "model.safetensors", "recipe.toml", "report.json"]
    assert all(data == (artifact / name).read_bytes() for name, data in uploaded.items())

    # Anybody, elsewhere.
    strangers_cache = str(user.home / "stranger")
    loaded = user.execute([sys.executable, "-c", LOAD, repo, NAME], HF_TOKEN=None, HF_HOME=strangers_cache)
    expected = {"operators": ["vit2linear.ops.relu"], "timm": True, "transformers": True, "classes": 1000}
    assert json.loads(loaded.stdout) == expected

    assert not user.elsewhere()
    written = [path for path in user.home.rglob("*") if path.is_file()]
    assert not [path for path in written if hub.token.encode() in path.read_bytes()]


def test_dry_run_reads_no_weights(user: User) -> None:
    done = user.run(f"vit2linear convert {SOURCE} --op relu --distill-steps 4 --dry-run")
    assert user.fetched(SOURCE) == {"config.json", "preprocessor_config.json"}
    assert not user.fetched(DATA)
    assert {request.method for request in user.hub.requests} <= {"GET", "HEAD"}
    assert user.hub.commit(SOURCE)[:12] in done.stderr
    assert not list(user.folder.iterdir())
    assert not user.elsewhere()


@pytest.mark.parametrize(
    ("repo", "told"),
    [
        ("big-lab/gated-vit", "is gated"),
        ("google/vit-base-patch16-242", "no repository"),
        ("google/vit-base-patch16-224", "cannot be reached"),
    ],
    ids=["gated", "absent", "unreachable"],
)
def test_source_out_of_reach(user: User, source_files: dict[str, bytes], repo: str, told: str) -> None:
    user.hub.add_repo("big-lab/gated-vit", source_files, gated=True)
    endpoint = user.hub.url if told != "cannot be reached" else f"http://127.0.0.1:{unused_port()}"
    message = one_line(user.run(f"vit2linear convert {repo} --op relu", code=3, HF_ENDPOINT=endpoint))
    assert told in message
    assert repo in message
    assert not list(user.folder.iterdir())
    assert not user.elsewhere()


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a command that failed: the last line, the only one of its kind, and nothing on stdout."""
    assert not done.stdout
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.stderr.rstrip().endswith(message)
    return message


def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
