"""Tiny real models and image sets, made once for each session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models import save_for_hf
from typer.testing import CliRunner

from tests.hub_user import data_files, source_files, user  # noqa: F401  fixtures
from vit2linear import record, speed
from vit2linear.cli.main import app


@pytest.fixture(scope="session")
def real() -> Path:
    """The folder of real inputs, for tests marked ``real``."""
    path = os.environ.get("VIT2LINEAR_REAL")
    if not path:
        pytest.skip("VIT2LINEAR_REAL is not set")
    return Path(path)


@pytest.fixture(autouse=True, scope="session")
def in_a_hurry() -> Iterator[None]:
    """Conversions measure their speed at one size only, in as few rounds as can be, and look at no single images."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(speed, "SECONDS", 0.0)
        patched.setattr(record, "LOOKED_AT", 0)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier in the timm layout: 32 px, 4 blocks, 5 named classes."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3, num_classes=5
    )
    folder = tmp_path_factory.mktemp("source") / "tiny"
    save_for_hf(
        model,
        folder,
        model_config={"label_names": ["apple", "bread", "cup", "dog", "egg"]},
        safe_serialization=True,
    )
    return folder


@pytest.fixture(scope="session")
def class_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train/ and val/ of three of the tiny classifier's classes, 8 and 4 images each."""
    root = tmp_path_factory.mktemp("images")
    for split, count in (("train", 8), ("val", 4)):
        for i, name in enumerate(("bread", "dog", "egg")):
            write_images(root / split / name, count, seed=10 * i + count)
    return root


@pytest.fixture(scope="session")
def flat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 unlabelled images, in several formats."""
    root = tmp_path_factory.mktemp("flat")
    for i, suffix in enumerate(("png", "jpg", "webp", "bmp")):
        write_images(root, 10, seed=100 + i, suffix=suffix)
    return root


def write_images(folder: Path, count: int, seed: int, suffix: str = "png") -> None:
    """Noise images of various sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for i in range(count):
        height, width = rng.integers(30, 60, 2)
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{seed}_{i}.{suffix}")


@dataclass
class Done:
    """What a command left behind."""

    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``vit2linear ARGS`` in an empty folder, in this process (a new one takes seconds to import torch)."""
    monkeypatch.chdir(tmp_path)

    def run(*args: object, code: int = 0) -> Done:
        result = CliRunner().invoke(app, [*map(str, args)])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == code, f"{args} gave {result.exit_code}\n{result.stdout}\n{result.stderr}"
        return Done(result.stdout, result.stderr)

    return run
