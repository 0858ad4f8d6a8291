from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from vit2linear.calibration.calibrate import BATCH, CRITERION, calibrate
from vit2linear.calibration.heads import HeadFit, apply
from vit2linear.calibration.ridge import Tokens, best_step
from vit2linear.calibration.steps import SteppedForward
from vit2linear.distill.forward import run
from vit2linear.evaluation import ImageRequest, open_judge
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
    return loaded.module, open_judge(ImageRequest("demo"), config, 10, None, workers=0).sample(120)[0]


@pytest.mark.parametrize("op", ["relu", "inline", "agent", "ttt"])
def test_held_out_features_come_closer(op: str, demo: tuple[nn.Module, Tensor]) -> None:
    model, pixels = demo
    plan = make_plan(model, [Rule(op=op)])
    teacher, student = apply_plan(model, plan.with_operator("softmax")).eval(), apply_plan(model, plan).eval()
    before = {k: v.clone() for k, v in student.state_dict().items()}
    report = calibrate(teacher, student, pixels, Calibration(), Reporter())
    assert report.error_after < 0.9 * report.error_before
    held = pixels[-report.held_out :]
    with torch.no_grad():
        found = [CRITERION(run(student, x, {}), run(teacher, x, {})) * len(x) for x in held.split(BATCH)]
    assert float(sum(found)) / len(held) == pytest.approx(report.error_after, rel=1e-4)
    changed = {k for k, v in student.state_dict().items() if not torch.equal(v, before[k])}
    fitted = [path for path, fit in report.layers.items() if fit.ridge is not None]
    mapped = {path.replace("proj", "qkv"): fit.heads for path, fit in report.layers.items() if fit.heads is not None}
    wanted = {f"{path}.{w}" for path in fitted for w in ("weight", "bias")} | {f"{path}.bias" for path in mapped}
    assert changed == wanted | {f"{path}.weight" for path, heads in mapped.items() if heads.scale != 1}
    assert {path.rpartition(".")[2] for path in fitted} == {"proj", "fc2"} and all(
        0 < report.layers[path].unexplained < 1 for path in fitted
    )


def test_nothing_is_changed_where_nothing_is_wrong() -> None:
    teacher, student, pixels = pair("softmax")
    before = {k: v.clone() for k, v in student.state_dict().items()}
    report = calibrate(teacher, student, pixels, Calibration(), Reporter())
    assert report.error_before == report.error_after == pytest.approx(0, abs=1e-5) and not report.layers
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())


class FirstChannel(nn.Module):
    """Of the final features only one channel is left."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.arange(x.shape[-1]) == 0)


def test_fits_that_do_not_help_the_model_are_refused() -> None:
    """The student errs in channels that nobody reads: its last layer can be fitted, and the features gain nothing."""
    teacher, student, pixels = pair("softmax")
    teacher.norm, student.norm = FirstChannel(), FirstChannel()
    student.blocks[-1].mlp.fc2.weight.data[1:] *= 0.5
    before = {k: v.clone() for k, v in student.state_dict().items()}
    said: list[str] = []
    reporter = Reporter()
    reporter.say = said.append  # type: ignore[method-assign]
    report = calibrate(teacher, student, pixels, Calibration(), reporter)
    made_good = re.fullmatch(r"calibrated blocks\.2\.mlp\.fc2: (\d+)% of the error made good", said[-2])
    assert made_good is not None and int(made_good[1]) > 50
    assert said[-1].startswith("calibration refused: ")
    assert report.error_after == report.error_before and not report.layers
    assert all(torch.equal(v, before[k]) for k, v in student.state_dict().items())


@pytest.mark.parametrize("bias", [True, False])
def test_a_step_is_the_weighted_least_squares_solution(bias: bool) -> None:
    """Next to no ridge: as torch's own solver finds it from all tokens."""
    g = torch.Generator().manual_seed(0)
    batches = [
        Tokens(torch.randn(50, 6, generator=g) + 2, torch.randn(50, 4, generator=g), torch.rand(50, generator=g))
        for _ in range(4)
    ]
    step = best_step(batches, batches[:1], (1e-9, 1e3), bias)
    h, r, w = (torch.cat([getattr(b, n) for b in batches]).double() for n in ("inputs", "missing", "weight"))
    h = torch.cat([h, torch.ones(200, 1).double()], 1) if bias else h
    root = w.sqrt()[:, None]
    wanted = torch.linalg.lstsq(root * h, root * r).solution.T
    torch.testing.assert_close(step.weight, wanted[:, :6], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(step.bias, wanted[:, 6] if bias else torch.zeros(4).double(), atol=1e-6, rtol=1e-6)
    assert step.ridge == 1e-9 and step.error < step.error_without


def test_a_large_pull_changes_next_to_nothing() -> None:
    x = torch.randn(100, 5, generator=torch.Generator().manual_seed(0))
    tokens = [Tokens(x, x @ torch.ones(5, 3), torch.ones(100))]
    assert float(best_step(tokens, tokens, (1e9,)).weight.abs().max()) < 1e-6
    torch.testing.assert_close(best_step(tokens, tokens, (1e-12,)).weight.float(), torch.ones(3, 5))


@pytest.mark.parametrize("layer", ["attn.proj", "mlp.fc2"])
def test_planted_weights_are_recovered(layer: str) -> None:
    """A layer of the student that was disturbed becomes the teacher's again: the closed form is exact."""
    teacher, student, pixels = pair("softmax")
    with torch.no_grad():
        for parameter in student.get_submodule(f"blocks.1.{layer}").parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    report = calibrate(teacher, student, pixels, Calibration(ridges=(1e-7,)), Reporter())
    assert report.error_after < 1e-3 * report.error_before
    assert next(path for path, fit in report.layers.items() if fit.unexplained < 1e-3) == f"blocks.1.{layer}"


def test_a_planted_scale_and_offset_of_queries_and_keys_are_recovered() -> None:
    """Softmax with halved queries and keys needs twice of both; what all keys share makes no difference to it."""
    teacher, student, pixels = pair("softmax")
    with torch.no_grad():
        for model in (teacher, student):  # logits that matter, and keys that are centred already
            for site in sites_of(model).values():
                site.qkv.weight[:96] *= 20
        site = sites_of(student)["blocks.0.attn"]
        site.qkv.weight[:96] /= 2
        site.qkv.bias[:96] /= 2
        site.qkv.bias[48:96] += 3
    report = calibrate(teacher, student, pixels, Calibration(), Reporter())
    fitted = report.layers["blocks.0.attn.proj"].heads
    assert fitted == HeadFit(2.0, 0.0)
    theirs = sites_of(teacher)["blocks.0.attn"]
    torch.testing.assert_close(site.qkv.weight, theirs.qkv.weight)
    with torch.no_grad():
        x = torch.randn(2, 17, 48)
        site.proj = theirs.proj
        torch.testing.assert_close(site(x), theirs(x), atol=1e-4, rtol=1e-3)


def test_keys_are_centred_and_thresholds_are_in_deviations() -> None:
    layer = nn.Linear(8, 24)
    x = torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q, k, v = layer(x).chunk(3, dim=1)
        apply(layer, layer.weight.clone(), layer.bias.clone(), q, k, 2, HeadFit(3.0, -0.5))
        found_q, found_k, found_v = layer(x).chunk(3, dim=1)
    torch.testing.assert_close(found_v, v)
    for head in (slice(0, 4), slice(4, 8)):
        for before, found in ((q, found_q), (k - k.mean(0), found_k)):
            deviation = before[:, head].var(0, correction=0).mean().sqrt()
            torch.testing.assert_close(found[:, head], 3 * (before[:, head] - 0.5 * deviation), atol=1e-5, rtol=1e-4)


def test_many_forwards_go_through_a_model_in_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    seen: list[Tensor] = []

    def stop(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        if forward := SteppedForward.current():
            forward.stop(args[0])

    model[2].register_forward_pre_hook(stop)
    batches = torch.randn(3, 4, 3).unbind()
    forwards = [SteppedForward(lambda x=x: seen.append(model(x))) for x in batches]
    stops = [f.advance() for f in forwards]
    assert not seen and all(
        torch.equal(s, model[:2](x)) and not s.requires_grad for s, x in zip(stops, batches, strict=True)
    )
    with torch.no_grad():
        model[2].weight.mul_(2)  # seen by all of them, because none has gone further
    assert forwards[2].advance() is None and torch.equal(seen[0], model(batches[2]))
    forwards[0].abandon(), forwards[1].abandon()
    assert len(seen) == 1 and forwards[2].advance() is None


def test_an_error_in_a_stepped_forward_is_raised_where_it_is_waited_for() -> None:
    with pytest.raises(ZeroDivisionError):
        SteppedForward(lambda: 1 / 0).advance()


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
    report = calibrate(teacher, student, pixels, Calibration(ridges=(1.0,)), Reporter())
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
    assert set(a["audit"]["trained"]) <= {
        f"blocks.{i}.{layer}.{w}"
        for i in range(4)
        for layer in ("attn.qkv", "attn.proj", "mlp.fc2")
        for w in ("weight", "bias")
    }
