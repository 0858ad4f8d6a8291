"""Hierarchical models: queries and keys that are different tokens, and windows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import families
from vit2linear import linearize
from vit2linear.audit import audit, softmax_modules
from vit2linear.context import AttentionContext
from vit2linear.distill.forward import run
from vit2linear.errors import SurgeryError
from vit2linear.plan import find_sites, make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import OPERATORS, Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

MODULES = ["davit", "hiera", "mvitv2", "pvt_v2", "twins"]
POOLED = {"hiera": "pooled-queries", "mvitv2": "pooled-", "pvt_v2": "pooled-keys", "twins": "pooled-keys"}


def first(module: str) -> nn.Module:
    name, args = families.cases(module)[0]
    return families.build(name, **args)


def pixels(model: nn.Module) -> Tensor:
    return torch.randn(2, *example_pixels(model).shape[1:], generator=torch.Generator().manual_seed(2))


def observed(model: nn.Module) -> dict[str, tuple[Tensor, AttentionContext]]:
    """For every site of one forward, the tokens that its block's norm gave it, and what its operator was told."""
    tokens: dict[str, Tensor] = {}
    told: dict[str, AttentionContext] = {}

    def watch(path: str) -> None:
        block, site = path.removesuffix(".attn"), model.get_submodule(path)
        model.get_submodule(f"{block}.norm1").register_forward_hook(lambda _, args, out: tokens.update({path: out}))
        site.op.register_forward_pre_hook(lambda _, args: told.update({path: args[3]}))

    for path in sites_of(model):
        watch(path)
    with torch.no_grad():
        model(pixels(model))
    return {path: (tokens[path], ctx) for path, ctx in told.items()}


@pytest.mark.parametrize("module", POOLED)
def test_operators_that_need_one_set_of_tokens_are_refused(module: str) -> None:
    model = first(module)
    for name in OPERATORS.names():
        if "pooling" not in OPERATORS.get(name).carries:
            with pytest.raises(SurgeryError, match=POOLED[module]) as refusal:
                linearize(model, name, drop="all")
            assert "relu" in str(refusal.value) and "--drop" not in str(refusal.value)
    with pytest.raises(SurgeryError, match=rf"'inline' cannot carry .*{POOLED[module]}"):
        linearize(model, "inline", options={"dyn3": True}, drop="all")
    linearize(model, "inline", drop="all")


@pytest.mark.parametrize("module", POOLED)
def test_local_is_refused_where_tokens_are_pooled(module: str) -> None:
    model = first(module)
    with pytest.raises(SurgeryError, match=rf"local convolves .*{POOLED[module]}"):
        linearize(model, "relu", local="dwc3", drop="all")
    rules = []
    for site in find_sites(model):
        try:
            make_plan(model, [Rule(sites=site.path, local="dwc3", drop=("all",))])
            rules.append(Rule(sites=site.path, local="dwc3", drop=("all",)))
        except SurgeryError:
            rules.append(Rule(sites=site.path, drop=("all",)))
    assert 0 < sum(rule.local != "none" for rule in rules) < len(rules)
    plan = make_plan(model, rules)
    with torch.no_grad():
        mixed = apply_plan(model, plan).eval()(pixels(model))
        torch.testing.assert_close(mixed, linearize(model, "relu", drop="all").eval()(pixels(model)))


@pytest.mark.parametrize("module", MODULES)
def test_softmax_does_not_see_centred_keys(module: str) -> None:
    model = first(module)
    x = pixels(model)
    with torch.no_grad():
        centred = linearize(model, "softmax", center_keys=True).eval()(x)
        torch.testing.assert_close(centred, model(x), rtol=1e-4, atol=1e-4)
        assert linearize(model, "relu", center_keys=True, drop="all").eval()(x).isfinite().all()


@pytest.mark.parametrize("module", MODULES)
def test_features_come_as_tokens(module: str) -> None:
    model = first(module)
    student = linearize(model, "relu", drop="all").eval()
    with torch.no_grad():
        outputs = run(student, pixels(model), sites_of(student))
    assert outputs.pooled is not None and outputs.logits is not None
    (tokens,) = outputs.tokens
    assert tokens.ndim == 3 and tokens.shape[-1] == model.num_features
    assert outputs.pooled.shape == (2, model.num_features) and outputs.logits.shape == (2, 1000)


@pytest.mark.parametrize("module", MODULES)
def test_kept_softmaxes_are_counted_and_those_over_channels_are_not(module: str) -> None:
    model = first(module)
    paths = [site.path for site in find_sites(model)]
    assert softmax_modules(model) == set(paths)
    plan = make_plan(model, [Rule(sites=paths[0], op="keep"), Rule(sites=paths[1], op="softmax"), Rule(drop=("all",))])
    student = apply_plan(model, plan)
    assert audit(model.state_dict(), student, plan, trained=False).softmax_left == 2
    everything = make_plan(model, [Rule(drop=("all",))])
    with pytest.raises(SurgeryError, match=f"softmax over pairs of tokens ran in {paths[0]}, {paths[1]}.op"):
        audit(model.state_dict(), student, everything, trained=False)


def widened(model: nn.Module) -> nn.Module:
    """The source, made to attend globally by its own options, which wide enough windows amount to."""
    wide = copy.deepcopy(model)
    for module in wide.modules():
        if hasattr(module, "use_mask_unit_attn"):
            module.use_mask_unit_attn = False
        if hasattr(module, "ws"):
            module.ws = None
        if hasattr(module, "window_size") and hasattr(module, "cpe1"):
            module.cpe1.register_forward_hook(lambda _, args, out, block=module: _widen(block, args[0]))
    return wide


def _widen(block: Any, image: Tensor) -> None:
    block.window_size = block.attn.window_size = tuple(image.shape[-2:])


@pytest.mark.parametrize("module", ["davit", "hiera"])
def test_global_windows_equal_the_source_with_windows_as_large_as_the_map(module: str) -> None:
    for name, args in families.cases(module):
        model = families.build(name, **args)
        x = pixels(model)
        with torch.no_grad():
            wanted, inside = widened(model)(x), model(x)
            found = linearize(model, "softmax", global_windows=True).eval()(x)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
            assert (wanted - inside).abs().max() > 1e-2


def test_global_windows_of_twins_equal_attention_over_the_map() -> None:
    model = first("twins")
    source = model.blocks[0][0].attn
    site = sites_of(linearize(model, "softmax", global_windows=True).eval())["blocks.0.0.attn"]
    x = torch.randn(2, 40, 16)
    q, k, v = source.qkv(x).unflatten(-1, (3, 1, 16)).permute(2, 0, 3, 1, 4)
    with torch.no_grad():
        wanted = source.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        torch.testing.assert_close(site(x, (5, 8)), wanted)
        assert (source(x, (5, 8)) - wanted).abs().max() > 1e-2


@pytest.mark.parametrize("module", ["davit", "twins", "hiera"])
def test_tokens_lie_row_by_row(module: str) -> None:
    """On the whole map and inside windows; Hiera's own ``reroll`` tells where its tokens belong."""
    for name, args in families.cases(module):
        model = families.build(name, **args)
        windows = {s.path: s.window for s in find_sites(model)}

        def rows(path: str, tokens: Tensor, grid: tuple[int, int], model: nn.Module = model) -> Tensor:
            rolled = hasattr(model, "reroll")
            return model.reroll(tokens, int(path.split(".")[1])) if rolled else tokens.unflatten(1, grid)

        grids: dict[str, tuple[int, int]] = {}
        everywhere = observed(linearize(model, "softmax", global_windows=True).eval())
        for path, (tokens, ctx) in everywhere.items():
            if ctx.grid is not None:
                grids[path] = ctx.patch_grid()
                image = rows(path, tokens, ctx.grid)
                assert image.shape[1:3] == ctx.grid
                torch.testing.assert_close(ctx.x, image.flatten(1, 2), rtol=0, atol=0)
        assert len(grids) == len(everywhere) - 3 * (module == "hiera"), "all but those that pool their queries"
        for path, (tokens, ctx) in observed(linearize(model, "softmax").eval()).items():
            if path in grids and windows[path] is not None:
                side, other = ctx.patch_grid()
                assert side == other and side * other == windows[path]
                image, (height, width) = rows(path, tokens, grids[path]), grids[path]
                padded = F.pad(image, (0, 0, 0, -width % side, 0, -height % side))
                cut = padded.unfold(1, side, side).unfold(2, side, side).permute(0, 1, 2, 4, 5, 3)
                torch.testing.assert_close(ctx.x, cut.flatten(3, 4).flatten(0, 2), rtol=0, atol=0)


def test_hiera_without_some_mask_units() -> None:
    """As its pretraining drops them; what is left lies on no grid."""
    model = first("hiera")
    mask = torch.tensor([[True, False, True, True], [False, True, True, True]])
    with torch.no_grad():
        wanted = model.forward_features(pixels(model), mask=mask)
        same = linearize(model, "softmax").eval().forward_features(pixels(model), mask=mask)
        torch.testing.assert_close(same, wanted, rtol=1e-4, atol=1e-5)
