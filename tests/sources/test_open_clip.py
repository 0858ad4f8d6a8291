"""OpenCLIP's layout, against CLIP models of transformers under OpenCLIP's names, and timm models as towers."""

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

from tests.sources.oracles import VIT, make
from vit2linear import model
from vit2linear.errors import UnsupportedModelError
from vit2linear.model import LoadedModel
from vit2linear.resolve import layout_of, resolve

X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}


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
        ("vit_base_patch16_siglip_224", "map", "none", TINY),
        ("vit_base_patch16_siglip_224", "map", "linear", TINY),
        ("vit_base_patch16_clip_224", "token", None, TINY),
        ("eva02_base_patch16_clip_224", "token", None, TINY),
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
