"""What the generic tests of site kinds do not see: grids, masks, residuals, branches."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock

from tests import families
from tests.families import crossvit, pit, tnt, vision_transformer
from tests.test_sites import pixels
from vit2linear.distill.forward import run
from vit2linear.errors import SurgeryError
from vit2linear.plan import make_plan
from vit2linear.probe import probe
from vit2linear.recipe import Rule
from vit2linear.site import sites_of
from vit2linear.surgery import linearize

INLINE = ["vit_base_patch16_xp_224", "vit_dwee_patch16_reg1_gap_256", "vit_dpwee_patch16_reg1_gap_256"]
GRIDS = [
    (tnt.VARIANTS[0], {"blocks.0.attn_in": (4, 4), "blocks.1.attn_out": (3, 4)}),
    (pit.VARIANTS[0], {f"transformers.{i}.blocks.0.attn": grid for i, grid in enumerate([(5, 7), (3, 4), (2, 2)])}),
    (crossvit.VARIANTS[0], {"blocks.0.blocks.0.0.attn": (6, 8), "blocks.1.blocks.1.0.attn": (3, 4)}),
]


@pytest.mark.parametrize(("case", "wanted"), GRIDS)
def test_every_site_has_its_own_grid(case: tuple[str, dict[str, Any]], wanted: dict[str, tuple[int, int]]) -> None:
    name, args = case
    model = timm.create_model(name, **args)
    plan = make_plan(model, [Rule(local="dwc3")])
    with torch.device("meta"):
        found = probe(timm.create_model(name, **args), plan).sites
    assert {path: found[path].grid for path in wanted} == wanted
    linearize(model, local="dwc3").eval()(pixels(model))


def test_the_pixels_of_a_patch_are_a_window() -> None:
    plan = make_plan(timm.create_model(tnt.NAMES[0], **tnt.small(tnt.NAMES[0])), [Rule()])
    assert {s.site.path.split(".")[-1]: s.site.window for s in plan.sites} == {"attn_in": 16, "attn_out": None}


@pytest.mark.parametrize("name", INLINE)
def test_masks_reach_blocks_that_attend_inline(name: str) -> None:
    model = families.build(name, **vision_transformer.small(name))
    x, same, linear = pixels(model), linearize(model, "softmax").eval(), linearize(model, "relu").eval()
    mask = torch.rand(2, 1, 1, 16 + model.num_prefix_tokens, generator=torch.Generator().manual_seed(0)) < 0.7
    with torch.no_grad():
        torch.testing.assert_close(same(x, attn_mask=mask), model(x, attn_mask=mask), rtol=1e-5, atol=1e-5)
        assert not torch.allclose(linear(x, attn_mask=mask), linear(x), atol=1e-3)
    with pytest.raises(SurgeryError, match="causal"):
        linear(x, is_causal=True)


@pytest.mark.parametrize(
    "block", [partial(ParallelScalingBlock, fuse_out_proj=True), partial(DiffParallelScalingBlock, dual_lambda=True)]
)
def test_block_options_that_no_name_sets(block: Any) -> None:
    model = families.build("vit_tiny_patch16_224", block_fn=block, **vision_transformer.small("vit_tiny_patch16_224"))
    x = pixels(model)
    with torch.no_grad():
        torch.testing.assert_close(linearize(model, "softmax").eval()(x), model(x), rtol=1e-5, atol=1e-5)


def test_losses_see_what_a_block_adds() -> None:
    """Not its residual, against which any attention would look well recovered."""
    name = INLINE[0]
    model = linearize(families.build(name, **vision_transformer.small(name)), "softmax").eval()
    kept: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda _, args, output: kept.append(output - args[0]))
    outputs = run(model, pixels(model), sites_of(model))
    assert torch.equal(outputs.sites["blocks.1"], kept[0])


def test_features_of_every_branch_are_kept() -> None:
    name = crossvit.NAMES[0]
    model = families.build(name, **crossvit.small(name))
    outputs = run(model, pixels(model), {})
    assert [t.shape for t in outputs.tokens] == [(2, 65, 24), (2, 17, 48)]
    assert outputs.pooled is not None and outputs.pooled.shape == (2, 72)
