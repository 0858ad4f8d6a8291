from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config

from vit2linear import model
from vit2linear.errors import SourceNotFoundError, UnreachableHubError, UnsupportedModelError, WeightsError
from vit2linear.model import LoadedModel
from vit2linear.resolve import layout_of, resolve
from vit2linear.surgery import linearize

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 7,
}
VIT: dict[str, Any] = {**TINY, "intermediate_size": 96}
MODELS: dict[str, Any] = {
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT)),
    "vit-gelu-new": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT, hidden_act="gelu_new", qkv_bias=False)),
    "vit-headless": lambda: tf.ViTModel(tf.ViTConfig(**VIT)),
    "deit": lambda: tf.DeiTForImageClassification(tf.DeiTConfig(**VIT)),
    "deit-two-heads": lambda: tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**VIT)),
    "dinov2": lambda: tf.Dinov2Model(tf.Dinov2Config(**TINY, mlp_ratio=2)),
    "dinov2-swiglu": lambda: tf.Dinov2Model(tf.Dinov2Config(**TINY, mlp_ratio=4, use_swiglu_ffn=True)),
    "dinov2-registers": lambda: tf.Dinov2WithRegistersModel(
        tf.Dinov2WithRegistersConfig(**TINY, mlp_ratio=2, num_register_tokens=3)
    ),
}


def load(folder: Path | str) -> LoadedModel:
    ref = resolve(str(folder))
    return model.load(ref, layout_of(ref).spec(ref))


@pytest.fixture(scope="module", params=MODELS, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    torch.manual_seed(0)
    oracle = MODELS[request.param]().eval()
    for parameter in oracle.parameters():  # init leaves many tensors at zero, where a lost key would not show
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("transformers") / request.param
    oracle.save_pretrained(folder)
    return oracle, folder


def test_equals_transformers_and_softmax_changes_nothing(saved: tuple[Any, Path]) -> None:
    oracle, folder = saved
    loaded = load(folder).module
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    same = linearize(loaded, "softmax").eval()
    with torch.no_grad():
        theirs = oracle(x)
        for mine in (loaded, same):
            if hasattr(theirs, "logits"):
                torch.testing.assert_close(mine(x), theirs.logits, rtol=0, atol=1e-4)
            else:
                torch.testing.assert_close(mine.forward_features(x), theirs.last_hidden_state, rtol=0, atol=1e-4)
        assert (same(x) - loaded(x)).abs().max() <= 1e-5


def test_converts_and_every_layer_has_a_site(saved: tuple[Any, Path]) -> None:
    loaded = load(saved[1]).module
    with torch.no_grad():
        assert linearize(loaded, "relu").eval()(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize(
    ("processor", "model_type"),
    [
        (tf.ViTImageProcessor(size={"height": 32, "width": 32}, resample=2), "vit"),
        (tf.DeiTImageProcessor(size={"height": 36, "width": 36}, crop_size={"height": 32, "width": 32}), "deit"),
        (tf.BitImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}), "dinov2"),
        (tf.ViTImageProcessor(size={"height": 32, "width": 32}, do_normalize=False), "vit"),
    ],
    ids=["vit", "deit", "dinov2", "no-normalize"],
)
def test_preprocessing_equals_the_image_processor(processor: Any, model_type: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS[model_type]().save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert "preprocessor_config.json" in loaded.spec.notes[0]
    rows, columns = np.mgrid[0:60, 0:90]
    smooth = np.stack([127 + 120 * np.sin(rows / 9 + c) * np.cos(columns / 13) for c in range(3)], -1).astype(np.uint8)
    image = Image.fromarray(smooth)
    mine = create_transform(**resolve_model_data_config(loaded.module))(image)
    theirs = processor(image, return_tensors="pt")["pixel_values"][0]
    assert mine.shape == theirs.shape
    assert (mine - theirs).abs().max() < 0.05


def test_weights_of_another_prefix_and_key_style(tmp_path: Path) -> None:
    torch.manual_seed(0)
    MODELS["vit"]().save_pretrained(tmp_path)
    before = load(tmp_path).module.state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    modern = {
        k.replace("encoder.layer.", "layers.")
        .replace("attention.attention.query", "attention.q_proj")
        .replace("attention.attention.key", "attention.k_proj")
        .replace("attention.attention.value", "attention.v_proj")
        .replace("attention.output.dense", "attention.o_proj"): v
        for k, v in weights.items()
    }
    save_file(modern, tmp_path / "model.safetensors")
    after = load(tmp_path).module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_other_size_resizes_positions(checkpoint: Path) -> None:
    from dataclasses import replace

    ref = resolve(str(checkpoint))
    spec = layout_of(ref).spec(ref)
    spec = replace(spec, model_args={**spec.model_args, "img_size": [48, 48]})
    assert model.load(ref, spec).module.pos_embed.shape == (1, 37, 48)


def test_timm_layout_loads_as_timm_does(checkpoint: Path) -> None:
    theirs = timm.create_model(f"local-dir:{checkpoint}", pretrained=True).eval()
    for name in (str(checkpoint), f"local-dir:{checkpoint}"):
        mine = load(name).module
        x = torch.randn(1, 3, 32, 32)
        with torch.no_grad():
            assert torch.equal(mine(x), theirs(x))
        assert "state_dict" not in mine.pretrained_cfg


def broken(checkpoint: Path, folder: Path, **changes: bytes | None) -> Path:
    shutil.copytree(checkpoint, folder)
    for name, content in changes.items():
        path = folder / name.replace("__", ".")
        path.unlink() if content is None else path.write_bytes(content)
    return folder


def test_files_that_are_missing_or_broken(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"has no config.json"):
        load(broken(checkpoint, tmp_path / "a", config__json=None))
    with pytest.raises(UnsupportedModelError, match="is not JSON"):
        load(broken(checkpoint, tmp_path / "b", config__json=b"{nope"))
    with pytest.raises(UnsupportedModelError, match="neither 'architecture' nor 'model_type'"):
        load(broken(checkpoint, tmp_path / "c", config__json=b"{}"))
    with pytest.raises(UnsupportedModelError, match=r"is a 'clap' model.*Supported model types: vit, deit"):
        load(broken(checkpoint, tmp_path / "d", config__json=b'{"model_type": "clap"}'))
    with pytest.raises(UnsupportedModelError, match=r"timm .* does not know"):
        load(broken(checkpoint, tmp_path / "e", config__json=b'{"architecture": "vit_of_the_future"}'))
    with pytest.raises(SourceNotFoundError, match="has no weights"):
        load(broken(checkpoint, tmp_path / "f", model__safetensors=None))
    with pytest.raises(WeightsError, match="cannot be read"):
        load(broken(checkpoint, tmp_path / "g", model__safetensors=b"\x00" * 10))


def test_weights_that_do_not_fit(checkpoint: Path, tmp_path: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    missing = {k: v for k, v in weights.items() if k != "blocks.1.mlp.fc1.weight"}
    folder = broken(checkpoint, tmp_path / "a")
    save_file({**missing, "surprise": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"Missing key.*blocks.1.mlp.fc1.weight.*Unexpected key.*surprise"):
        load(folder)
    save_file({**weights, "norm.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"size mismatch for norm.weight"):
        load(folder)


def test_converted_models_are_no_sources(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["architecture"] = "vit2linear"
    with pytest.raises(UnsupportedModelError, match="already converted"):
        load(broken(checkpoint, tmp_path / "a", config__json=json.dumps(config).encode()))


def test_names_that_are_nothing(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match=r"neither a folder nor a name that timm knows\..*vit_tiny"):
        resolve("vit_tiny_patch16_223")
    with pytest.raises(SourceNotFoundError, match="no folder"):
        resolve(f"local-dir:{tmp_path}/absent")
    with pytest.raises(SourceNotFoundError, match="neither an existing folder nor a valid Hub id"):
        resolve("./no/such/folder")
    with pytest.raises(UnreachableHubError, match="HF_HUB_OFFLINE"):
        resolve("some/model")
