from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.sources.oracles import MODELS, ask, make
from tests.test_sources import load
from vit2linear.surgery import linearize

BAR = 1e-4


@pytest.fixture(scope="module", params=MODELS, ids=str)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    model = make(request.param)
    folder = tmp_path_factory.mktemp("transformers") / request.param
    model.save_pretrained(folder)
    return request.param, model, folder


def difference(name: str, oracle: Any, folder: Path) -> dict[str, float]:
    mine: Any = load(folder).module
    size = mine.pretrained_cfg["input_size"]
    pixels = torch.randn(2, *size, generator=torch.Generator().manual_seed(2))
    said = ask(name, oracle, pixels)
    with torch.no_grad():
        tokens = mine.forward_features(pixels)
        pooled, outputs = mine.forward_head(tokens, pre_logits=True), mine(pixels)
    flat = tokens.flatten(1, 2) if tokens.ndim == 4 else tokens
    if "backbone" in name:
        flat = flat[:, mine.num_prefix_tokens :]
    found = {"tokens": (flat, said.tokens), "pooled": (pooled, said.pooled), "outputs": (outputs, said.outputs)}
    if said.outputs is None:
        assert mine.num_classes == 0
    gaps = {}
    for key, (a, b) in found.items():
        if b is not None:
            assert a.shape == b.shape, (key, a.shape, b.shape)
            gaps[key] = float((a - b).abs().max())
    return gaps


def test_equals_transformers(case: tuple[str, Any, Path]) -> None:
    gaps = difference(*case)
    print(f"{case[0]}: {', '.join(f'{k} {v:.1e}' for k, v in gaps.items())}")
    assert max(gaps.values()) <= BAR


def test_equals_transformers_under_its_new_names(case: tuple[str, Any, Path], tmp_path: Path) -> None:
    name, oracle, _ = case
    oracle.save_pretrained(tmp_path, save_original_format=False)
    assert max(difference(name, oracle, tmp_path).values()) <= BAR


def test_every_one_converts(case: tuple[str, Any, Path]) -> None:
    module = load(case[2]).module
    pixels = torch.randn(1, *module.pretrained_cfg["input_size"])  # type: ignore[misc, index]
    with torch.no_grad():
        assert (linearize(module, "softmax").eval()(pixels) - module(pixels)).abs().max() <= 1e-5
        assert linearize(module, "relu", drop="all").eval()(pixels).isfinite().all()
