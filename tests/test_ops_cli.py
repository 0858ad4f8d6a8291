from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

import pytest
import timm
import torch

from tests.conftest import Run
from vit2linear import linearize
from vit2linear.catalogue import facts
from vit2linear.errors import RecipeError, UnknownNameError
from vit2linear.plan import make_plan
from vit2linear.probe import probe
from vit2linear.recipe import OPERATORS, Rule
from vit2linear.site import sites_of

EXTERNAL = """
from torch.nn import functional as F
from vit2linear.ops.base import SumRule

class Squared(SumRule):
    '''phi(x) = relu(x)^2.'''
    name, family, summary, reference = "squared", "kernel", "phi(x) = relu(x)^2", "nowhere"

    def features(self, q, k, ctx):
        return F.relu(q).square(), F.relu(k).square()

class Half(SumRule):
    '''Lacks features.'''
    name = "half"

NOT_AN_OPERATOR = 3
"""


@pytest.fixture
def external(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_ops.py").write_text(textwrap.dedent(EXTERNAL))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "their_ops", raising=False)
    return "their_ops"


def test_list_and_show(cli: Run) -> None:
    listed = json.loads(cli("ops", "--json").stdout)["ops"]
    assert [o["name"] for o in listed] == OPERATORS.names() and len(listed) >= 23
    assert all(o["family"] and o["summary"] and "arXiv" in o["reference"] for o in listed)
    text = cli("ops").stdout
    assert "hedgehog" in text
    shown = cli("ops", "show", "agent").stdout
    assert "landmarks" in shown and "Paper: " in shown
    assert json.loads(cli("ops", "show", "relu", "--json").stdout)["parameters"] == "0"
    assert "Did you mean 'performer'" in cli("ops", "show", "perfomer", code=2).stderr


def test_options_are_typed_and_validated() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, num_heads=3, depth=2)
    with pytest.raises(RecipeError, match=r"operator 'agent': landmarks: 'many' is not an integer"):
        make_plan(model, [Rule(op="agent", options={"landmarks": "many"})])
    with pytest.raises(RecipeError, match=r"landmark: unknown key; did you mean 'landmarks'"):
        make_plan(model, [Rule(op="agent", options={"landmark": 9})])
    with pytest.raises(RecipeError, match="agent"):
        make_plan(model, [Rule(op="agent", options={"landmarks": 0})])


def test_options_on_the_command_line(checkpoint: Path, cli: Run) -> None:
    args = ["convert", checkpoint, "--op", "agent", "--dry-run", "--json"]
    plan = json.loads(cli(*args, "--option", "landmarks=2", "--option", "bias=true").stdout)["plan"]
    assert plan[0]["options"] == {"landmarks": 2, "bias": True} and plan[0]["evaluation"] == "linear order, 2 landmarks"
    assert "is not KEY=VALUE" in cli(*args, "--option", "landmarks", code=2).stderr
    assert "landmarks: 'two' is not an integer" in cli(*args, "--option", "landmarks=two", code=2).stderr


def test_modifiers_change_the_plan_of_a_recipe(checkpoint: Path, cli: Run) -> None:
    Path("recipe.toml").write_text('[[convert]]\nsites = "blocks.0.*"\nop = "elu"\n[[convert]]\nop = "mala"\n')
    done = cli("convert", checkpoint, "--recipe", "recipe.toml", "--local", "dwc3", "--dry-run", "--json")
    plan = json.loads(done.stdout)["plan"]
    assert [p["op"] for p in plan] == ["elu", "mala", "mala", "mala"]
    assert all(p["modifiers"]["local"] == "dwc3" for p in plan)


def test_the_plan_names_order_and_landmarks() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_base_patch16_224", depth=1)
    evaluations = {
        op: probe(model, make_plan(model, [Rule(op=op)])).sites["blocks.0.attn"].evaluation
        for op in ("relu", "agent", "taylor2", "rela")
    }
    assert evaluations == {
        "relu": "linear order",
        "agent": "linear order, 49 landmarks",
        "taylor2": "quadratic order",
        "rela": "quadratic order",
    }


def test_modifiers_survive_the_disk(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    small = ["--data", class_folders, "--distill-steps", 2, "-b", 4, "-j", 0, "--device", "cpu"]
    cli("convert", checkpoint, "--op", "hedgehog", "--local", "dwc3", "--center-keys", *small)
    model = timm.create_model("local-dir:tiny-hedgehog", pretrained=True)
    site = sites_of(model)["blocks.2.attn"]
    assert site.op.center_keys and site.op.local is not None and site.op.local.conv.weight.any(), "it was trained"
    report = json.loads(Path("tiny-hedgehog/report.json").read_text())
    assert all(".op." in key for key in report["audit"]["new"]) and len(report["audit"]["new"]) >= 16
    assert "--local" in cli("convert", "--help").stdout
    assert "'dwc9' is not one of" in cli("convert", checkpoint, "--op", "relu", "--local", "dwc9", code=2).stderr


def test_operators_of_other_packages(external: str, checkpoint: Path, class_folders: Path, cli: Run) -> None:
    name = f"{external}:Squared"
    assert facts(name)["summary"] == "phi(x) = relu(x)^2"
    small = ["--data", class_folders, "--distill-steps", 2, "-b", 4, "-j", 0, "--device", "cpu"]
    cli("convert", checkpoint, "--op", name, *small)
    model = timm.create_model("local-dir:tiny-squared", pretrained=True)
    assert type(sites_of(model)["blocks.0.attn"].op).__name__ == "Squared"
    for bad, text in (
        (f"{external}:Absent", "cannot be found"),
        ("no.such.module:X", "cannot be found"),
        (f"{external}:NOT_AN_OPERATOR", "is not a complete"),
        (f"{external}:Half", "is not a complete"),
    ):
        with pytest.raises(RecipeError, match=text):
            OPERATORS.get(bad)


def test_entry_points_give_short_names(external: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPERATORS, "_announced", lambda: {"squared": f"{external}:Squared"})
    assert "squared" in OPERATORS.names()
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, num_heads=3, depth=2)
    assert type(sites_of(linearize(model, "squared"))["blocks.0.attn"].op).__name__ == "Squared"
    with pytest.raises(UnknownNameError, match="Did you mean 'squared'"):
        linearize(model, "squarred")


@pytest.mark.parametrize("op", [n for n in OPERATORS.names() if n != "softmax"])
def test_every_operator_reloads_at_another_resolution(op: str, tmp_path: Path) -> None:
    """Saved at 64 px, loaded at 64 x 96: parameters that belong to a grid follow it."""
    from timm.models import save_for_hf

    torch.manual_seed(0)
    source = timm.create_model("vit_tiny_patch16_224", img_size=64, embed_dim=48, num_heads=3, depth=3, reg_tokens=2)
    model = linearize(source, op, local="dwc5").eval()
    save_for_hf(model, tmp_path / "a", safe_serialization=True)
    same = timm.create_model(f"local-dir:{tmp_path / 'a'}", pretrained=True).eval()
    wide = timm.create_model(f"local-dir:{tmp_path / 'a'}", pretrained=True, img_size=(64, 96)).eval()
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        assert torch.equal(same(x), model(x))
        assert wide(torch.randn(2, 3, 64, 96)).isfinite().all()
