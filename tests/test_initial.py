from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from vit2linear.audit import audit
from vit2linear.errors import SurgeryError
from vit2linear.initial import copied_keys, drawn_weights, start_words
from vit2linear.mimetic import mimetic_weights
from vit2linear.model import fresh, skeleton
from vit2linear.plan import Plan, make_plan
from vit2linear.recipe import Rule, SourceOptions, read_recipe
from vit2linear.resolve import DEMO_FOLDER
from vit2linear.sources.base import ModelSpec
from vit2linear.surgery import apply_plan

SMALL: dict[str, Any] = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 3, "num_classes": 5}
HEAD = {"head.weight", "head.bias"}
MLPS = {f"blocks.{i}.mlp.{layer}.{w}" for i in range(3) for layer in ("fc1", "fc2") for w in ("weight", "bias")}
QKV = {f"blocks.{i}.attn.{norm}" for i in range(3) for norm in ("qkv.weight", "qkv.bias")} | {
    f"blocks.{i}.attn.{side}_norm.{w}" for i in range(3) for side in "qk" for w in ("weight", "bias")
}
COPIED = {"mlp": MLPS, "attention": QKV, "random": set[str](), "mimetic": set[str]()}


def options(init: str = "full", head: str = "copy") -> SourceOptions:
    return SourceOptions("any", init=init, head=head)  # type: ignore[arg-type]


def source(name: str = "vit_tiny_patch16_224", **args: Any) -> tuple[nn.Module, ModelSpec, Plan]:
    """A model whose every weight differs from any that timm draws, how it is built, and a plan with a kept site."""
    args = {**SMALL, **args}
    model = families.build(name, **args)
    for parameter in model.parameters():
        parameter.data.add_(torch.rand_like(parameter))
    plan = make_plan(model, [Rule(sites="blocks.0.*", op="keep"), Rule(op="hedgehog")])
    return model, ModelSpec(name, args, dict(model.pretrained_cfg)), plan  # type: ignore[arg-type]


@pytest.mark.parametrize("head", ["copy", "random"])
@pytest.mark.parametrize("init", [*COPIED, "full"])
def test_the_student_starts_from_what_the_mode_copies(init: str, head: str) -> None:
    model, spec, plan = source(qk_norm=True)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    drawn = drawn_weights(model, spec, plan, options(init, head), seed=3)
    student = apply_plan(model, plan)
    student.load_state_dict(drawn, strict=False)
    mine = student.state_dict()
    equal = {k for k, v in before.items() if torch.equal(mine[k], v)}
    body = COPIED.get(init, before.keys() - HEAD)
    assert equal == body | (HEAD if head == "copy" else set())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()), "the source is the teacher's"
    found = audit(before, student, plan, trained=False, drawn=drawn)
    assert set(found.copied) == equal and set(found.drawn) == before.keys() - equal and not found.trained
    assert found.new and all(".op." in key for key in found.new)


def test_the_audit_tells_drawn_from_trained_from_wrong() -> None:
    model, spec, plan = source()
    drawn = drawn_weights(model, spec, plan, options("mlp"), seed=0)
    student = apply_plan(model, plan)
    with pytest.raises(SurgeryError, match=r"nothing was trained, yet weights differ: blocks\.0\.attn\.proj"):
        audit(model.state_dict(), student, plan, trained=False, drawn=drawn)  # still the source's weights
    student.load_state_dict(drawn, strict=False)
    student.blocks[1].mlp.fc1.weight.data.add_(1)  # copied
    student.blocks[1].attn.qkv.weight.data.add_(1)  # drawn
    with pytest.raises(SurgeryError, match=r"yet weights differ: blocks\.1\.attn\.qkv\.weight, blocks\.1\.mlp\.fc1"):
        audit(model.state_dict(), student, plan, trained=False, drawn=drawn)
    found = audit(model.state_dict(), student, plan, trained=True, drawn=drawn)
    assert found.trained == ("blocks.1.mlp.fc1.weight",) and set(found.drawn) == drawn.keys()


@pytest.mark.parametrize("init", ["random", "mimetic"])
def test_the_same_seed_draws_the_same_and_leaves_the_random_state(init: str) -> None:
    model, spec, plan = source()
    state = torch.get_rng_state()
    first = drawn_weights(model, spec, plan, options(init), seed=1)
    assert torch.equal(state, torch.get_rng_state())
    torch.rand(7)
    again, other = (drawn_weights(model, spec, plan, options(init), seed) for seed in (1, 2))
    assert first.keys() == again.keys() and all(torch.equal(v, again[k]) for k, v in first.items())
    assert not any(torch.equal(first[k], other[k]) for k in first if k.endswith("qkv.weight"))


def test_mimetic_products_have_the_diagonals_of_the_paper() -> None:
    model, _, plan = source(embed_dim=96)
    weights = mimetic_weights(model, plan, seed=0)
    eye = torch.eye(96)
    noises = []
    for i in range(3):
        q, k, v = weights[f"blocks.{i}.attn.qkv.weight"].chunk(3)
        # x W^T is timm's projection: the paper's W_V W_proj is the transpose of proj @ v.
        noise = (weights[f"blocks.{i}.attn.proj.weight"] @ v).T / 0.4 + eye
        assert noise.std() * 96**0.5 == pytest.approx(1, abs=0.05) and noise.mean().abs() < 0.01
        noises.append(noise)
        for head in range(3):
            rows = slice(32 * head, 32 * (head + 1))
            product = q[rows].T @ k[rows]
            assert torch.linalg.matrix_rank(product) == 32
            diagonal = product.diagonal().mean()
            assert diagonal > 0.2 and product[eye == 0].mean().abs() < 0.01 * diagonal
            # What is left out of rank 32 is orthogonal to it, so both sides have the same singular values.
            torch.testing.assert_close(q[rows] @ q[rows].T, k[rows] @ k[rows].T, atol=1e-4, rtol=1e-4)
    assert (noises[0] - noises[1]).std() > 0.1, "every site draws its own"


def test_mimetic_heads_are_the_best_approximation() -> None:
    """With one head nothing is cut off, and the product is 0.7 (Z + I) itself."""
    model, _, plan = source(num_heads=1)
    q, k, _ = mimetic_weights(model, plan, seed=0)["blocks.1.attn.qkv.weight"].chunk(3)
    noise = q.T @ k / 0.7 - torch.eye(48)
    assert noise.std() * 48**0.5 == pytest.approx(1, abs=0.05) and noise.diagonal().mean().abs() < 0.1
    assert q.square().sum(1).argsort(descending=True).tolist() == list(range(48)), "largest singular values first"


def test_mimetic_position_embeddings_are_sines_of_rows_and_columns() -> None:
    model, _, plan = source(img_size=(64, 96))
    embedding = mimetic_weights(model, plan, seed=0)["pos_embed"]
    assert embedding.shape == (1, 25, 48) and not embedding[0, 0].any()
    patches = embedding[0, 1:].unflatten(0, (4, 6))
    similar: Tensor = torch.einsum("d,rcd->rc", patches[2, 3], patches)
    assert similar.flatten().argmax() == 2 * 6 + 3
    assert similar[2, 3] > similar[2, 4] > similar[2, 5] and similar[2, 3] > similar[1, 3] > similar[0, 3]
    torch.testing.assert_close(patches[1, 2] - patches[1, 0], patches[3, 2] - patches[3, 0])  # rows and columns apart
    assert "pos_embed" not in mimetic_weights(*source(pos_embed="none")[::2], seed=0)


@pytest.mark.parametrize("module", families.MODULES)
def test_every_family_is_told_apart_or_refused(module: str) -> None:
    """Without weights: no block is forgotten, nothing is both MLP and attention, and a refusal names the kind."""
    for name, args in families.cases(module):
        with torch.device("meta"):
            model = timm.create_model(name, **args)
        plan = make_plan(model, [Rule(op="keep")])
        head = copied_keys(model, plan, options("random"))
        assert bool(head) == bool(getattr(model, "num_classes", 0)), name
        assert copied_keys(model, plan, options("full", "random")) == model.state_dict().keys() - head
        found = {}
        for init in ("mlp", "attention", "mimetic"):
            try:
                found[init] = copied_keys(model, plan, options(init)) - head
            except SurgeryError as error:
                assert any(f"kind {s.site.kind!r}" in str(error) for s in plan.sites)
        assert ("mlp" in found) == ("attention" in found) == ("block" not in plan.sites[0].site.kind)
        for site in (s.site for s in plan.sites if "mlp" in found):
            assert any(key.startswith(f"{site.path}.") for key in found["attention"]), site
            block = site.path.rpartition(".")[0].replace(".attns.", ".ffns.")
            assert any(key.startswith(f"{block}.") for key in found["mlp"]), site
        assert not found.get("mlp", frozenset()) & found.get("attention", frozenset())


def test_what_does_not_suit_a_kind_is_refused() -> None:
    with torch.device("meta"):
        block = timm.create_model("vit_base_patch16_xp_224", **SMALL)
        separate = timm.create_model("eva02_base_patch16_clip_224", **SMALL)
    for init in ("mlp", "attention"):
        with pytest.raises(SurgeryError, match=f"blocks.0: init '{init}' .* kind 'parallel_block' are whole blocks"):
            copied_keys(block, make_plan(block, [Rule()]), options(init))
    with pytest.raises(SurgeryError, match=r"blocks.0.attn: init 'mimetic' needs .* kind 'eva' have others"):
        copied_keys(separate, make_plan(separate, [Rule()]), options("mimetic"))


def test_words() -> None:
    assert start_words(options(), False) == "everything else copied"
    assert start_words(options(head="random"), False) == "everything else copied but the class head, drawn anew"
    assert start_words(options(head="random"), True) == "everything else copied"
    assert start_words(options("mlp"), False) == "only the MLPs and the class head copied, the rest drawn anew"
    assert start_words(options("random"), True) == "nothing copied, the rest drawn anew"


def test_on_the_command_line(cli: Run) -> None:
    small = ["convert", "demo", "--op", "relu", "--distill-steps", 0, "--calibrate", 0, "--num-samples", 8, "-j", 0]
    mode = ["--init", "mlp", "--head", "random", "--device", "cpu"]
    words = "only the MLPs copied, the rest drawn anew"
    assert words in cli(*small, *mode, "-o", "a").stderr
    report = json.loads(Path("a/report.json").read_text())
    assert report["start"] == {"init": "mlp", "head": "random", "words": words}
    assert words in Path("a/README.md").read_text().replace("\n", " ")
    mine, theirs = load_file("a/model.safetensors"), load_file(DEMO_FOLDER / "model.safetensors")
    copied = {k for k in theirs if ".mlp." in k}
    assert set(report["audit"]["copied"]) == copied and not report["audit"]["trained"]
    assert set(report["audit"]["drawn"]) == theirs.keys() - copied
    assert all(torch.equal(mine[k].float(), theirs[k].float()) for k in copied)
    assert not torch.equal(mine["head.weight"].float(), theirs["head.weight"].float())
    assert replace(read_recipe("a/recipe.toml").source, model="any") == options("mlp", "random")
    assert words in cli("convert", "--recipe", "a/recipe.toml", "-o", "b", "--dry-run").stderr
    assert "'rnd' is not one of" in cli(*small, "--init", "rnd", code=2).stderr


def test_the_skeleton_has_the_keys_that_are_drawn() -> None:
    model, spec, plan = source(img_size=(64, 96))
    spec = replace(spec, model_args={**spec.model_args, "norm_eps": 1e-3})
    drawn = drawn_weights(model, spec, plan, options("random", "random"), seed=0)
    assert fresh(spec, seed=0).norm.eps == 1e-3
    assert {k: v.shape for k, v in skeleton(spec).state_dict().items()} == {k: v.shape for k, v in drawn.items()}
