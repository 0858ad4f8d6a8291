"""Attention inside windows, the same over the whole map, and biases by relative position at other image sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from timm.layers import RotaryEmbeddingCat
from timm.models import vision_transformer_sam as sam
from timm.models._manipulate import reinit_non_persistent_buffers
from torch import Tensor, nn
from torch.nn import functional as F

from tests.families import build, swin_transformer, swin_transformer_v2, vision_transformer_sam
from vit2linear import linearize
from vit2linear.audit import audit
from vit2linear.distill.tasks import ModelTask, SiteTask
from vit2linear.errors import SurgeryError
from vit2linear.losses import Objective
from vit2linear.plan import make_plan, plan_notes
from vit2linear.recipe import KEEP, Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

SWIN, V2, SAM = "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "samvit_base_patch16_224"
SWIN_ARGS, V2_ARGS, SAM_ARGS = swin_transformer.SMALL, swin_transformer_v2.SMALL, vision_transformer_sam.SMALL
ROPE = {"use_rel_pos": False, "use_rope": True}
# Six by ten patches in windows of four by four, and three by five in windows of three by four: all of it padded.
RAGGED = {"img_size": (24, 40)}
SEVERAL = [
    pytest.param(SWIN, SWIN_ARGS, id="swin"),
    pytest.param(SWIN, {**SWIN_ARGS, **RAGGED, "head_dim": 24}, id="swin-ragged"),
    pytest.param(SWIN, {**SWIN_ARGS, **RAGGED, "always_partition": True, "strict_img_size": False}, id="swin-dynamic"),
    pytest.param(V2, V2_ARGS, id="v2"),
    pytest.param(V2, {**V2_ARGS, **RAGGED}, id="v2-ragged"),
    pytest.param(SAM, SAM_ARGS, id="sam"),
    pytest.param(SAM, {**SAM_ARGS, "img_size": (64, 80), "window_size": 3, "qk_norm": True}, id="sam-ragged"),
    pytest.param(SAM, {**SAM_ARGS, **ROPE}, id="sam-rope"),
    pytest.param(SAM, {**SAM_ARGS, **ROPE, "img_size": (64, 80), "ref_feat_shape": (7, 3)}, id="sam-rope-reference"),
]
ONE = [
    pytest.param(SWIN, {**SWIN_ARGS, "img_size": 16, "depths": (2,), "num_heads": (2,)}, id="swin"),
    pytest.param(V2, {**V2_ARGS, "img_size": 16, "depths": (2,), "num_heads": (2,)}, id="v2"),
    pytest.param(SAM, {**SAM_ARGS, "window_size": 4}, id="sam"),
    pytest.param(SAM, {**SAM_ARGS, **ROPE, "window_size": 4, "ref_feat_shape": (7, 3)}, id="sam-rope"),
]


def pixels(model: nn.Module) -> Tensor:
    size = model.patch_embed.img_size  # type: ignore[union-attr]
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))  # type: ignore[misc]


@pytest.mark.parametrize(("name", "args"), ONE)
def test_over_one_window_nothing_changes_but_the_bias(name: str, args: dict[str, Any]) -> None:
    model = build(name, **args)
    for path, parameter in model.named_parameters():
        if any(part in path for part in ("relative_position_bias_table", "cpb_mlp", "rel_pos_")):
            parameter.data.zero_()  # for Swin V2 the same bias everywhere, which softmax does not see
    found = linearize(model, "softmax", global_windows=True, drop="all").eval()
    assert any(site.global_windows for site in sites_of(found).values())
    with torch.no_grad():
        torch.testing.assert_close(found(pixels(model)), model(pixels(model)), atol=1e-5, rtol=1e-5)


def on_map(block: Any, x: Tensor) -> Tensor:
    """What a block of timm does around its attention, which is given and gives a map."""
    if hasattr(block, "_attn"):
        out: Tensor = block._attn(x)
        return out
    windows, padded = sam.window_partition(x, block.window_size)
    return sam.window_unpartition(block.attn(windows), block.window_size, x.shape[1:3], padded)


def relu_attention(attention: Any, x: Tensor, reference: tuple[float, float] | None) -> Tensor:
    """The formula over all tokens of the map ``x``, from the weights of the source's module."""
    grid, tokens = x.shape[1:3], x.flatten(1, 2)
    qkv = attention.qkv(tokens)
    if getattr(attention, "q_bias", None) is not None:
        qkv = qkv + torch.cat([attention.q_bias, torch.zeros_like(attention.q_bias), attention.v_bias])
    q, k, v = (part.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2) for part in qkv.chunk(3, -1))
    if isinstance(attention, sam.Attention):
        q, k = attention.q_norm(q), attention.k_norm(k)
        if attention.rope is not None:
            rope = RotaryEmbeddingCat(q.shape[-1], in_pixels=False, feat_shape=grid, ref_feat_shape=reference)
            q, k = (sam.apply_rot_embed_cat(part, rope.get_embed()) for part in (q, k))
    elif hasattr(attention, "logit_scale"):
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    weights = q.relu() @ k.relu().transpose(2, 3)
    heads = weights / weights.sum(-1, keepdim=True) @ v
    out: Tensor = attention.proj(heads.transpose(1, 2).flatten(2)).unflatten(1, grid)
    return out


@pytest.mark.parametrize(("name", "args"), SEVERAL)
def test_global_windows_route_over_the_whole_map(name: str, args: dict[str, Any]) -> None:
    model = build(name, **args)
    student = linearize(model, "relu", global_windows=True, drop="all").eval()
    seen: dict[str, Any] = {}
    with torch.no_grad():
        student(pixels(model))
        for path, site in sites_of(student).items():
            if not site.global_windows:
                assert name == SAM and path in ("blocks.1.attn", "blocks.3.attn")
                continue
            block, source = (m.get_submodule(path.rpartition(".")[0]) for m in (student, model))
            site.op.register_forward_pre_hook(lambda op, args, path=path: seen.update({path: args[3]}))
            grid = site.grid_ref.grid
            assert grid is not None
            x = torch.randn(2, *grid, site.kind.geometry(source.attn).width)  # type: ignore[arg-type]
            reference = None
            if args.get("ref_feat_shape"):  # three steps of the reference are a window of two patches
                reference = (3 / 2 * grid[0], 3 / 2 * grid[1])
            wanted = relu_attention(source.attn, x, reference)
            torch.testing.assert_close(on_map(block, x), wanted, atol=1e-4, rtol=1e-4)
            ctx = seen[path]
            assert (ctx.grid, ctx.num_prefix, ctx.bias, ctx.key_mask) == (grid, 0, None, None)
            assert torch.equal(ctx.x, x.flatten(1, 2))
    assert seen


def test_grids_of_the_stages() -> None:
    student = linearize(build(SWIN, **{**SWIN_ARGS, **RAGGED}), global_windows=True, drop="all").eval()
    student(torch.randn(1, 3, 24, 40))
    assert [site.grid_ref.grid for site in sites_of(student).values()] == [(6, 10)] * 2 + [(3, 5)] * 2


@pytest.mark.parametrize(("name", "args"), SEVERAL)
def test_windowed_teacher_and_global_student_are_compared_site_by_site(name: str, args: dict[str, Any]) -> None:
    model = build(name, **args)
    plan = make_plan(model, [Rule(drop=("all",), global_windows=True)])
    teacher = apply_plan(model, plan.with_operator("softmax")).eval()
    assert not any(site.global_windows or site.dropped for site in sites_of(teacher).values())
    for task_type, weights in ((SiteTask, {"site_output": 1.0}), (ModelTask, {"feature": 1.0, "site_output": 1.0})):
        student = apply_plan(model, plan).train()
        task = task_type(teacher, student, Objective(weights))
        accelerator = Accelerator(cpu=True)
        task.prepare(accelerator)
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            found.append(float(task.backward(accelerator, pixels(model))))
            assert all(p.grad is None or p.grad.isfinite().all() for p in student.parameters())
            optimizer.step()
        assert 0 < found[-1] < found[0], f"{task_type.__name__}: {found}"


def test_what_global_windows_give_up() -> None:
    model = build(SWIN, **SWIN_ARGS)
    inside = make_plan(model, [Rule(drop=("all",))])
    assert {name: len(paths) for name, (_, paths) in inside.losses.items()} == {
        "relative-position-bias": 4,
        "shifted-window-mask": 2,
    }
    assert any("4 sites attend inside windows of 16 tokens" in note for note in plan_notes(inside))
    everywhere = make_plan(model, [Rule(drop=("relative-position-bias",), global_windows=True)])
    assert set(everywhere.losses) == {"relative-position-bias"} and len(plan_notes(everywhere)) == 1
    with pytest.raises(SurgeryError, match=r"'softmax' cannot carry .* relative-position-bias: .*or keep the windows"):
        linearize(model, "softmax", global_windows=True)
    with pytest.raises(SurgeryError, match="outside its model"):
        sites_of(linearize(model, global_windows=True, drop="all"))["layers.0.blocks.0.attn"](torch.zeros(4, 16, 32))


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence", "ignore:torch.searchsorted")  # timm's table resize
@pytest.mark.parametrize("global_windows", [False, True])
@pytest.mark.parametrize(
    ("name", "args", "bias"),
    [
        pytest.param(SWIN, SWIN_ARGS, "relative_position_bias_table", id="swin"),
        pytest.param(V2, V2_ARGS, "cpb_mlp", id="v2"),
        pytest.param(
            "beit_base_patch16_224",
            {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 2},
            "relative",
            id="beit",
        ),
        pytest.param(
            "vit_relpos_base_patch16_cls_224",
            {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 2, "rel_pos_type": "bias"},
            "rel_pos",
            id="relpos",
        ),
    ],
)
def test_other_image_sizes(name: str, args: dict[str, Any], bias: str, global_windows: bool, tmp_path: Path) -> None:
    model = build(name, **args)
    size = (2 * args["img_size"], 3 * args["img_size"])
    x = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    loaded = {}
    for op in ("softmax", "relu", "source"):
        made = model
        if op == "relu":
            made = linearize(model, op, drop="all", global_windows=global_windows).eval()
            assert not any(bias in key for key in made.state_dict())
        elif op == "softmax":
            made = linearize(model, op).eval()
        timm.models.save_for_hf(made, str(tmp_path / op), safe_serialization=True)
        loaded[op] = timm.create_model(f"local-dir:{tmp_path / op}", pretrained=True, img_size=size).eval()
    with torch.no_grad():
        wanted = loaded["source"](x)
        torch.testing.assert_close(loaded["softmax"](x), wanted, atol=1e-5, rtol=1e-5)
        assert loaded["relu"](x).isfinite().all()
        # The same in place, and timm's repair of buffers that are not in the file.
        resized = linearize(model, "relu", drop="all", global_windows=global_windows).eval()
        resized.set_input_size(size)  # type: ignore[operator]
        before = resized(x)
        if not name.startswith("swin") or global_windows:  # Swin's windows grow with the image, unless it is built anew
            torch.testing.assert_close(before, loaded["relu"](x), atol=1e-5, rtol=1e-5)
        reinit_non_persistent_buffers(resized)
        assert torch.equal(resized(x), before)
        timm.models.save_for_hf(resized, str(tmp_path / "resized"), safe_serialization=True)
        again = timm.create_model(f"local-dir:{tmp_path / 'resized'}", pretrained=True).eval()
        assert torch.equal(again(x), before)


def test_a_bias_for_all_blocks_goes_when_all_blocks_give_it_up() -> None:
    model = build("vit_srelpos_small_patch16_224", img_size=64, embed_dim=48, num_heads=3, depth=3, rel_pos_dim=16)
    plan = make_plan(model, [Rule(drop=("all",))])
    student = apply_plan(model, plan).eval()
    assert student.shared_rel_pos is None and plan.drop_keys == {"shared_rel_pos"}
    assert all(key.startswith("shared_rel_pos.") for key in audit(model.state_dict(), student, plan, False).dropped)
    some = make_plan(model, [Rule(KEEP, "blocks.2.*"), Rule(drop=("all",))])
    student = apply_plan(model, some).eval()
    assert student.shared_rel_pos is not None and not some.drop_keys
    assert not audit(model.state_dict(), student, some, False).dropped
