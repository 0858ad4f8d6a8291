"""Defaults of ``config.json``, variants that are refused, names of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from tests.sources.oracles import make
from tests.test_sources import load
from vit2linear.errors import UnsupportedModelError, WeightsError
from vit2linear.resolve import layout_of, resolve
from vit2linear.sources._transformers import family_of, model_types


@pytest.mark.parametrize("model_type", model_types())
def test_defaults_are_those_of_the_library(model_type: str, tmp_path: Path) -> None:
    config = tf.AutoConfig.for_model(model_type)
    theirs = json.loads(json.dumps(getattr(config, "vision_config", config).to_dict()))
    mine = family_of("x", {"model_type": model_type}).values
    shared = [key for key in mine if key in theirs and key != "model_type"]
    assert len(shared) >= 7 and {key: mine[key] for key in shared} == {key: theirs[key] for key in shared}
    config.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ref = resolve(str(tmp_path))
    assert layout_of(ref).spec(ref).pretrained_cfg["num_classes"] in (0, 512)


def changed(name: str, folder: Path, **values: Any) -> Path:
    """A saved model whose config was edited."""
    make(name).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("vit", {"hidden_act": "mish"}, r"the activation is 'mish'\. Supported: gelu, quick_gelu"),
        ("swin", {"hidden_act": "relu"}, r"the activation is 'relu'\. Supported: gelu\."),
        ("dinov3_vit-gated", {"hidden_act": "gelu"}, r"the activation is 'gelu'\. Supported: silu, swish\."),
        ("vit", {"patch_size": [8, 4]}, r"patch_size is \[8, 4\]\. Square ones"),
        ("vit", {"id2label": {"3": "x"}}, "does not number its classes from 0"),
        ("swin", {"use_absolute_embeddings": True}, "absolute positions"),
        ("beit-masked", {"use_mean_pooling": False}, "second final norm"),
        ("hiera", {"num_heads": [1, 2, 3, 4]}, "do not grow by a constant factor"),
        ("hiera", {"masked_unit_attention": [False, True, False, False]}, "mask units after a stage"),
    ],
)
def test_variants_that_the_twin_cannot_be(name: str, values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load(changed(name, tmp_path, **values))


def test_a_key_bias_is_zero_or_refused(tmp_path: Path) -> None:
    make("dinov3_vit").save_pretrained(tmp_path)
    before = load(tmp_path).module.state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    weights["layer.1.attention.k_proj.bias"] = torch.zeros(48)
    save_file(weights, tmp_path / "model.safetensors")
    after = load(tmp_path).module.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)
    weights["layer.1.attention.k_proj.bias"] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"a key bias in 'blocks.1.attn.qkv.bias' that is not zero"):
        load(tmp_path)


def test_the_epsilon_is_carried_to_every_norm(tmp_path: Path) -> None:
    for name, key in (("siglip_vision_model", "layer_norm_eps"), ("aimv2_vision_model", "rms_norm_eps")):
        module = load(changed(name, tmp_path / name, **{key: 0.125})).module
        norms = [norm.eps for norm in module.modules() if hasattr(norm, "eps")]
        assert len(norms) >= 6 and set(norms) == {0.125}


def test_projections_are_no_classes(tmp_path: Path) -> None:
    make("clip").save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.module.num_classes == 20 and "label_names" not in loaded.spec.pretrained_cfg
    assert "the 20 outputs are the projection" in loaded.spec.notes[1]


def test_names_of_classes_are_kept(tmp_path: Path) -> None:
    names = {i: f"class {i}" for i in range(7)}
    for name in ("dinov2", "clip-classes", "swin"):
        loaded = load(changed(name, tmp_path / name, id2label=names))
        assert loaded.spec.pretrained_cfg["label_names"] == list(names.values())
