from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from vit2linear.distill.forward import run
from vit2linear.errors import DistillError
from vit2linear.evaluation import ImageRequest, open_judge
from vit2linear.hybrid import site_costs
from vit2linear.model import load
from vit2linear.plan import make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import Rule, read_recipe
from vit2linear.resolve import layout_of, resolve
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan


def costs_on_stored_inputs(source: nn.Module, pixels: Tensor, **rule: object) -> dict[str, float]:
    """The plain way: keep what every attention module of the source gets and gives, then convert it alone."""
    plan = make_plan(source, [Rule(**rule)])  # type: ignore[arg-type]
    teacher, student = apply_plan(source, plan.with_operator("softmax")).eval(), apply_plan(source, plan).eval()
    seen: dict[str, tuple[Any, Any, Any]] = {}
    for path, module in sites_of(teacher).items():
        module.register_forward_hook(
            lambda _, args, kwargs, output, path=path: seen.update({path: (args, kwargs, output)}), with_kwargs=True
        )
    costs = {}
    with torch.no_grad():
        run(teacher, pixels, {})
        run(student, pixels, {})  # for the grids
        for path, site in sites_of(student).items():
            args, kwargs, output = seen[path]
            mine, theirs = (site.kind.answer(args[0], y).flatten(1) for y in (site(*args, **kwargs), output))
            costs[path] = float(((mine - theirs).square().sum(1) / theirs.square().sum(1)).mean())
    return costs


def test_the_costliest_sites_keep_the_softmax(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    small = ["--data", class_folders, "--distill-steps", 0, "--calibrate", 0, "-j", 0, "--device", "cpu", "-o", "out"]
    said = cli("convert", checkpoint, "--op", "elu", "--keep-softmax", 2, *small).stderr
    ref = resolve(str(checkpoint))
    source = load(ref, layout_of(ref).spec(ref)).module
    config = resolve_model_data_config(source)
    images = open_judge(ImageRequest(str(class_folders)), config, 5, None, workers=0).sample(256)[0]
    costs = costs_on_stored_inputs(source, images, op="elu")
    costliest = sorted(costs, key=lambda path: -costs[path])
    report = json.loads(Path("out/report.json").read_text())
    assert report["keep_softmax"]["images"] == len(images) == 24
    assert list(report["keep_softmax"]["costs"]) == costliest
    assert report["keep_softmax"]["costs"] == pytest.approx(costs, rel=1e-3)
    assert report["keep_softmax"]["kept"] == sorted(costliest[:2])
    assert {p["site"]["path"] for p in report["plan"] if p["op"] == "keep"} == set(costliest[:2])
    assert report["audit"]["softmax_left"] == 2
    for i, path in enumerate(costliest):
        keeps = ": it keeps the softmax" if i < 2 else ""
        cost = report["keep_softmax"]["costs"][path]
        assert f"converting {path} leaves {cost:.1%} of its output unexplained{keeps}\n" in said
    assert all(f"`{path}`" in Path("out/README.md").read_text() for path in costliest[:2])


def test_the_written_recipe_gives_the_same_weights(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    """With an operator that is drawn at random, and rules of which some have no site left after the choice."""
    rules = [f'[[convert]]\nsites = "blocks.{i}.attn"\nop = "performer"\n' for i in range(4)]
    Path("hybrid.toml").write_text("keep_softmax = 2\n" + "".join(rules))
    small = ["--data", class_folders, "--distill-steps", 2, "-b", 4, "-j", 0, "--device", "cpu"]
    cli("convert", checkpoint, "--recipe", "hybrid.toml", *small, "-o", "a")
    recipe = read_recipe("a/recipe.toml")
    kept = json.loads(Path("a/report.json").read_text())["keep_softmax"]["kept"]
    assert recipe.keep_softmax == 0 and [r.sites for r in recipe.convert[:2]] == kept
    assert [r.op for r in recipe.convert] == ["keep", "keep", "performer", "performer"]
    cli("convert", "--recipe", "a/recipe.toml", "-o", "b")
    assert json.loads(Path("b/report.json").read_text())["keep_softmax"] is None
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()


def test_sites_by_name(checkpoint: Path, cli: Run) -> None:
    def kept(*args: object) -> list[int]:
        plan = json.loads(cli("convert", checkpoint, "--dry-run", "--json", *args).stdout)["plan"]
        return [i for i, site in enumerate(plan) if site["op"] == "keep"]

    assert kept("--op", "elu", "--keep-softmax", "blocks.3.attn") == [3]
    assert kept("--keep-softmax", "blocks.0.attn, blocks.[12].*") == [0, 1, 2]
    assert kept("--keep-softmax", "blocks.0.attn", "--keep-softmax", "blocks.3.attn") == [0, 3]
    shown = cli("convert", checkpoint, "--keep-softmax", "1,blocks.3.attn", "--dry-run").stderr
    assert "the rules convert 3 sites; the 1 costliest, measured on images, keep the softmax" in shown


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            "4",
            "4 sites are to keep the softmax and the rules convert 4, so there is nothing to convert. Keep at most 3",
        ),
        ("3,blocks.0.attn", "the rules convert 3, so there is nothing to convert. Keep at most 2"),
        ("blocks.?.attn", "no site is left for the rule '*'"),
        ("blocks.7.attn", "no site is left for the rule 'blocks.7.attn'"),
        ("-1", "keep_softmax: -1 is out of range"),
        ("1,2", "'1,2' is not a number of sites, nor a list of sites"),
        ("blocks.1.attn,", "is not a number of sites, nor a list of sites"),
    ],
)
def test_bad_requests(given: str, text: str, checkpoint: Path, cli: Run) -> None:
    """Refused where there are no weights to read yet."""
    Path("source").mkdir()
    Path("source/config.json").write_bytes((checkpoint / "config.json").read_bytes())
    assert text in cli("convert", "source", "--keep-softmax", given, code=2).stderr
    assert [path.name for path in Path().iterdir()] == ["source"]


@pytest.mark.parametrize("module", ["beit", "crossvit", "swin_transformer", "tnt", "vision_transformer_sam"])
def test_costs_are_those_of_sites_on_their_own(module: str) -> None:
    name, args = families.cases(module)[0]
    source = families.build(name, **args)
    plan = make_plan(source, [Rule(drop=("all",))])
    teacher, student = apply_plan(source, plan.with_operator("softmax")).eval(), apply_plan(source, plan).eval()
    pixels = torch.randn(6, *example_pixels(source).shape[1:], generator=torch.Generator().manual_seed(0))
    wanted = costs_on_stored_inputs(source, pixels, drop=("all",))
    assert site_costs(teacher, student, pixels) == pytest.approx(wanted, rel=1e-2, abs=1e-7)


def test_what_is_not_finite_is_named() -> None:
    name, args = families.cases("vision_transformer")[0]
    source = families.build(name, **args)
    plan = make_plan(source, [Rule()])
    teacher, student = apply_plan(source, plan.with_operator("softmax")).eval(), apply_plan(source, plan).eval()
    sites_of(student)["blocks.1.attn"].proj.weight.data[0, 0] = float("inf")
    with pytest.raises(DistillError, match=r"of blocks\.1\.attn is not finite .*--keep-softmax 'blocks.1.attn'"):
        site_costs(teacher, student, torch.randn(2, *example_pixels(source).shape[1:]))
