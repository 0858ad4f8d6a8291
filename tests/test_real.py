"""On real weights and photographs; figures are printed (``pytest -rP -m real``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor

from tests.conftest import Run
from tests.test_sources import load
from vit2linear import linearize
from vit2linear.resolve import DEMO_FOLDER


def test_softmax_changes_nothing_on_the_demo() -> None:
    demo = load(DEMO_FOLDER).module
    x = torch.randn(16, 1, 28, 28)
    with torch.no_grad():
        difference = float((linearize(demo, "softmax").eval()(x) - demo(x)).abs().max())
    print(f"demo, softmax identity: largest difference {difference:.1e}")
    assert difference <= 1e-5


@pytest.mark.real
def test_softmax_changes_nothing_on_dinov2_and_it_equals_transformers(real: Path) -> None:
    import transformers

    folder = real / "dinov2-small-saliency"
    loaded = load(folder).module
    same = linearize(loaded, "softmax").eval()
    transform = create_transform(**resolve_model_data_config(loaded))
    photos = sorted((real / "photos").iterdir())[:4]
    pixels: Tensor = torch.stack([transform(Image.open(p).convert("RGB")) for p in photos])
    oracle = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        identity = float((same(pixels) - loaded(pixels)).abs().max())
        # At the native size only: the two libraries resize position embeddings differently.
        x = torch.nn.functional.interpolate(pixels[:1], (518, 518), mode="bicubic")
        native = native_size(folder)
        difference = float((native.forward_features(x) - oracle(x).last_hidden_state).abs().max())  # type: ignore[operator]
        converted = float(
            (linearize(native, "softmax").eval().forward_features(x) - oracle(x).last_hidden_state).abs().max()
        )  # type: ignore[operator]
    print(f"dinov2, 224 px, softmax identity: largest difference {identity:.1e}")
    print(f"dinov2, 518 px, against transformers: {difference:.1e}, with softmax sites {converted:.1e}")
    assert identity <= 1e-5 and difference <= 1e-4 and converted <= 1e-4


def native_size(folder: Path) -> torch.nn.Module:
    from dataclasses import replace

    from vit2linear import model
    from vit2linear.resolve import layout_of, resolve

    ref = resolve(str(folder))
    spec = layout_of(ref).spec(ref)
    return model.load(ref, replace(spec, model_args={**spec.model_args, "img_size": [518, 518]})).module


@pytest.mark.real
@pytest.mark.slow
def test_a_short_distillation_brings_dinov2_back(real: Path, cli: Run) -> None:
    """relu at 98 px on the photographs, judged on CIFAR-10: before, after 0 steps, after 120 steps."""
    args = ["--op", "relu", "--data", real / "photos", "--img-size", 98, "-b", 32]
    scores = {}
    for steps in (0, 120):
        cli("convert", real / "dinov2-small-saliency", *args, "--distill-steps", steps, "-o", f"steps-{steps}")
        done = cli("eval", f"steps-{steps}", "--data", real / "cifar10", "--num-samples", 300, "--json")
        scores[steps] = json.loads(done.stdout)
    for steps, report in scores.items():
        print(
            f"{steps} steps: CIFAR-10 10-NN {report['student']['knn']:.1f}% (teacher {report['teacher']['knn']:.1f}%), "
            f"feature cosine {report['feature_cosine']:.3f}, neighbours shared {report['neighbour_agreement']:.1f}%"
        )
    before, after = scores[0], scores[120]
    assert after["feature_cosine"] > before["feature_cosine"] + 0.05
    assert after["student"]["knn"] > before["student"]["knn"]
    assert after["student"]["knn"] > 0.8 * after["teacher"]["knn"]
