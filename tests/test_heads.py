"""Fine-tuned heads of transformers that survive conversion, saving, and whatever timm asks of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models import save_for_hf

from tests.sources.oracles import ask, make
from tests.test_artifact import recipe
from tests.test_sources import load
from vit2linear import convert
from vit2linear.errors import UnsupportedModelError
from vit2linear.heads import HEADS
from vit2linear.surgery import linearize

NAMES = {
    "dinov2": 2,
    "dinov2_with_registers": 2,
    "clip-classes": 1,
    "siglip-classes": 1,
    "aimv2_vision_model": 1,
}
"""Model to the width of its pooled feature, in widths of the model."""


@pytest.fixture(scope="module", params=NAMES, ids=str)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A model, and a folder of timm's that was written from it."""
    model = make(request.param)
    root = tmp_path_factory.mktemp("heads")
    model.save_pretrained(root / "source")
    save_for_hf(load(root / "source").module, root / "saved", safe_serialization=True)
    return request.param, model, root / "saved"


def test_reloads_with_timm(saved: tuple[str, Any, Path]) -> None:
    name, oracle, folder = saved
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    said = ask(name, oracle, x)
    model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        outputs = model(x)
        pooled = model.forward_head(model.forward_features(x), pre_logits=True)
    truth = said.outputs if said.outputs is not None else said.pooled
    assert truth is not None
    torch.testing.assert_close(outputs, truth, rtol=0, atol=1e-4)
    assert pooled.shape == (2, 48 * NAMES[name]) and pooled.shape[1] == model.head_hidden_size
    with torch.no_grad():
        assert torch.equal(timm.create_model(f"local-dir:{folder}", pretrained=True, num_classes=0).eval()(x), pooled)


def test_other_heads_and_inputs(saved: tuple[str, Any, Path]) -> None:
    folder = f"local-dir:{saved[2]}"
    model: Any = timm.create_model(folder, pretrained=True, num_classes=5, in_chans=1, img_size=48).eval()
    assert model(torch.randn(2, 1, 48, 48)).shape == (2, 5)
    model.reset_classifier(3)
    assert model(torch.randn(2, 1, 48, 48)).shape == (2, 3)
    model.reset_classifier(4, "avg")
    assert model(torch.randn(2, 1, 48, 48)).shape == (2, 4)
    features = timm.create_model(folder, pretrained=True, features_only=True, out_indices=[0, 1])
    assert [f.shape for f in features(torch.randn(2, 3, 32, 32))] == [(2, 48, 4, 4)] * 2


@pytest.mark.parametrize("name", ["dinov2", "aimv2_vision_model"])
def test_converted_artifacts_carry_them(name: str, class_folders: Path, tmp_path: Path) -> None:
    make(name).save_pretrained(tmp_path / "source")
    done = convert(recipe(tmp_path / "source", class_folders, tmp_path / "out"), ignore_labels=True)
    assert done.model_args["head"] in HEADS
    model: Any = done.model()
    assert type(model) is HEADS[done.model_args["head"]]
    assert ("head.weight" if model.num_classes else "attn_pool.query") in done.report["audit"]["trained"]


def test_linearize_keeps_the_head(tmp_path: Path) -> None:
    make("dinov2").save_pretrained(tmp_path)
    loaded: Any = load(tmp_path).module
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(linearize(loaded, "softmax").eval()(x), loaded(x), rtol=0, atol=1e-5)


def test_unknown_heads_are_refused() -> None:
    for args in ({"base": "test_vit", "head": "of_the_future"}, {"base": "beit_base_patch16_224", "head": "cls_mean"}):
        with pytest.raises(UnsupportedModelError, match=r"'head' is .*Known for VisionTransformer: cls_mean, aimv2"):
            timm.create_model("vit2linear", operators={}, **args)
