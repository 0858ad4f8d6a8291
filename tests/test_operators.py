"""Every operator against its own N x N form (tests/naive), by discovery, in values and gradients."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.naive import Case, form_of
from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import SurgeryError
from vit2linear.modifiers import Modifiers
from vit2linear.operator import Operator
from vit2linear.ops.base import KernelOperator
from vit2linear.recipe import OPERATORS

HEADS, DIM = 3, 8
NAMES = OPERATORS.names()
MAPPED = [name for name in NAMES if OPERATORS.get(name).has_map]
GRIDS = [(7, 9), (12, 16), (5, 11)]
PREFIXES = [0, 1, 2, 5]
# Options that change what an operator computes, beside its defaults.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in NAMES),
    ("agent", {"bias": True, "landmarks": 9}),
    ("focused", {"power": 1.5}),
    ("inline", {"dyn3": True}),
    ("luna", {"projections": 5, "channels": 3, "hidden": 4}),
    ("mhla", {"blocks": 1}),
    ("mhla", {"blocks": 3}),
    ("performer", {"features": 20}),
]
IDS = [name + "".join(f"-{k}-{v}" for k, v in options.items()) for name, options in VARIANTS]


def make(name: str, options: dict[str, Any] | None = None, seed: int = 0) -> Operator:
    """In float64, every parameter moved away from its inert start."""
    kind = OPERATORS.get(name)
    torch.manual_seed(seed)
    op = kind(HeadGeometry(HEADS * DIM, HEADS, DIM, DIM**-0.5), kind.Options(**(options or {}))).double()
    for parameter in op.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return op


def make_case(op: Operator, grid: tuple[int, int], prefix: int, seed: int = 0) -> Case:
    tokens = grid[0] * grid[1] + prefix
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, tokens, DIM, generator=generator, dtype=torch.float64)
    x = torch.randn(2, tokens, HEADS * DIM, generator=generator, dtype=torch.float64)
    valid = torch.ones(2, tokens, dtype=torch.float64)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    return Case(q, k, v, x, valid, grid, prefix, DIM**-0.5, dict(op.state_dict()), vars(op.options))


def context(case: Case, mask: Tensor | None = None) -> AttentionContext:
    return AttentionContext(case.x, case.grid, case.prefix, mask)


def split(op: Operator, v: Tensor) -> Tensor:
    """(batch, heads * streams, tokens, part), each stream its own part of the channels."""
    return torch.stack(v.chunk(op.streams, -1), 2).flatten(1, 2)


def join(op: Operator, parts: Tensor) -> Tensor:
    return torch.cat(list(parts.unflatten(1, (HEADS, op.streams)).unbind(2)), -1)


def naive_heads(op: Operator, case: Case) -> Tensor:
    form = form_of(op.name)
    if not op.has_map:
        heads: Tensor = form.heads(case)
        return heads
    heads = join(op, form.routing(case) @ split(op, case.v))
    return form.finish(case, heads) if hasattr(form, "finish") else heads


def test_every_operator_has_a_naive_form_that_is_independent() -> None:
    for name in NAMES:
        source = (Path(__file__).parent / "naive" / f"{name}.py").read_text()
        assert "vit2linear" not in source


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_equals_its_naive_form(name: str, options: dict[str, Any], grid: tuple[int, int], prefix: int) -> None:
    op = make(name, options)
    case = make_case(op, grid, prefix)
    check_against_naive_form(op, case, context(case))


@pytest.mark.parametrize("name", [n for n in NAMES if "pooling" in OPERATORS.get(n).carries])
def test_pooling_equals_the_naive_form(name: str) -> None:
    """35 queries and 12 keys, and an input that is neither: whoever looks at it or at a grid would notice."""
    op = make(name)
    case = make_case(op, (5, 7), 0)
    k, v = (t[:, :, 3:15].detach().requires_grad_() for t in (case.k, case.v))
    case = replace(case, k=k, v=v, valid=case.valid[:, :12], x=torch.full((2, 140, HEADS * DIM), torch.nan))
    ctx = AttentionContext(case.x)
    check_against_naive_form(op, case, ctx)
    assert "pooling" in op.carries and op(case.q, k, v, ctx).shape == case.q.shape
    heads = join(op, op.map(case.q, k, ctx) @ split(op, v))
    torch.testing.assert_close(
        op.finish(heads, v, ctx) if isinstance(op, KernelOperator) else heads, op(case.q, k, v, ctx)
    )


def check_against_naive_form(op: Operator, case: Case, ctx: AttentionContext) -> None:
    """The result of every order, the map, and the gradients."""
    q, k, v, form = case.q, case.k, case.v, form_of(op.name)
    wanted = naive_heads(op, case)
    weight = torch.randn_like(wanted)
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), (q, k, v), allow_unused=True)
    results = {"forward": op(q, k, v, ctx)}
    if op.has_map:
        torch.testing.assert_close(op.map(q, k, ctx), form.routing(case), rtol=1e-8, atol=1e-10)
    if isinstance(op, KernelOperator):
        for order in (op.linear_order, op.quadratic_order):
            parts = order(*op.features(q, k, ctx), op.split(v), None)
            results[order.__name__] = op.finish(op.join(parts), case.v, ctx)
    for order_name, result in results.items():
        torch.testing.assert_close(result, wanted, rtol=1e-7, atol=1e-8, msg=lambda m, o=order_name: f"{o}: {m}")
        gradients = torch.autograd.grad((result * weight).sum(), (q, k, v), retain_graph=True, allow_unused=True)
        for x, mine, theirs in zip((q, k, v), gradients, wanted_gradients, strict=True):
            zero = torch.zeros_like(x)
            mine, theirs = zero if mine is None else mine, zero if theirs is None else theirs
            assert mine.isfinite().all()
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", MAPPED)
def test_routing_map_sends_identity_to_itself(name: str) -> None:
    op = make(name)
    case = make_case(op, (3, 4), 1)
    if op.streams > 1 or not isinstance(op, KernelOperator):
        eye = torch.eye(13, dtype=torch.float64).expand(2, HEADS * op.streams, 13, 13)
        torch.testing.assert_close(form_of(name).routing(case) @ eye, op.map(case.q, case.k, context(case)))
        return
    eye = torch.eye(13, dtype=torch.float64).expand(2, HEADS, 13, 13)
    ctx = context(case)
    parts = op.linear_order(*op.features(case.q, case.k, ctx), eye, None)
    torch.testing.assert_close(parts, op.map(case.q, case.k, ctx))


@pytest.mark.parametrize("name", [n for n in NAMES if "key_mask" in OPERATORS.get(n).carries])
def test_key_mask_equals_removing_the_tokens(name: str) -> None:
    """The last patches of a row are padding; the kept tokens must not notice."""
    op = make(name)
    case = make_case(op, (6, 5), 2)
    left = torch.arange(2 + 4 * 5)  # two rows of patches are padding, so that what is left is a grid again
    keep = torch.zeros(2, 32, dtype=torch.bool)
    keep[:, left] = True
    with torch.no_grad():
        for tensor in (case.q, case.k, case.v):
            tensor[:, :, ~keep[0]] = 1e4
        case.x[:, ~keep[0]] = -1e4
        short = replace(
            case, q=case.q[:, :, left], k=case.k[:, :, left], v=case.v[:, :, left], x=case.x[:, left], grid=(4, 5)
        )
        wanted = op(short.q, short.k, short.v, context(short))
        masked = {"forward": op(case.q, case.k, case.v, context(case, keep))}
        if isinstance(op, KernelOperator):
            ctx = context(case, keep)
            for order in (op.linear_order, op.quadratic_order):
                parts = order(*op.features(case.q, case.k, ctx), op.split(case.v), keep)
                masked[order.__name__] = op.finish(op.join(parts), case.v, ctx)
        for order_name, result in masked.items():
            torch.testing.assert_close(result[:, :, left], wanted, msg=lambda m, o=order_name: f"{o}: {m}")


@pytest.mark.parametrize("tokens", [1025, 4097])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_finite_at_the_extremes_of_half_precision(name: str, dtype: torch.dtype, tokens: int) -> None:
    """Feature std 6, as ViTs with outlier channels have; the core runs in float32 whatever the autocast type."""
    kind = OPERATORS.get(name)
    torch.manual_seed(0)
    op = kind(HeadGeometry(64, 1, 64, 0.125), kind.Options())
    q, k, v = (6 * torch.randn(3, 1, 1, tokens, 64)).to(dtype).unbind(0)
    side = int((tokens - 1) ** 0.5)
    x = torch.randn(1, tokens, 64)
    with torch.no_grad():
        out = op.to(dtype)(q, k, v, AttentionContext(x.to(dtype), (side, side), 1))
        assert out.dtype == dtype and out.isfinite().all()
        op, wide = op.float(), (q.float(), k.float(), v.float())
        ctx = AttentionContext(x, (side, side), 1)
        with torch.autocast("cpu", dtype=dtype):
            mixed = op(*wide, ctx)
        if isinstance(op, KernelOperator):
            torch.testing.assert_close(mixed, op(*wide, ctx), rtol=1e-5, atol=1e-6)
        assert mixed.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_where_all_queries_are_negative(name: str) -> None:
    op = make(name).float()
    case = make_case(op, (3, 4), 1)
    q = -case.q.detach().float().abs()
    k, v = case.k.detach().float(), case.v.detach().float()
    for tensor in (q, k, v):
        tensor.requires_grad_()
    ctx = replace(context(case), x=case.x.float())
    op(q, k, v, ctx).square().sum().backward()
    assert all(t.grad is None or t.grad.isfinite().all() for t in (q, k, v, *op.parameters()))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_round_trip_and_seeded_init(name: str) -> None:
    one, two, other = make(name), make(name), make(name, seed=1)
    assert all(torch.equal(v, two.state_dict()[k]) for k, v in one.state_dict().items())
    if any(v.is_floating_point() for v in one.state_dict().values()):
        assert any(not torch.equal(v, other.state_dict()[k]) for k, v in one.state_dict().items())
    other.load_state_dict(one.state_dict(), strict=True)
    case = make_case(one, (3, 4), 1)
    args = (case.q, case.k, case.v, context(case))
    torch.testing.assert_close(one(*args), other(*args), rtol=0, atol=0)
    assert set(one.state_dict()) == set(dict(one.named_parameters())) | set(dict(one.named_buffers())), "persistent"


@pytest.mark.parametrize("local", ["dwc3", "dwc5"])
@pytest.mark.parametrize("name", NAMES)
def test_local_branch_is_inert_at_first_and_leaves_prefix_rows(name: str, local: Any) -> None:
    plain, op = make(name), make(name)
    torch.manual_seed(0)
    op.add_modifiers(Modifiers(local=local))
    op.double()
    case = make_case(op, (4, 5), 2)
    args = (case.q, case.k, case.v, context(case))
    assert torch.equal(op.route(*args), plain(*args))
    assert op.local is not None
    op.local.conv.weight.data.normal_()
    difference = op.route(*args) - plain(*args)
    assert not difference[:, :, :2].any() and difference[:, :, 2:].abs().min(-1).values.max() > 0
    # Against torch's own convolution, channel by channel.
    patches = case.v.detach()[:, :, 2:].reshape(2, HEADS, 4, 5, DIM)
    weight = op.local.conv.weight.reshape(HEADS, DIM, *op.local.conv.kernel_size)
    one = torch.nn.functional.conv2d(patches[:1, 1, :, :, 3][None], weight[1, 3][None, None], padding="same")[0, 0]
    torch.testing.assert_close(difference[0, 1, 2:, 3], one.flatten())


@pytest.mark.parametrize("name", NAMES)
def test_centred_keys_do_not_see_a_constant(name: str) -> None:
    op = make(name)
    op.add_modifiers(Modifiers(center_keys=True))
    case = make_case(op, (4, 5), 1)
    ctx = context(case)
    torch.testing.assert_close(op.route(case.q, case.k + 3.0, case.v, ctx), op.route(case.q, case.k, case.v, ctx))


def test_relu_equals_timm_lite_mla() -> None:
    """timm's port of EfficientViT's attention, its multi-scale branch removed, is an independent implementation."""
    from timm.models.efficientvit_mit import LiteMLA

    torch.manual_seed(0)
    lite = LiteMLA(24, 24, dim=8, scales=(), eps=1e-6 * 35).eval()
    x = torch.randn(2, 24, 5, 7)
    qkv = lite.qkv(x).flatten(2).transpose(1, 2).reshape(2, 35, 3, 3, 8)
    q, k, v = (t.transpose(1, 2) for t in qkv.unbind(3))
    heads = make("relu").float()(q, k, v, AttentionContext(torch.zeros(2, 35, 24)))
    mine = lite.proj(heads.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, (5, 7)))
    with torch.no_grad():
        torch.testing.assert_close(mine, lite(x), rtol=1e-4, atol=1e-5)


def test_a_dead_relu_row_routes_nothing() -> None:
    op = make("relu")
    case = make_case(op, (3, 3), 0)
    assert not op(-case.q.abs(), case.k, case.v, context(case)).any()


def test_softmax_equals_torch() -> None:
    op = make("softmax")
    case = make_case(op, (3, 4), 1)
    wanted = torch.nn.functional.scaled_dot_product_attention(case.q, case.k, case.v)
    torch.testing.assert_close(op(case.q, case.k, case.v, context(case)), wanted)


def test_grid_that_does_not_match_the_tokens_is_an_error() -> None:
    case = make_case(make("relu"), (3, 4), 2)
    assert context(case).patch_grid() == (3, 4)
    with pytest.raises(SurgeryError, match="patch grid is"):
        replace(context(case), grid=(3, 5)).patch_grid()


COMPILE = """
import torch
from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.recipe import OPERATORS

for name in OPERATORS.names():
    kind = OPERATORS.get(name)
    torch.manual_seed(0)
    op = kind(HeadGeometry(24, 3, 8, 8**-0.5), kind.Options())
    q, k, v = torch.randn(3, 2, 3, 21, 8)
    ctx = AttentionContext(torch.randn(2, 21, 24), (4, 5), 1)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(op, backend="eager", fullgraph=True)(q, k, v, ctx), op(q, k, v, ctx))
"""


def test_compile_without_graph_breaks() -> None:
    """In a process of its own, because the shape checks of these tests cannot be traced."""
    subprocess.run([sys.executable, "-c", COMPILE], check=True)
