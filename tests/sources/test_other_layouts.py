"""OpenCLIP's layout, and weights as their authors published them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as tf
from safetensors.torch import save_file
from timm.data import resolve_model_data_config

from tests.conftest import Run
from tests.sources.oracles import VIT, ask, make
from vit2linear import model
from vit2linear.errors import SourceNotFoundError, UnsupportedModelError, WeightsError
from vit2linear.model import LoadedModel
from vit2linear.resolve import layout_of, resolve

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
ViT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}


def load(folder: Path | str, arch: str | None = None, **args: Any) -> LoadedModel:
    ref = resolve(str(folder), arch=arch)
    spec = layout_of(ref).spec(ref)
    return model.load(ref, replace(spec, model_args={**spec.model_args, **args}))


def as_open_clip(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A transformers CLIP under OpenAI's names, which OpenCLIP kept."""
    renamed: dict[str, torch.Tensor] = {"logit_scale": torch.ones(()), "token_embedding.weight": torch.zeros(3, 4)}
    for key, tensor in weights.items():
        name = key.replace("vision_model.", "visual.").replace("encoder.layers.", "transformer.resblocks.")
        for old, new in (
            ("embeddings.class_embedding", "class_embedding"),
            ("embeddings.patch_embedding", "conv1"),
            ("embeddings.position_embedding.weight", "positional_embedding"),
            ("pre_layrnorm", "ln_pre"),
            ("post_layernorm", "ln_post"),
            ("layer_norm", "ln_"),
            ("mlp.fc1", "mlp.c_fc"),
            ("mlp.fc2", "mlp.c_proj"),
            ("self_attn.out_proj", "attn.out_proj"),
        ):
            name = name.replace(old, new)
        match = re.fullmatch(r"(.*\.)self_attn\.q_proj\.(weight|bias)", name)
        if match:
            parts = [weights[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            renamed[f"{match[1]}attn.in_proj_{match[2]}"] = torch.cat(parts)
        elif key == "visual_projection.weight":
            renamed["visual.proj"] = tensor.T.contiguous()
        elif "self_attn" not in name and "text" not in name:
            renamed[name] = tensor
    return renamed


@pytest.fixture(params=["open_clip_model.safetensors", "open_clip_pytorch_model.bin"])
def open_clip(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """A tiny CLIP of transformers, and a folder as OpenCLIP would write it."""
    torch.manual_seed(0)
    oracle = make("clip_vision_model-projection")
    weights = as_open_clip(oracle.state_dict())
    path = tmp_path / request.param
    save_file(weights, path) if path.suffix == ".safetensors" else torch.save(weights, path)
    vision = {"image_size": 32, "layers": 2, "width": 48, "patch_size": 8, "head_width": 12, "mlp_ratio": 100 / 48}
    config = {
        "model_cfg": {"embed_dim": 20, "vision_cfg": vision, "text_cfg": {"width": 32}},
        "preprocess_cfg": {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "resize_mode": "squash"},
    }
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    return oracle, tmp_path


def edited(folder: Path, **vision: Any) -> Path:
    path = folder / "open_clip_config.json"
    config = json.loads(path.read_text())
    config["model_cfg"]["vision_cfg"] |= vision
    path.write_text(json.dumps(config))
    return folder


def test_own_towers_of_open_clip(open_clip: tuple[Any, Path]) -> None:
    oracle, folder = open_clip
    loaded = load(folder)
    with torch.no_grad():
        assert (loaded.module(X) - oracle(X).image_embeds).abs().max() <= 1e-4
    cfg = resolve_model_data_config(loaded.module)
    assert cfg["input_size"] == (3, 32, 32) and cfg["crop_mode"] == "squash" and cfg["mean"] == (0.1, 0.2, 0.3)
    assert "the 20 outputs are the projection" in loaded.spec.notes[0]


def test_quick_gelu_of_open_clip(tmp_path: Path) -> None:
    oracle = tf.CLIPVisionModelWithProjection(tf.CLIPVisionConfig(**VIT, projection_dim=20)).eval()
    save_file(as_open_clip(oracle.state_dict()), tmp_path / "open_clip_model.safetensors")
    vision = {"image_size": 32, "layers": 2, "width": 48, "patch_size": 8, "head_width": 12, "mlp_ratio": 100 / 48}
    config = {"model_cfg": {"embed_dim": 20, "vision_cfg": vision, "quick_gelu": True}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert (load(tmp_path).module(X) - oracle(X).image_embeds).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("vision", "message"),
    [
        ({"layers": [3, 4, 6, 3]}, "is a ResNet"),
        ({"attentional_pool": True}, "attentional_pool = True, which timm's CLIP models have not"),
        ({"pool_type": "avg"}, "pool_type = 'avg'"),
        ({"timm_model_name": "vit_of_the_future"}, "which timm does not know"),
        ({"timm_model_name": "vit_base_patch16_siglip_224", "timm_proj": "mlp"}, "timm_proj = 'mlp'"),
    ],
)
def test_other_towers_are_refused(vision: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {"model_cfg": {"embed_dim": 20, "vision_cfg": {}}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=message):
        load(edited(tmp_path, **vision))


@pytest.mark.parametrize(
    ("name", "pool", "projection", "args"),
    [
        ("vit_base_patch16_siglip_224", "map", "none", ViT),
        ("vit_base_patch16_siglip_224", "map", "linear", ViT),
        ("vit_base_patch16_clip_224", "token", None, ViT),
        ("eva02_base_patch16_clip_224", "token", None, ViT),
    ],
)
def test_timm_towers_of_open_clip(name: str, pool: str, projection: str | None, args: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trunk = timm.create_model(name, num_classes=20 if projection is None else 0, global_pool=pool, **args).eval()
    weights = {f"visual.trunk.{k}": v for k, v in trunk.state_dict().items()} | {"logit_scale": torch.ones(())}
    extra = torch.randn(20, 48)
    if projection == "linear":
        weights["visual.head.proj.weight"] = extra
    save_file(weights, tmp_path / "open_clip_model.safetensors")
    vision = {"timm_model_name": name, "timm_pool": pool, "timm_proj": projection, "image_size": 32}
    config = {"model_cfg": {"embed_dim": 20, "vision_cfg": vision}, "preprocess_cfg": {}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with torch.no_grad():
        truth = trunk(X) @ extra.T if projection == "linear" else trunk(X)
        assert torch.allclose(load(tmp_path, **args).module(X), truth, atol=1e-6)


def test_config_json_is_preferred_over_open_clips(open_clip: tuple[Any, Path]) -> None:
    oracle, folder = open_clip
    oracle.save_pretrained(folder)
    assert load(folder).spec.model_args["norm_eps"] == 1e-5 and "act_layer" in load(folder).spec.model_args
    assert load(folder).spec.pretrained_cfg["mean"][0] == 0.48145466


def test_original_dinov2_with_registers(tmp_path: Path) -> None:
    """Meta's names and mask token, in a file alone."""
    name, args = "vit_small_patch14_reg4_dinov2", {**ViT, "init_values": 1.0}
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
    name, args = "vit_small_patch16_dinov3_qkvb", {**ViT, "num_reg_tokens": 3}
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
    args = {**ViT, "mlp_ratio": 100 / 48}
    with torch.no_grad():
        mine = load(tmp_path, "vit_base_patch16_clip_224.openai", **args).module
        assert (
            mine.num_classes == 20
            and (mine(X) - ask("clip_vision_model-projection", oracle, X).outputs).abs().max() <= 1e-4
        )
    theirs = timm.create_model("eva02_base_patch14_224", num_classes=0, **ViT).eval()
    names = {"mlp.fc1_g": "mlp.w1", "mlp.fc1_x": "mlp.w2", "mlp.fc2": "mlp.w3", "mlp.norm": "mlp.ffn_ln"}
    weights = {re.sub("|".join(names), lambda m: names[m[0]], k): v for k, v in theirs.state_dict().items()}
    (tmp_path / "clip.pt").unlink()
    torch.save({"module": weights}, tmp_path / "eva.pt")
    with torch.no_grad():
        torch.testing.assert_close(
            load(tmp_path, "eva02_base_patch14_224", **ViT).module(X), theirs(X), rtol=0, atol=1e-6
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
    with pytest.raises(SourceNotFoundError, match="Leave --arch out"):
        load("demo", "vit_base_patch16_224")
    torch.save({"b": torch.zeros(1)}, tmp_path / "others.pt")
    with pytest.raises(SourceNotFoundError, match=r"no weights of a usual name\. Name one: others.pt, weights.pth"):
        load(tmp_path, "vit_base_patch16_224")
    with pytest.raises(WeightsError, match=r"do not fit.*Missing key"):
        load(tmp_path / "weights.pth", "vit_base_patch16_224", **ViT)


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
