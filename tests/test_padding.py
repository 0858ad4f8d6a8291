"""Batches of images of several shapes, patchified and padded to one length, as ``NaFlexVit`` and Gemma 4 take them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.models.naflexvit import create_attention_mask
from torch import Tensor, nn

from tests import families
from vit2linear import linearize
from vit2linear.errors import SurgeryError
from vit2linear.recipe import OPERATORS
from vit2linear.site import sites_of

GRIDS = [(6, 6), (3, 6), (6, 3)]  # Gemma 4 pools three by three
CASES = [
    pytest.param(name, args, id=f"{name}-{i}")
    for module in ("naflexvit", "gemma4_vit")
    for i, (name, args) in enumerate(families.cases(module))
]
PLAIN = families.cases("naflexvit")[0]


def batch(grids: list[tuple[int, int]] = GRIDS, length: int = 45) -> dict[str, Tensor]:
    """What timm's collator makes; an image is the same in every batch, and padding is noise."""
    count = len(grids)
    patches, coord = torch.randn(count, length, 16 * 16 * 3), torch.zeros(count, length, 2, dtype=torch.long)
    valid = torch.zeros(count, length, dtype=torch.bool)
    for i, (rows, columns) in enumerate(grids):
        n = rows * columns
        patches[i, :n] = torch.randn(n, 16 * 16 * 3, generator=torch.Generator().manual_seed(n))
        coord[i, :n] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        valid[i, :n] = True
    return {"patches": patches, "patch_coord": coord, "patch_valid": valid}


def valid_tokens(model: nn.Module, x: dict[str, Tensor]) -> Tensor:
    """Features of all tokens that are no padding."""
    tokens = model.forward_features(**x)["patches"]  # type: ignore[operator]
    prefix = tokens.shape[1] - x["patch_valid"].shape[1]
    return torch.cat([tokens[:, :prefix].flatten(0, 1), tokens[:, prefix:][x["patch_valid"]]])


@pytest.mark.parametrize(("name", "args"), CASES)
def test_softmax_in_between_changes_nothing(name: str, args: dict[str, Any]) -> None:
    model = families.build(name, **args)
    same, x = linearize(model, "softmax").eval(), batch()
    with torch.no_grad():
        torch.testing.assert_close(same(x), model(x), atol=1e-5, rtol=1e-5)
        if "naflex" in name:
            torch.testing.assert_close(valid_tokens(same, x), valid_tokens(model, x), atol=1e-5, rtol=1e-5)
        images = torch.rand(2, 3, 48, 96)
        torch.testing.assert_close(same(images), model(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "args"), CASES)
def test_padding_is_not_seen(name: str, args: dict[str, Any]) -> None:
    student = linearize(families.build(name, **args), "relu").eval()
    with torch.no_grad():
        together = student(batch())
        for i, grid in enumerate(GRIDS):
            alone = student(batch([grid], grid[0] * grid[1]))[0]
            # An encoder pools to as many tokens as the longest image has, the others' being zero.
            torch.testing.assert_close(together[i][: len(alone)], alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("op", [n for n in OPERATORS.names() if "key_mask" in OPERATORS.get(n).carries])
def test_operators_that_carry_key_masks(op: str) -> None:
    name, args = PLAIN
    student = linearize(families.build(name, **args), op).eval()
    with torch.no_grad():
        try:
            together = student(batch())
        except SurgeryError as refusal:
            assert "grid" in str(refusal) and op != "relu"
            return
        alone = student(batch(GRIDS[1:2], 18))
        torch.testing.assert_close(together[1], alone[0], atol=1e-4, rtol=1e-4)


def test_masks_stay_linear_in_the_tokens() -> None:
    name, args = PLAIN
    model = families.build(name, **args)
    student = linearize(model, "relu").eval()
    shapes = []
    sites_of(student)["blocks.0.attn"].register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(kwargs["attn_mask"].shape), with_kwargs=True
    )
    with torch.no_grad():
        student(batch())
    assert shapes == [(3, 1, 1, 49)] and not model.use_key_only_attn_mask


def test_masks_that_a_caller_makes() -> None:
    name, args = PLAIN
    model = families.build(name, **args)
    same, student, x = linearize(model, "softmax").eval(), linearize(model, "relu").eval(), batch()
    with torch.no_grad():
        wanted = student(x)
        symmetric = create_attention_mask(x["patch_valid"], num_prefix_tokens=model.num_prefix_tokens)
        for mask in (symmetric, symmetric == 0):
            torch.testing.assert_close(student({**x, "attn_mask": mask}), wanted)
        # Two images packed into one sequence see themselves only: no key mask says that.
        packed = torch.block_diag(torch.ones(24, 24), torch.ones(25, 25)).bool()[None, None]
        others = ~torch.eye(49, dtype=torch.bool)[None, None]
        soft = torch.zeros(1, 1, 1, 49)
        soft[..., 9:] = -1.5
        for mask in (packed, torch.where(packed, 0.0, torch.finfo(torch.float32).min), others, soft):
            x["attn_mask"] = mask.expand(3, -1, -1, -1)
            torch.testing.assert_close(same(x), model(x), atol=1e-5, rtol=1e-5)
            with pytest.raises(SurgeryError, match="which cannot carry it"):
                student(x)
