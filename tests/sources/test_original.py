"""Weights that no config describes, as their authors published them, or somebody's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

from tests.conftest import Run
from tests.sources.oracles import ask, make
from tests.sources.test_open_clip import TINY, X, as_open_clip, load
from vit2linear.errors import SourceNotFoundError, WeightsError


def test_original_dinov2_with_registers(tmp_path: Path) -> None:
    """Meta's names and mask token, in a file alone."""
    name, args = "vit_small_patch14_reg4_dinov2", {**TINY, "init_values": 1.0}
    theirs = timm.create_model(name, num_classes=0, **args).eval()
    theirs.cls_token.data.normal_()
    weights = dict(theirs.state_dict())
    weights["register_tokens"] = weights.pop("reg_token")
    weights["mask_token"] = torch.zeros(1, 48)
    first = torch.randn(1, 1, 48)
    weights["cls_token"] = weights["cls_token"] - first
    weights["pos_embed"] = torch.cat([first, weights["pos_embed"]], 1)
    torch.save(weights, tmp_path / "dinov2_pretrain.pth")
    for source in (tmp_path / "dinov2_pretrain.pth", tmp_path, f"local-dir:{tmp_path}/dinov2_pretrain.pth"):
        loaded = load(source, name, **args)
        with torch.no_grad():
            torch.testing.assert_close(loaded.module(X), theirs(X), rtol=0, atol=1e-5)
        assert loaded.module.num_classes == 0 and "dinov2" in loaded.spec.notes[0]
    assert loaded.spec.pretrained_cfg["mean"] == (0.485, 0.456, 0.406)


def test_original_dinov3(tmp_path: Path) -> None:
    """Storage tokens, fused qkv with a masked key bias."""
    name, args = "vit_small_patch16_dinov3_qkvb", {**TINY, "num_reg_tokens": 3}
    theirs = timm.create_model(name, num_classes=0, **args).eval()
    weights = {k.replace("reg_token", "storage_tokens"): v for k, v in theirs.state_dict().items()}
    weights = {re.sub(r"gamma_(\d)", r"ls\1.gamma", k): v for k, v in weights.items()}
    for i in range(2):
        q, v = weights.pop(f"blocks.{i}.attn.q_bias"), weights.pop(f"blocks.{i}.attn.v_bias")
        weights[f"blocks.{i}.attn.qkv.bias"] = torch.cat([q, torch.zeros(48), v])
        weights[f"blocks.{i}.attn.qkv.bias_mask"] = torch.zeros(144)
    save_file(
        weights | {"mask_token": torch.zeros(1, 48), "rope_embed.periods": torch.zeros(3)}, tmp_path / "a.safetensors"
    )
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path, name, **args).module(X), theirs(X), rtol=0, atol=1e-6)


def test_original_clip_and_eva(tmp_path: Path) -> None:
    oracle = make("clip_vision_model-projection")
    torch.save(as_open_clip(oracle.state_dict()), tmp_path / "clip.pt")
    args = {**TINY, "mlp_ratio": 100 / 48}
    with torch.no_grad():
        mine = load(tmp_path, "vit_base_patch16_clip_224.openai", **args).module
        assert (
            mine.num_classes == 20
            and (mine(X) - ask("clip_vision_model-projection", oracle, X).outputs).abs().max() <= 1e-4
        )
    theirs = timm.create_model("eva02_base_patch14_224", num_classes=0, **TINY).eval()
    names = {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2", "mlp.fc2": "mlp.w3", "mlp.norm": "mlp.ffn_ln"}
    weights = {re.sub("|".join(names), lambda m: names[m[0]], k): v for k, v in theirs.state_dict().items()}
    (tmp_path / "clip.pt").unlink()
    torch.save({"module": weights}, tmp_path / "eva.pt")
    with torch.no_grad():
        torch.testing.assert_close(
            load(tmp_path, "eva02_base_patch14_224", **TINY).module(X), theirs(X), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("name", ["vit_base_patch16_224", "swin_tiny_patch4_window7_224", "hiera_tiny_224"])
def test_classes_are_counted_in_a_file(name: str, tmp_path: Path) -> None:
    """Somebody's own classifier, trained with timm."""
    args = {"embed_dim": 24, "img_size": 64} | ({"depth": 1} if name.startswith("vit") else {})
    theirs = timm.create_model(name, num_classes=6, **args).eval()
    torch.save({"state_dict": {f"module.{k}": v for k, v in theirs.state_dict().items()}}, tmp_path / "best.pth.tar")
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path, name, **args).module(x), theirs(x), rtol=0, atol=1e-6)


def test_without_an_architecture_it_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "weights.pth")
    for source in (tmp_path, tmp_path / "weights.pth"):
        with pytest.raises(SourceNotFoundError, match=r"has no config.json\. Say which architecture.*--arch NAME"):
            load(source)
    with pytest.raises(
        SourceNotFoundError, match=r"timm knows no architecture 'vit_bas_patch16_224'\. Close names: vit_base"
    ):
        load(tmp_path, "vit_bas_patch16_224")
    for name, arch in (("vit_base_patch16_224.mea", None), (tmp_path, "vit_base_patch16_224.mea")):
        with pytest.raises(SourceNotFoundError, match=r"has no weights tagged 'mea'\. Tags: .*mae"):
            load(name, arch)
    with pytest.raises(SourceNotFoundError, match="Leave --arch out"):
        load("demo", "vit_base_patch16_224")
    torch.save({"b": torch.zeros(1)}, tmp_path / "others.pt")
    with pytest.raises(SourceNotFoundError, match=r"no weights of a usual name\. Name one: others.pt, weights.pth"):
        load(tmp_path, "vit_base_patch16_224")
    with pytest.raises(WeightsError, match=r"do not fit.*Missing key"):
        load(tmp_path / "weights.pth", "vit_base_patch16_224", **TINY)


def test_the_command_line_and_evaluating_again(cli: Run, tmp_path: Path, flat_folder: Path) -> None:
    theirs = timm.create_model("test_vit", num_classes=4, img_size=160)
    torch.save(theirs.state_dict(), tmp_path / "mine.pth")
    args = ["--data", flat_folder, "--distill-steps", 0, "--workers", 0, "--device", "cpu", "-b", 8]
    cli("convert", "mine.pth", "--arch", "test_vit", "--num-samples", 4, *args)
    record = json.loads((tmp_path / "mine-relu" / "report.json").read_text())["source"]
    assert record["arch"] == "test_vit" and len(record["weights_sha256"]) == 64
    assert 'arch = "test_vit"' in (tmp_path / "mine-relu" / "recipe.toml").read_text()
    cli("eval", "mine-relu", "--num-samples", 4, "--workers", 0, "--device", "cpu", "--data", flat_folder)
    assert "--arch NAME" in cli("convert", "mine.pth", *args, code=3).stderr
