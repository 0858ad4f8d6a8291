"""What other people's scripts do with a converted model: LoRA with peft, and timm's ways to its features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F

from tests import families
from tests.coverage import tensors
from vit2linear import linearize
from vit2linear.model import input_size
from vit2linear.site import sites_of

CASES = [
    pytest.param(*families.cases(module)[i], id=f"{module}-{i}")
    for module, i in [("vision_transformer", 0), ("vision_transformer", 1), ("swin_transformer", 0), ("eva", 0)]
] + [
    pytest.param(*families.cases(module)[0], id=module, marks=pytest.mark.slow)
    for module in families.MODULES
    if module not in ("vision_transformer", "swin_transformer", "eva")
]


def test_lora(tmp_path: Path) -> None:
    args = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    base = linearize(families.build("vit_tiny_patch16_224", **args), "relu").eval()
    before = {key: value.clone() for key, value in base.state_dict().items()}
    images, labels = torch.randn(8, 3, 32, 32), torch.arange(8) % 5
    wanted = base(images).detach()
    targets = r".*\.attn\.(qkv|proj)"  # a bare "proj" is the patch embedding's convolution as well
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=targets))
    torch.testing.assert_close(model(images), wanted)  # an adapter starts inert
    adapters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 2 * 2 and all("lora_" in name and ".attn." in name for name in adapters)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = [step(model, optimizer, images, labels) for _ in range(2)]
    assert losses[1] < losses[0]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in adapters)
        assert name not in adapters or not torch.equal(parameter, adapters[name]), f"{name} was trained"
    for key, value in base.state_dict().items():
        if "lora_" not in key:
            assert torch.equal(value, before[key.replace(".base_layer", "")]), f"{key} is the base's"
    model.save_pretrained(tmp_path / "adapter")
    again = linearize(families.build("vit_tiny_patch16_224", **args), "relu").eval()
    reloaded = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    with torch.no_grad():
        trained = model(images)
        assert torch.equal(reloaded(images), trained) and (trained - wanted).abs().max() > 1e-3
        torch.testing.assert_close(reloaded.merge_and_unload()(images), trained)
    assert len(sites_of(again)) == 2


def test_lora_reaches_a_rotary_site() -> None:
    """timm's own EVA attention calls qkv where its biases are none, so does the site."""
    name, args = next(case for case in families.cases("eva") if case[0] == "vit_small_patch16_dinov3")
    base = linearize(families.build(name, **args), "relu").eval()
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=r".*\.attn\.(qkv|proj)"))
    model(torch.randn(1, *input_size(base))).sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    loss = F.cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize(("name", "args"), CASES)
def test_features_are_where_they_were(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    source = families.build(name, **args)
    save_for_hf(source, str(tmp_path / "source"), safe_serialization=True)
    wanted = ways_to_features(source, tmp_path / "source")
    for op in ("softmax", "relu"):
        student = linearize(source, op, drop="all" if op == "relu" else ()).eval()
        save_for_hf(student, str(tmp_path / op), safe_serialization=True)
        found = ways_to_features(student, tmp_path / op)
        assert found.keys() == wanted.keys()
        for way, features in wanted.items():
            assert [t.shape for t in found[way]] == [t.shape for t in features] and features, way
            same = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(found[way], features, strict=True)]
            assert all(same) if op == "softmax" else not all(same), way


def ways_to_features(model: Any, folder: Path) -> dict[str, list[Tensor]]:
    """Every way that timm offers, of the model or of the folder that it was saved to."""
    pixels = torch.randn(2, *input_size(model), generator=torch.Generator().manual_seed(1))
    found = {}
    with torch.no_grad():
        features = model.forward_features(pixels)
        found["forward_features"] = tensors(features)
        found["forward_head"] = tensors(model.forward_head(features, pre_logits=True))
        if hasattr(model, "forward_intermediates"):
            found["forward_intermediates"] = tensors(model.forward_intermediates(pixels))
            found["the last"] = tensors(model.forward_intermediates(pixels, indices=1, intermediates_only=True))
            options = {"features_only": True, "out_indices": (0, 1)}
            backbone = timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()
            found["features_only"] = tensors(backbone(pixels))
            channels = zip(found["features_only"], backbone.feature_info.channels(), strict=True)
            assert all(width in t.shape for t, width in channels)
    return found
