"""What each kernel operator must equal exactly: closed forms, limits and other operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.naive import form_of
from tests.test_operators import DIM, HEADS, context, make, make_case, naive_heads
from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError
from vit2linear.operator import Operator
from vit2linear.ops import performer, taylor2
from vit2linear.recipe import OPERATORS

close = torch.testing.assert_close
SCALE = DIM**-0.5
NAMES = (
    "inline mala efficient taylor2 focused pola hedgehog t2r luna performer cosformer sima rala".split()  # noqa: SIM905
)


def fresh(name: str, options: dict[str, Any] | None = None, scale: float = SCALE) -> Any:
    """In float64, as a conversion starts."""
    torch.manual_seed(0)
    kind = OPERATORS.get(name)
    return kind(HeadGeometry(HEADS * DIM, HEADS, DIM, scale), kind.Options(**(options or {}))).double()


def tensors(tokens: int = 13, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
    """q, k, v and the context of one prefix token before a row of patches."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, tokens, DIM, generator=generator, dtype=torch.float64)
    x = torch.randn(2, tokens, HEADS * DIM, generator=generator, dtype=torch.float64)
    return q, k, v, AttentionContext(x, (1, tokens - 1), 1)


def normalised(kernel: Tensor) -> Tensor:
    return kernel / kernel.sum(-1, keepdim=True)


# --- all of them ---


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"sima"}))
def test_rows_sum_to_one_so_that_a_constant_stays(name: str) -> None:
    q, k, v, ctx = tensors()
    op = fresh(name)
    op.eps = 1e-15
    close(op.map(q, k, ctx).sum(-1), torch.ones(2, HEADS * op.streams, 13).double())
    close(op(q, k, torch.ones_like(v), ctx), torch.ones_like(v))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"focused", "pola", "cosformer"}))
def test_permuting_tokens_permutes_heads(name: str) -> None:
    op, (q, k, v, ctx) = make(name), tensors()
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    moved = op(q[:, :, order], k[:, :, order], v[:, :, order], replace(ctx, x=ctx.x[:, order]))
    close(moved, op(q, k, v, ctx)[:, :, order])


@pytest.mark.parametrize("name", NAMES)
def test_built_without_memory_and_then_loaded(name: str) -> None:
    wanted, kind = make(name), OPERATORS.get(name)
    with torch.device("meta"):
        op = kind(HeadGeometry(HEADS * DIM, HEADS, DIM, SCALE), kind.Options())
    op.load_state_dict(wanted.state_dict(), assign=True)
    q, k, v, ctx = tensors()
    assert torch.equal(op(q, k, v, ctx), wanted(q, k, v, ctx))


@pytest.mark.parametrize("name", ["focused", "pola", "cosformer"])
def test_positions_relative_to_the_grid_refuse_a_key_mask(name: str) -> None:
    q, k, v, ctx = tensors()
    assert "key_mask" not in OPERATORS.get(name).carries
    with pytest.raises(SurgeryError, match=f"'{name}', whose positions"):
        fresh(name)(q, k, v, replace(ctx, key_mask=torch.ones(2, 13, dtype=torch.bool)))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"focused", "pola", "cosformer"}))
def test_gradients_are_finite_whatever_stands_at_masked_tokens(name: str) -> None:
    q, k, v, ctx = tensors()
    op, mask = make(name).float(), torch.arange(13).expand(2, -1) < 9
    for padding in (0.0, 30.0, 1e4):
        # Long keys, next to which short ones are beyond the range of exp.
        inputs = [t.float().masked_fill(~mask[:, None, :, None], padding).requires_grad_() for t in (q, 20 * k, v)]
        heads = op(*inputs, replace(ctx, x=ctx.x.float(), key_mask=mask))
        heads[:, :, :9].square().sum().backward()
        assert all(t.grad is None or t.grad.isfinite().all() for t in (*inputs, *op.parameters()))


@pytest.mark.parametrize(
    ("name", "options"),
    [("focused", {"power": 0.0}), ("luna", {"hidden": 0}), ("luna", {"channels": -1}), ("performer", {"features": 0})],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match=f"operator '{name}': {next(iter(options))} is"):
        fresh(name, options)


# --- inline ---


def test_inline_is_softmax_to_first_order() -> None:
    q, k, _, ctx = tensors()
    op = fresh("inline")
    logits = SCALE * q @ (k - k.mean(2, keepdim=True)).transpose(-2, -1)
    close(op.map(q, k, ctx), (1 + logits) / 13)
    # ViTALiTy: keys around their mean, exp(t) replaced by 1 + t, rows divided by their sum.
    close(op.map(q, k, ctx), normalised(1 + logits))
    close(op.map(q, k + 5.0, ctx), op.map(q, k, ctx))
    errors = [
        (op.map(e * q, k, ctx) - (SCALE * e * q @ k.transpose(-2, -1)).softmax(-1)).abs().max() for e in (1e-2, 1e-3)
    ]
    assert 90 < errors[0] / errors[1] < 110


@pytest.mark.parametrize("masked", [False, True])
def test_inline_dynamic_kernels(masked: bool) -> None:
    op = make("inline", {"dyn3": True})
    case = make_case(op, (4, 5), 2)
    mask = None
    if masked:
        case.valid[1, -5:] = 0
        mask = case.valid.bool()
    wanted = naive_heads(op, case)
    result = op(case.q, case.k, case.v, context(case, mask))
    keep = case.valid[:, None, :, None]
    close(result * keep, wanted * keep)
    inputs = (case.q, case.k, case.v)
    for mine, theirs in zip(
        torch.autograd.grad((result * keep).square().sum(), inputs),
        torch.autograd.grad((wanted * keep).square().sum(), inputs),
        strict=True,
    ):
        close(mine, theirs)
    plain = fresh("inline")(*inputs, context(case, mask))
    assert torch.equal((result - plain)[:, :, :2], torch.zeros_like(plain[:, :, :2]))


def test_inline_dynamic_kernels_start_inert_and_learn_in_half_precision() -> None:
    q, k, v, ctx = tensors()
    assert torch.equal(fresh("inline", {"dyn3": True})(q, k, v, ctx), fresh("inline")(q, k, v, ctx))
    for dtype in (torch.float16, torch.bfloat16):
        half = fresh("inline", {"dyn3": True}).to(dtype)
        out = half(q.to(dtype), k.to(dtype), v.to(dtype), replace(ctx, x=ctx.x.to(dtype)))
        out.float().square().sum().backward()
        assert out.dtype == dtype and half.dyn3.kernels[2].weight.grad.abs().max() > 0
    op, wide = fresh("inline", {"dyn3": True}).float(), [t.float() for t in (q, k, v)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert op(*wide, replace(ctx, x=ctx.x.float())).dtype == torch.float32


def test_inline_dynamic_kernels_need_a_width_that_heads_divide() -> None:
    kind = OPERATORS.get("inline")
    with pytest.raises(RecipeError, match="dyn3 needs a width"):
        kind(HeadGeometry(25, HEADS, DIM, SCALE), kind.Options(dyn3=True))


# --- mala, efficient, sima, rala ---


def test_mala_is_the_classic_map_plus_the_centred_kernel() -> None:
    q, k, _, ctx = tensors()
    kernel = (F.elu(q) + 1) @ (F.elu(k) + 1).transpose(-2, -1)
    centred = SCALE * (kernel - kernel.mean(-1, keepdim=True)) / 13
    close(fresh("mala").map(q, k, ctx), normalised(kernel) + centred, rtol=1e-5, atol=1e-6)
    small = fresh("mala", scale=1e-3)
    small.eps = 0.0
    close(small.map(q, k, ctx), normalised(kernel), rtol=0, atol=1e-2)


def test_efficient_is_attention_through_the_axes_as_agents() -> None:
    q, k, _, ctx = tensors()
    agents = torch.eye(DIM).double()
    to_agents, from_tokens = (q @ agents.T).softmax(-1), (agents @ k.transpose(-2, -1)).softmax(-1)
    close(fresh("efficient").map(q, k, ctx), to_agents @ from_tokens)


def test_sima_forgets_the_scale_of_every_channel() -> None:
    q, k, v, ctx = tensors()
    op, scales = fresh("sima"), torch.rand(2, HEADS, 1, DIM).double() + 0.1
    close(op(q * scales, k / scales, v, ctx), op(q, k, v, ctx))
    # All queries and keys positive: then the map is a distribution over pairs of tokens, for each channel.
    close(op.map(q.abs(), k.abs(), ctx).sum((-2, -1)), torch.full((2, HEADS), float(DIM)).double())


def test_rala_without_differences_between_keys_is_elu() -> None:
    q, k, v, ctx = tensors()
    close(fresh("rala", scale=0.0)(q, k, v, ctx), fresh("elu")(q, k, v, ctx))
    # The same, by keys that the mean query cannot tell apart.
    alike = k[:, :, :1].expand_as(k)
    close(fresh("rala")(q, alike, v, ctx), fresh("elu")(q, alike, v, ctx))


# --- kernels of powers and positions ---


def test_focused_with_power_one_is_relu() -> None:
    q, k, _, ctx = tensors()
    op = fresh("focused", {"power": 1.0})
    op.gamma.data.fill_(torch.tensor(1.0).double().expm1().log())  # softplus = 1
    phi_q, phi_k = op.features(q, k, ctx)
    close(phi_q, F.relu(q) + 1e-6)
    close(phi_k, F.relu(k) + 1e-6)


@pytest.mark.parametrize("power", [0.5, 3.0, 32.0])
def test_focused_keeps_norms_over_all_channels(power: float) -> None:
    q, k, _, ctx = tensors()
    for x, phi in zip((q, k), fresh("focused", {"power": power}).features(q, k, ctx), strict=True):
        wanted = ((F.relu(x) + 1e-6) / F.softplus(torch.zeros(())).double()).square().sum((1, 3)).sqrt()
        close(phi.square().sum((1, 3)).sqrt(), wanted, rtol=1e-6, atol=1e-9)
    wide = fresh("focused", {"power": power}).float()
    assert all(phi.isfinite().all() for phi in wide.features(-q.float().abs(), 1e-3 * k.float(), ctx))


@pytest.mark.parametrize("name", ["focused", "pola"])
def test_key_positions_are_the_table_itself_on_its_own_grid(name: str) -> None:
    op, still = fresh(name), fresh(name)
    op.positions.data.normal_()
    q, k = torch.randn(2, 1, HEADS, 2 + 196, DIM).double()
    ctx = AttentionContext(torch.zeros(1, 198, HEADS * DIM).double(), (14, 14), 2)
    positions = op.positions.detach().flatten(1).T.unflatten(1, (HEADS, DIM)).transpose(0, 1)
    moved = torch.cat([k[:, :, :2], k[:, :, 2:] + positions], 2)
    close(op.map(q, k, ctx), still.map(q, moved, ctx))


def test_pola_with_power_one_gives_back_the_product() -> None:
    q, k, _, ctx = tensors()
    op = fresh("pola")
    op.theta.data.fill_(-1e4)  # p = 1
    op.gamma.data.fill_(torch.tensor(1.0).double().expm1().log())  # softplus = 1
    phi_q, phi_k = (phi.unflatten(1, (HEADS, 2)) for phi in op.features(q, k, ctx))
    same, opposite = (phi_q @ phi_k.transpose(-2, -1)).unbind(2)
    close(same - opposite, q @ k.transpose(-2, -1))


def test_pola_swaps_its_maps_with_the_sign_of_the_query() -> None:
    op, (q, k, _, ctx) = make("pola"), tensors()
    maps, swapped = (op.map(x, k, ctx).unflatten(1, (HEADS, 2)) for x in (q, -q))
    close(maps.flip(2), swapped)


def test_cosformer_of_tokens_at_one_place_is_relu() -> None:
    q, k, v, ctx = tensors()
    ctx = replace(ctx, grid=(1, 1), num_prefix=12)
    close(fresh("cosformer")(q, k, v, ctx), fresh("relu")(q, k, v, ctx))


def test_cosformer_falls_off_with_the_cosine_of_rows_and_columns() -> None:
    ones = torch.ones(1, 1, 12, 1).double()
    phi, _ = fresh("cosformer").features(ones, ones, AttentionContext(torch.zeros(1, 12, 1).double(), (3, 4), 0))
    kernel = phi @ phi.transpose(-2, -1)
    cosines = torch.tensor([0.0, 22.5, 45.0, 67.5, 30.0]).double().deg2rad().cos()
    close(kernel[0, 0, 0, :4], cosines[:4])  # along the first row
    close(kernel[0, 0, 2, 7], cosines[4] * cosines[1])  # one down, one right
    assert kernel.min() > 0


# --- approximations of the exponential ---


def test_taylor2_is_the_second_order_polynomial() -> None:
    q, k, _, ctx = tensors()
    u, w = fresh("taylor2").features(q, k, ctx)
    starts = range(0, u.shape[-1], taylor2.CHUNK)
    pairs = sum(taylor2._pairs(u, i) @ taylor2._pairs(w, i).transpose(-2, -1) for i in starts)
    t = SCALE * q @ k.transpose(-2, -1)
    kernel = pairs + 0.5
    close(kernel, 1 + t + t**2 / 2, rtol=0, atol=1e-12)
    assert kernel.min() >= 0.5
    close(fresh("taylor2").map(q, k, ctx), normalised(1 + t + t**2 / 2), rtol=1e-5, atol=1e-6)


def test_taylor2_is_softmax_to_second_order() -> None:
    q, k, _, ctx = tensors()
    op = fresh("taylor2")
    op.eps = 0.0
    errors = [
        (op.map(e * q, k, ctx) - (SCALE * e * q @ k.transpose(-2, -1)).softmax(-1)).abs().max() for e in (1e-2, 1e-3)
    ]
    assert 900 < errors[0] / errors[1] < 1100


def test_taylor2_takes_the_quadratic_order_up_to_as_many_tokens_as_features() -> None:
    op = OPERATORS.get("taylor2")(HeadGeometry(64, 1, 64, 0.125), None)
    for tokens, quadratic in ((197, True), (2000, True), (2300, False)):
        phi, v = torch.zeros(1, 1, tokens, 65), torch.zeros(1, 1, tokens, 64)
        assert op.prefers_quadratic(phi, phi, v) is quadratic


def test_performer_is_unbiased() -> None:
    torch.manual_seed(0)
    q, k = 0.7 * torch.randn(2, DIM).double()
    y_q, y_k = q * SCALE**0.5, k * SCALE**0.5
    matrices = torch.stack([performer.orthogonal_gaussian(32, DIM).double() for _ in range(2000)])
    phi_q, phi_k = ((matrices @ y - y @ y / 2).exp() / 32**0.5 for y in (y_q, y_k))
    close((phi_q * phi_k).sum(-1).mean(), (SCALE * q @ k).exp(), rtol=0.02, atol=0)


def test_performer_approaches_softmax_with_many_features() -> None:
    q, k, _, ctx = tensors()
    q, k = q / 2, k / 2
    wanted = (SCALE * q @ k.transpose(-2, -1)).softmax(-1)
    few, many = (
        (fresh("performer", {"features": m}).map(q, k, ctx) - wanted).norm() / wanted.norm() for m in (64, 16384)
    )
    assert many < 0.05 < few


def test_performer_rows_are_orthogonal_in_blocks() -> None:
    torch.manual_seed(0)
    matrix = performer.orthogonal_gaussian(20, DIM).double()
    assert matrix.shape == (20, DIM)
    gram = matrix[:DIM] @ matrix[:DIM].T
    close(gram, torch.diag(gram.diag()), rtol=0, atol=1e-5)
    close(
        performer.orthogonal_gaussian(40000, DIM).square().sum(-1).mean(), torch.tensor(float(DIM)), rtol=0.02, atol=0
    )


# --- learned maps ---


def test_hedgehog_starts_as_the_softmax_of_both_signs() -> None:
    q, k, _, ctx = tensors()
    op = fresh("hedgehog")
    phi_q, phi_k = op.features(q, k, ctx)
    close(phi_q, torch.cat([q.softmax(-1), (-q).softmax(-1)], -1))
    close(phi_k, torch.cat([k.softmax(-1), (-k).softmax(-1)], -1))
    close(op.features(-q, k, ctx)[0], torch.cat(phi_q.chunk(2, -1)[::-1], -1))


def test_t2r_starts_as_relu() -> None:
    q, k, v, ctx = tensors()
    assert torch.equal(fresh("t2r")(q, k, v, ctx), fresh("relu")(q, k, v, ctx))


def test_luna_with_axes_and_a_relu_is_relu() -> None:
    q, k, _, ctx = tensors()
    op = fresh("luna", {"projections": DIM, "channels": 1, "hidden": 1})
    for parameter, value in (("directions.weight", torch.eye(DIM)), ("directions.bias", torch.zeros(DIM))):
        op.get_parameter(parameter).data.copy_(value)
    for layer in (op.scalar_in, op.scalar_out):
        layer.weight.data.fill_(1.0)
        layer.bias.data.zero_()
    close(op.map(q, k, ctx), fresh("relu").map(q, k, ctx), rtol=1e-4, atol=1e-4)


def test_luna_starts_with_every_feature_alive() -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        kind = OPERATORS.get("luna")
        op: Operator = kind(HeadGeometry(64, 1, 64, 0.125), kind.Options())
        x = torch.randn(1, 1, 200, 64)
        phi, _ = op.features(x, x, AttentionContext(torch.zeros(1, 200, 64)))  # type: ignore[operator]
        assert phi.shape[-1] == 64 and (phi.amax((0, 1, 2)) > 0).all()


@pytest.mark.parametrize("name", ["rala", "pola"])
def test_output_gates_start_open(name: str) -> None:
    q, k, v, ctx = tensors()
    op = fresh(name)
    heads = op(q, k, v, ctx)
    assert torch.equal(op.finish(heads, heads, ctx), heads)
    op.output_gate.weight.data.normal_()
    finish = form_of(name).finish
    case = make_case(op, (3, 4), 1)
    close(op.finish(case.v, case.v, context(case)), finish(case, case.v))
