from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from vit2linear.distill.calibrate import calibrate
from vit2linear.distill.forward import run
from vit2linear.evaluation import open_judge
from vit2linear.model import load
from vit2linear.plan import make_plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import Calibration, Rule
from vit2linear.reporting import Reporter
from vit2linear.resolve import layout_of, resolve
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan


def pair(op: str, name: str = "vit_tiny_patch16_224", **args: object) -> tuple[nn.Module, nn.Module, Tensor]:
    """Teacher, student and pixels."""
    size = {"img_size": 64, "embed_dim": 48, "num_heads": 3, "depth": 3, **args}
    model = families.build(name, **size)
    plan = make_plan(model, [Rule(op=op)])
    pixels = torch.randn(40, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    return apply_plan(model, plan.with_operator("softmax")).eval(), apply_plan(model, plan).eval(), pixels


@pytest.fixture(scope="module")
def demo() -> tuple[nn.Module, Tensor]:
    """The packaged model, and some of its images."""
    ref = resolve("demo")
    loaded = load(ref, layout_of(ref).spec(ref))
    config = resolve_model_data_config(loaded.module)
    return loaded.module, open_judge("demo", config, 10, None, workers=0, ignore_labels=True).sample(120)[0]


@pytest.mark.parametrize("op", ["relu", "inline", "agent", "ttt"])
def test_held_out_features_come_closer(op: str, demo: tuple[nn.Module, Tensor]) -> None:
    model, pixels = demo
    plan = make_plan(model, [Rule(op=op)])
    teacher, student = apply_plan(model, plan.with_operator("softmax")).eval(), apply_plan(model, plan).eval()
    before = {k: v.clone() for k, v in student.state_dict().items()}
    report = calibrate(teacher, student, pixels, Calibration(), Reporter())
    errors = [report.error_before, *(fit.error for fit in report.sites.values())]
    assert errors == sorted(errors, reverse=True) and errors[-1] == report.error_after < 0.9 * errors[0]
    held = pixels[-report.held_out :]
    with torch.no_grad():
        (mine,), (theirs,) = run(student, held, {}).tokens, run(teacher, held, {}).tokens
    error = (mine - theirs).square().flatten(1).sum(1) / theirs.square().flatten(1).sum(1)
    assert float(error.mean()) == pytest.approx(report.error_after, rel=1e-4)
    changed = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    kept = {path for path, fit in report.sites.items() if fit.ridge is None}
    assert changed == {f"{p}.proj.{w}" for p in set(report.sites) - kept for w in ("weight", "bias")}


def test_nothing_is_changed_where_nothing_is_wrong() -> None:
    teacher, student, pixels = pair("softmax")
    before = {k: v.clone() for k, v in student.state_dict().items()}
    report = calibrate(teacher, student, pixels, Calibration(), Reporter())
    assert report.error_before == report.error_after == 0 and all(f.ridge is None for f in report.sites.values())
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())


def test_the_fit_is_the_least_squares_solution() -> None:
    """One site, next to no ridge: as torch's own solver finds it from all tokens, bias and all."""
    teacher, student, pixels = pair("relu", depth=1)
    site, theirs = sites_of(student)["blocks.0.attn"], sites_of(teacher)["blocks.0.attn"]
    seen: dict[str, Tensor] = {}
    site.proj.register_forward_hook(lambda m, args, out: seen.update(h=args[0].detach()))
    theirs.proj.register_forward_hook(lambda m, args, out: seen.update(y=out.detach()))
    fit = pixels[:32]
    pixels = torch.cat([fit, fit[:8]])  # what is held out is no surprise here, so that the fit is accepted
    with torch.no_grad():
        run(teacher, fit, {}), run(student, fit, {})
    h = torch.cat([seen["h"].flatten(0, 1), torch.ones(seen["h"].flatten(0, 1).shape[0], 1)], 1).double()
    wanted = torch.linalg.lstsq(h, seen["y"].flatten(0, 1).double()).solution.T
    report = calibrate(teacher, student, pixels, Calibration(ridges=(1e-9,), corrections=(0.0,)), Reporter())
    assert report.images == 32 and report.sites["blocks.0.attn"].ridge == 1e-9
    torch.testing.assert_close(site.proj.weight.double(), wanted[:, :-1], atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(site.proj.bias.double(), wanted[:, -1], atol=1e-3, rtol=1e-3)


def test_same_images_same_weights() -> None:
    found = []
    for _ in range(2):
        teacher, student, pixels = pair("elu")
        calibrate(teacher, student, pixels, Calibration(), Reporter())
        found.append(student.state_dict())
    assert all(torch.equal(v, found[1][k]) for k, v in found[0].items())


@pytest.mark.parametrize("module", families.MODULES)
def test_every_kind_is_calibrated_or_left(module: str) -> None:
    name, args = families.cases(module)[0]
    model = families.build(name, **args)
    plan = make_plan(model, [Rule(drop=("all",))])
    teacher, student = apply_plan(model, plan.with_operator("softmax")).eval(), apply_plan(model, plan).eval()
    pixels = torch.randn(6, *example_pixels(model).shape[1:], generator=torch.Generator().manual_seed(0))
    report = calibrate(teacher, student, pixels, Calibration(ridges=(1.0,), corrections=(0.0,)), Reporter())
    assert report.error_after <= report.error_before


def test_on_the_command_line(checkpoint: Path, class_folders: Path, cli: Run) -> None:
    small = ["--data", class_folders, "--distill-steps", 0, "-b", 4, "-j", 0, "--device", "cpu"]
    cli("convert", checkpoint, "--op", "relu", "--calibrate", 10, "-o", "a", *small)
    cli("convert", checkpoint, "--op", "relu", "--calibrate", 0, "-o", "b", *small)
    a, b = (json.loads(Path(name, "report.json").read_text()) for name in "ab")
    (report,) = a["calibration"].values()
    assert report["images"] == 8 and report["held_out"] == 2
    assert [h["moment"] for h in a["history"]] == ["before training", "after calibration"]
    assert not b["calibration"] and len(b["history"]) == 1 and not b["audit"]["trained"]
    assert "needs at least 2" in cli("convert", checkpoint, "--op", "relu", "--calibrate", 1, *small, code=5).stderr
    assert set(a["audit"]["trained"]) <= {f"blocks.{i}.attn.proj.{w}" for i in range(4) for w in ("weight", "bias")}
