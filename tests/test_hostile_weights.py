"""Weights that run code, broke, or are not what the config says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hostile import Payload, without_weights
from tests.test_sources import load
from vit2linear import model
from vit2linear.errors import WeightsError
from vit2linear.resolve import layout_of, resolve


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A source of one's own to break."""
    return Path(shutil.copytree(checkpoint, tmp_path / "source"))


def load_file_as(path: Path) -> None:
    ref = resolve(str(path), arch="vit_tiny_patch16_224")
    model.load(ref, layout_of(ref).spec(ref))


@pytest.mark.parametrize("legacy", [False, True])
def test_payloads_are_not_run(folder: Path, legacy: bool) -> None:
    owned, weights = folder / "owned", without_weights(folder)
    hostile = {**weights, "x": Payload(owned)}
    torch.save(hostile, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(WeightsError, match=r"Python objects besides weights.*could run code.*save its state dict"):
        load(folder)
    shutil.move(folder / "pytorch_model.bin", folder / "lone.pth")
    with pytest.raises(WeightsError, match=r"lone.pth of .* holds Python objects"):
        load_file_as(folder / "lone.pth")
    (folder / "part.bin").write_bytes((folder / "lone.pth").read_bytes())
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "part.bin"}}))
    with pytest.raises(WeightsError, match=r"part.bin of .* holds Python objects"):
        load(folder)
    assert not owned.exists()


def test_arrays_with_a_payload_are_not_run(folder: Path) -> None:
    owned = folder / "owned"
    np.savez(folder / "lone.npz", x=np.array([Payload(owned)], dtype=object))
    with pytest.raises(WeightsError, match=r"lone.npz of .* cannot be read.*kinds hold weights: \.safetensors"):
        load_file_as(folder / "lone.npz")
    assert not owned.exists()


def test_pickles_that_never_end(folder: Path) -> None:
    weights = without_weights(folder)
    inside: dict[str, Any] = {}
    inside["model"] = inside
    torch.save(inside, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="cannot be read"):
        load(folder)
    torch.save({**weights, "pos_embed": torch.zeros(1).expand(10**6, 10**6)}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"'pos_embed' of .* is no plain tensor"):
        load(folder)


CUTS = [0, 1, 7, 8, 20, 1_000, -1_000_000, -4, -1]


@pytest.mark.parametrize("cut", CUTS)
def test_safetensors_that_were_cut(folder: Path, cut: int) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: max(cut, 8 - len(content))])
    with pytest.raises(WeightsError, match=r"model.safetensors of .* cannot be read: .*Download it again"):
        load(folder)


@pytest.mark.parametrize("length", [0, 3, 10**8, 2**32, 2**60, 2**64 - 1])
def test_headers_of_another_length(folder: Path, length: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(WeightsError, match=r"model.safetensors of .* cannot be read"):
        load(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}, "cannot be read"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 2**50]}, "cannot be read"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}, "cannot be read"),
        ({"dtype": "NOPE", "shape": [1], "data_offsets": [0, 4]}, "cannot be read"),
        ("nonsense", "cannot be read"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "describes .* numbers|do not fit"),
    ],
)
def test_headers_that_say_otherwise(folder: Path, entry: Any, message: str) -> None:
    header = json.dumps({"pos_embed": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(WeightsError, match=message):
        load(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e300])
def test_weights_that_are_not_finite(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["blocks.2.mlp.fc1.weight"] = weights["blocks.2.mlp.fc1.weight"].double()
    weights["blocks.2.mlp.fc1.weight"][3, 4] = value
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 weights of .* not finite in float32: blocks.2.mlp.fc1.weight"):
        load(folder)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.complex64])
def test_weights_of_another_kind(folder: Path, dtype: torch.dtype) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.to(dtype) for k, v in weights.items()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{dtype!s}.*Quantised"):
        load(folder)


@pytest.mark.parametrize("shape", [(), (0,), (17, 48), (1, 17, 48, 1)])
def test_weights_of_another_shape(folder: Path, shape: tuple[int, ...]) -> None:
    weights = load_file(folder / "model.safetensors")
    for key in ("pos_embed", "patch_embed.proj.weight"):
        save_file({**weights, key: torch.zeros(shape)}, folder / "model.safetensors")
        with pytest.raises(WeightsError, match="do not fit its config"):
            load(folder)


def test_a_config_that_describes_far_more_than_the_weights(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_args"] |= {"embed_dim": 120_000}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError, match=r"describes [\d,]+ numbers, the files hold"):
        load(folder)
