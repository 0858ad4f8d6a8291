"""However the weights are stored: shards, pickles, half precision, wrappers, partial prefixes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.sources.oracles import make
from tests.test_sources import load
from vit2linear.errors import SourceNotFoundError, WeightsError
from vit2linear.resolve import resolve

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make("vit").save_pretrained(tmp_path)
    return tmp_path


def taken(folder: Path) -> Weights:
    """The weights, whose file is gone."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    path.unlink()
    return weights


def same(folder: Path, before: Weights) -> bool:
    after = load(folder).module.state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_shards(folder: Path) -> None:
    before, record = load(folder).module.state_dict(), resolve(str(folder)).record()
    weights = taken(folder)
    for suffix in ("model.safetensors", "pytorch_model.bin"):
        names = [f"part-{i}-{suffix}" for i in range(3)]
        for i, name in enumerate(names):
            part = dict(list(weights.items())[i::3])
            save_file(part, folder / name) if suffix == "model.safetensors" else torch.save(part, folder / name)
        index = {"weight_map": {key: names[i % 3] for i, key in enumerate(weights)}}
        (folder / f"{suffix}.index.json").write_text(json.dumps(index))
        assert same(folder, before)
        sha = resolve(str(folder)).record()["weights_sha256"]
        assert sha != record["weights_sha256"]
        (folder / names[1]).unlink()
        with pytest.raises(SourceNotFoundError, match=f"lacks {names[1]}, which its index lists"):
            load(folder)
        (folder / f"{suffix}.index.json").unlink()


@pytest.mark.parametrize(
    "wrap", [{}, {"model": None}, {"state_dict": None, "epoch": 3, "args": argparse.Namespace(a=1)}]
)
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_pickles_and_wrappers(folder: Path, wrap: dict[str, Any], prefix: str) -> None:
    before = load(folder).module.state_dict()
    weights = {prefix + k: v for k, v in taken(folder).items()}
    torch.save({k: weights if v is None else v for k, v in wrap.items()} or weights, folder / "pytorch_model.bin")
    assert same(folder, before)


class Surprise:
    """Code that a pickle would run."""

    def __reduce__(self) -> Any:
        return (print, ("executed",))


def test_pickles_that_could_run_code_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken(folder)
    torch.save({"vit.weight": torch.zeros(2), "x": Surprise()}, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"Python objects besides weights \(builtins.print\); they could run code"):
        load(folder)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_programs_are_refused(folder: Path) -> None:
    taken(folder)
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"TorchScript archive.*state_dict\(\) as safetensors"):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"\x80\x02garbage", b"PK\x03\x04 half a zip"])
def test_broken_pickles(folder: Path, content: bytes) -> None:
    taken(folder)
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(WeightsError, match=r"pytorch_model.bin of .* cannot be read") as error:
        load(folder)
    assert "weights_only" not in str(error.value), "no advice to run what is in the file"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_float32_and_remembered(folder: Path, dtype: torch.dtype) -> None:
    before = {k: v.to(dtype).float() for k, v in load(folder).module.state_dict().items()}
    weights = {k: v.to(dtype) for k, v in taken(folder).items()}
    save_file(weights, folder / "model.safetensors")
    assert same(folder, before)
    assert load(folder).spec.dtype == str(dtype).removeprefix("torch.")


def test_quantised_weights_are_refused(folder: Path) -> None:
    weights = taken(folder)
    save_file({k: v.to(torch.float8_e4m3fn) for k, v in weights.items()}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"is torch.float8_e4m3fn\. Quantised"):
        load(folder)


def test_prefixes_may_be_missing_on_some_keys(folder: Path) -> None:
    before = load(folder).module.state_dict()
    weights = taken(folder)
    mixed = {k.removeprefix("vit.") if i % 2 else f"model.{k}": v for i, (k, v) in enumerate(weights.items())}
    save_file(mixed, folder / "model.safetensors")
    assert same(folder, before)
    save_file(
        mixed | {"vit.layernorm.bias": torch.zeros(48), "layernorm.bias": torch.zeros(48)}, folder / "model.safetensors"
    )
    with pytest.raises(WeightsError, match=r"holds 'norm.bias' twice"):
        load(folder)


def test_an_empty_file(folder: Path) -> None:
    taken(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="hold no weights"):
        load(folder)
    save_file({}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match="hold no weights"):
        load(folder)
