from __future__ import annotations

import copy
from typing import Any

import jaxtyping
import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

from tests.families import build
from vit2linear import linearize
from vit2linear.audit import audit, softmax_modules
from vit2linear.errors import RecipeError, SurgeryError, UnknownNameError
from vit2linear.plan import make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import OPERATORS, Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

SMALL: dict[str, Any] = {"embed_dim": 48, "num_heads": 3, "depth": 4}


def pixels(model: nn.Module) -> torch.Tensor:
    return torch.randn(2, *example_pixels(model).shape[1:], generator=torch.Generator().manual_seed(1))


def test_gated_attention_is_carried() -> None:
    from timm.layers import Attention

    from vit2linear.context import AttentionContext, GridRef
    from vit2linear.ops.softmax import SoftmaxAttention
    from vit2linear.site import LinearAttention
    from vit2linear.sites.attention import AttentionSite

    torch.manual_seed(0)
    module = Attention(24, num_heads=3, qkv_bias=True, gated=True, scale_norm=True, norm_layer=nn.LayerNorm).eval()
    kind = AttentionSite()
    site = LinearAttention(module, kind, SoftmaxAttention(kind.geometry(module), None), GridRef())
    x = torch.randn(2, 7, 24)
    torch.testing.assert_close(site(x), module(x))
    assert isinstance(AttentionContext(x).x, torch.Tensor)


def test_masks() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, **SMALL)
    x = pixels(model)
    keep = torch.ones(2, 1, 1, 17, dtype=torch.bool)
    keep[..., 5:9] = False
    bias = torch.randn(1, 3, 17, 17)
    same, relu = linearize(model, "softmax").eval(), linearize(model, "relu").eval()
    with torch.no_grad():
        for mask in (keep, bias, bias > 0):
            torch.testing.assert_close(same(x, attn_mask=mask), model(x, attn_mask=mask))
        assert relu(x, attn_mask=keep).isfinite().all()
        with pytest.raises(SurgeryError, match="which cannot carry it"):
            relu(x, attn_mask=bias)
        with pytest.raises(SurgeryError, match="causal"):
            relu(x, is_causal=True)


def test_counter_ignores_attention_pooling_and_feature_softmax() -> None:
    model = build("vit_base_patch16_siglip_224", img_size=64, **SMALL)
    wanted = {f"blocks.{i}.attn" for i in range(4)}
    assert softmax_modules(model) == wanted
    assert not softmax_modules(linearize(model, "relu")) and not softmax_modules(linearize(model, "efficient"))
    assert softmax_modules(linearize(model, "softmax")) == {f"{path}.op" for path in wanted}
    manual = build("vit_tiny_patch16_224", img_size=64, **SMALL)
    for block in manual.blocks:
        block.attn.fused_attn = False
    assert softmax_modules(manual) == wanted


def test_rules_are_matched_in_order_and_keep_keeps() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, **SMALL)
    plan = make_plan(model, [Rule(sites="blocks.[01].attn", op="keep"), Rule(sites="blocks.2.*", op="elu"), Rule()])
    assert [s.op for s in plan.sites] == ["keep", "keep", "elu", "relu"]
    student = apply_plan(model, plan)
    assert audit(model.state_dict(), student, plan, trained=False).softmax_left == 2
    assert set(sites_of(student)) == {"blocks.2.attn", "blocks.3.attn"}


@pytest.mark.parametrize(
    ("rules", "error", "text"),
    [
        ([Rule(sites="blocks.9.*")], RecipeError, "no site is left for the rule 'blocks.9"),
        ([Rule(), Rule(sites="blocks.0.*")], RecipeError, "convert.1: no site is left"),
        ([Rule(options={"dim": 3})], RecipeError, "operator 'relu': dim: unknown key; allowed here: nothing"),
    ],
)
def test_bad_rules(rules: list[Rule], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make_plan(build("vit_tiny_patch16_224", img_size=64, **SMALL), rules)


def test_what_cannot_be_converted() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, **SMALL)
    with pytest.raises(UnknownNameError, match="Did you mean 'relu'"):
        linearize(model, "relu6")
    with pytest.raises(SurgeryError, match="converted already"):
        linearize(linearize(model, "relu"), "elu")
    with pytest.raises(SurgeryError, match="no softmax attention"):
        linearize(timm.create_model("test_resnet"), "relu")


def test_audit_finds_what_went_wrong() -> None:
    model = build("vit_tiny_patch16_224", img_size=64, **SMALL)
    plan = make_plan(model, [Rule()])
    source = model.state_dict()
    changed = apply_plan(model, plan)
    changed.blocks[0].mlp.fc1.weight.data.add_(1)
    with pytest.raises(SurgeryError, match=r"nothing was trained, yet .*blocks.0.mlp.fc1.weight"):
        audit(source, changed, plan, trained=False)
    assert audit(source, changed, plan, trained=True).trained == ("blocks.0.mlp.fc1.weight",)
    with pytest.raises(SurgeryError, match="weights of the source are missing: extra"):
        audit({**source, "extra": torch.zeros(1)}, changed, plan, trained=True)
    half = apply_plan(model, make_plan(model, [Rule(sites="blocks.[012].*")]))
    with pytest.raises(SurgeryError, match=r"softmax over pairs of tokens ran in blocks\.3\.attn"):
        audit(source, half, plan, trained=False)
    keeping = make_plan(model, [Rule(op="keep", sites="blocks.3.*"), Rule()])
    with pytest.raises(SurgeryError, match=r"no softmax over pairs of tokens ran in blocks\.3\.attn"):
        audit(source, apply_plan(model, plan), keeping, trained=False)
    changed.head_extra = nn.Linear(2, 2)
    with pytest.raises(SurgeryError, match="new weights outside the operators"):
        audit(source, changed, plan, trained=True)


def test_copies_are_independent() -> None:
    """The grid reference and its hook are copied together, so a copy never reads another model's grid."""
    model = linearize(build("vit_tiny_patch16_224", img_size=64, dynamic_img_size=True, **SMALL), "relu").eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model(torch.randn(1, 3, 64, 64))
        twin(torch.randn(1, 3, 32, 96))
    assert sites_of(model)["blocks.0.attn"].grid_ref.grid == (4, 4)
    assert sites_of(twin)["blocks.0.attn"].grid_ref.grid == (2, 6)


def test_shapes_are_checked_under_test() -> None:
    from vit2linear.losses import Outputs

    with pytest.raises(jaxtyping.TypeCheckError):
        OPERATORS.get("relu").features(None, torch.zeros(1, 2, 3, 4), torch.zeros(2, 3), None)  # type: ignore[arg-type]
    assert Outputs().tokens == () and F is not None
