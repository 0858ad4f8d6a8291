"""Every operator against its own N x N form, written here from the formula in float64, by discovery."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from vit2linear.attention import AttentionContext, HeadGeometry, Operator
from vit2linear.ops.base import KernelOperator
from vit2linear.recipe import OPERATORS

HEADS, DIM = 3, 8
GRIDS = [(7, 9), (12, 16), (5, 11), (1, 3)]
PREFIXES = [0, 1, 2, 5]


def softmax_map(q: Tensor, k: Tensor, valid: Tensor) -> Tensor:
    logits = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = torch.exp(logits - logits.amax(-1, keepdim=True)) * valid[:, None, None]
    return weights / weights.sum(-1, keepdim=True)


def kernel_map(q: Tensor, k: Tensor, valid: Tensor, phi: Callable[[Tensor], Tensor]) -> Tensor:
    kernel = torch.einsum("bhid,bhjd->bhij", phi(q), phi(k)) * valid[:, None, None]
    count = valid.sum(-1)[:, None, None, None]
    return kernel / (kernel.sum(-1, keepdim=True) + 1e-6 * count)


NAIVE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "softmax": softmax_map,
    "relu": lambda q, k, valid: kernel_map(q, k, valid, lambda x: x.clamp_min(0)),
    "elu": lambda q, k, valid: kernel_map(q, k, valid, lambda x: torch.where(x > 0, x + 1, x.clamp_max(0).exp())),
}


def make(name: str) -> Operator:
    kind = OPERATORS.get(name)
    return kind(HeadGeometry(HEADS * DIM, HEADS, DIM, DIM**-0.5), kind.Options())


def inputs(tokens: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, tokens, DIM, generator=generator, dtype=torch.float64).to(dtype)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def context(
    tokens: int, grid: tuple[int, int] | None = None, prefix: int = 0, mask: Tensor | None = None
) -> AttentionContext:
    return AttentionContext(torch.zeros(2, tokens, HEADS * DIM), grid, prefix, mask)


def test_every_operator_has_a_naive_form() -> None:
    assert set(NAIVE) == set(OPERATORS.names())


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", OPERATORS.names())
def test_equals_its_naive_form_in_values_and_gradients(name: str, grid: tuple[int, int], prefix: int) -> None:
    tokens = grid[0] * grid[1] + prefix
    op, ctx = make(name).double(), context(tokens, grid, prefix)
    q, k, v = inputs(tokens)
    valid = torch.ones(2, tokens, dtype=torch.float64)
    wanted = NAIVE[name](q, k, valid) @ v
    weight = torch.randn_like(wanted)
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), (q, k, v))
    results = [op(q, k, v, ctx), op.map(q, k, ctx) @ v]
    if isinstance(op, KernelOperator):
        phi_q, phi_k = op.features(q, k, ctx)
        results += [op.linear_order(phi_q, phi_k, v, None), op.quadratic_order(phi_q, phi_k, v, None)]
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=1e-9, atol=1e-9)
        gradients = torch.autograd.grad((result * weight).sum(), (q, k, v), retain_graph=True)
        for mine, theirs in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", OPERATORS.names())
def test_routing_map_sends_identity_to_itself(name: str) -> None:
    q, k, _ = inputs(13)
    op, ctx = make(name).double(), context(13)
    eye = torch.eye(13, dtype=torch.float64).expand(2, HEADS, 13, 13)
    torch.testing.assert_close(op(q, k, eye, ctx), op.map(q, k, ctx))


@pytest.mark.parametrize("order", ["linear_order", "quadratic_order", "forward"])
@pytest.mark.parametrize("name", OPERATORS.names())
def test_key_mask_equals_removing_the_tokens(name: str, order: str) -> None:
    op = make(name).double()
    q, k, v = (x.detach() for x in inputs(21))
    keep = torch.ones(2, 21, dtype=torch.bool)
    keep[:, [2, 3, 11, 20]] = False
    left = keep[0].nonzero()[:, 0]
    # What stands at a masked key must not matter, whatever it is.
    k[:, :, ~keep[0]], v[:, :, ~keep[0]] = 1e4, -1e4
    short = k[:, :, left], v[:, :, left]
    wanted = op(q, *short, context(21))
    if order == "forward" or not isinstance(op, KernelOperator):
        masked = op(q, k, v, context(21, mask=keep))
    else:
        masked = getattr(op, order)(*op.features(q, k, context(21)), v, keep)
    torch.testing.assert_close(masked, wanted)


@pytest.mark.parametrize("tokens", [1025, 4097])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS.names())
def test_finite_at_the_extremes_of_half_precision(name: str, dtype: torch.dtype, tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (6 * torch.randn(3, 1, 2, tokens, 64, generator=generator)).to(dtype).unbind(0)
    kind = OPERATORS.get(name)
    op = kind(HeadGeometry(128, 2, 64, 0.125), kind.Options())
    out = op(q, k, v, AttentionContext(torch.zeros(1, tokens, 128, dtype=dtype)))
    assert out.dtype == dtype and out.isfinite().all()
    with torch.autocast("cpu", dtype=dtype):
        mixed = op(q.float(), k.float(), v.float(), AttentionContext(torch.zeros(1, tokens, 128)))
    if isinstance(op, KernelOperator):
        full = op(q.float(), k.float(), v.float(), AttentionContext(torch.zeros(1, tokens, 128)))
        assert torch.equal(mixed, full), "the core runs in float32 whatever the autocast type"


def test_a_dead_relu_row_routes_nothing_and_has_finite_gradients() -> None:
    q, k, v = (x.detach().requires_grad_() for x in inputs(9, torch.float32))
    dead = -q.detach().abs()
    dead.requires_grad_()
    out = make("relu")(dead, k, v, context(9))
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (dead, k, v))


def test_relu_equals_timm_lite_mla() -> None:
    """timm's port of EfficientViT's attention, its multi-scale branch removed, is an independent implementation."""
    from timm.models.efficientvit_mit import LiteMLA

    torch.manual_seed(0)
    lite = LiteMLA(24, 24, dim=8, scales=(), eps=1e-6 * 35).eval()
    x = torch.randn(2, 24, 5, 7)
    qkv = lite.qkv(x).flatten(2).transpose(1, 2).reshape(2, 35, 3, 24)
    q, k, v = (t.reshape(2, 35, 3, 8).transpose(1, 2) for t in qkv.reshape(2, 35, 3, 3, 8).unbind(3))
    heads = make("relu")(q, k, v, context(35))
    mine = lite.proj(heads.transpose(1, 2).flatten(2).transpose(1, 2).unflatten(2, (5, 7)))
    with torch.no_grad():
        torch.testing.assert_close(mine, lite(x), rtol=1e-4, atol=1e-5)


def test_softmax_equals_torch() -> None:
    q, k, v = inputs(11)
    wanted = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(make("softmax")(q, k, v, context(11)), wanted)


def test_grid_that_does_not_match_the_tokens_is_an_error() -> None:
    from vit2linear.errors import SurgeryError

    assert context(14, (3, 4), 2).patch_grid() == (3, 4)
    with pytest.raises(SurgeryError, match="patch grid is"):
        context(15, (3, 4), 2).patch_grid()
