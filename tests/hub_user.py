"""Somebody with an empty cache at a Hub on loopback that serves tiny stand-ins for the real repositories."""

from __future__ import annotations

import io
import json
import os
import re
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

from tests.loopback_hub import LoopbackHub

SOURCE, DATA = "google/vit-base-patch16-224", "timm/mini-imagenet"
CLASSES = range(10, 60, 10)
"""The data set's classes, as indices among ImageNet's."""
# Enough for the steps of a stage and the batches read ahead: datasets sleeps for 5 s where a shuffled stream ends.
SPLITS = {"train": 320, "validation": 10, "test": 20}


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
        """Requests to other hosts than the Hub's own."""
        known = ("/", self.hub.storage.url, self._viewer)
        return [r.path for r in self.hub.requests if not r.path.startswith(known)]

    def leaks(self) -> list[str]:
        """Requests with a token to other hosts than the Hub and its viewer."""
        return [leak for leak in self.hub.leaks if self._viewer not in leak]

    @property
    def _viewer(self) -> str:
        """The host of the Hub's viewer of data sets, which datasets makes up from the Hub's, and does without."""
        return self.hub.url.replace("://", "://datasets-server.")


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
