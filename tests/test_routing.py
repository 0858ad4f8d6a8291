"""Routing maps and what is said of them."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn

from vit2linear.context import AttentionContext
from vit2linear.recipe import OPERATORS
from vit2linear.routing import _head, compare_routing, jacobian_map, routing_maps
from vit2linear.site import sites_of
from vit2linear.surgery import linearize


def source() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3, num_classes=5
    ).eval()
    for block in model.blocks:  # peaked
        block.attn.qkv.weight.data[:96] *= 20
    return model


PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", OPERATORS.names())
def test_every_operator_has_a_routing(name: str) -> None:
    model = source()
    teacher, student = linearize(model, "softmax").eval(), linearize(model, name).eval()
    found = compare_routing(routing_maps(teacher, PIXELS), routing_maps(student, PIXELS), student)
    assert list(found) == ["blocks.0.attn", "blocks.1.attn"]
    op = OPERATORS.get(name)
    for site in found.values():
        assert len(site.heads) == 3 and site.how == ("map" if op.has_map else "jacobian")
        assert not site.signed or op.signed or not op.has_map
        for head in site.heads:
            assert -1.001 <= head.cosine <= 1.001 and 0 <= head.overlap <= 1 and 0.99 <= head.rank <= 17.01
            assert (head.entropy is None) == (head.divergence is None) == site.signed
    if name == "softmax":
        assert all(h.cosine > 0.9999 and h.overlap > 0.99 for site in found.values() for h in site.heads)
        assert all(abs(h.divergence or 0) < 1e-5 for site in found.values() for h in site.heads)


@pytest.mark.parametrize("name", ["relu", "inline", "rala", "softmax"])
def test_the_jacobian_of_a_linear_routing_is_its_map(name: str) -> None:
    op = OPERATORS.get(name)
    site = sites_of(linearize(source(), name))["blocks.0.attn"]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 17, 16)
    ctx = AttentionContext(grid=(4, 4), num_prefix=1, x=torch.randn(2, 17, 48))
    with torch.no_grad():
        wanted = site.op.map(q, k, ctx).unflatten(1, (-1, op.streams)).mean(2)
        if name == "rala":  # its gate, after the routing, is one at the start
            assert torch.allclose(site.op(q, k, v, ctx), site.op.map(q, k, ctx) @ v, atol=1e-5)
    torch.testing.assert_close(jacobian_map(site.op, q, k, v, ctx), wanted, rtol=1e-4, atol=1e-5)


def test_figures_of_maps_that_are_known() -> None:
    n = 8
    sharp, flat = torch.eye(n)[None], torch.full((1, n, n), 1 / n)
    head = _head(sharp, flat, signed=False)
    assert head.cosine == pytest.approx(1 / math.sqrt(n), rel=1e-5)
    assert head.rank == pytest.approx(1) and head.teacher_rank == pytest.approx(n)
    assert head.entropy == pytest.approx(1) and head.teacher_entropy == pytest.approx(0)
    assert head.divergence == pytest.approx(math.log(n))
    same = _head(sharp, 3 * sharp, signed=True)
    assert same.cosine == pytest.approx(1) and same.entropy is None and same.divergence is None


def test_a_softmax_map_is_that_of_the_source() -> None:
    model = source()
    x = model.blocks[0].norm1(model._pos_embed(model.patch_embed(PIXELS)))
    q, k, _ = model.blocks[0].attn.qkv(x).reshape(2, 17, 3, 3, 16).permute(2, 0, 3, 1, 4)
    found = routing_maps(linearize(model, "softmax").eval(), PIXELS)["blocks.0.attn"]
    torch.testing.assert_close(found, (q @ k.mT / 4).softmax(-1))
