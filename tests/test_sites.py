"""Every site kind, on small models of every timm module that is covered."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn

from tests import families
from tests.coverage import tensors
from vit2linear import linearize
from vit2linear.audit import audit
from vit2linear.distill.tasks import ModelTask, SiteTask
from vit2linear.errors import SurgeryError
from vit2linear.losses import Objective
from vit2linear.plan import SITES, Plan, find_sites, make_plan
from vit2linear.probe import example_pixels, probe
from vit2linear.recipe import KEEP, OPERATORS, Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan

ALL_CASES = [(module, case) for module in families.MODULES for case in families.cases(module)]
CASES = [pytest.param(name, args, id=f"{module}-{name}-{i}") for i, (module, (name, args)) in enumerate(ALL_CASES)]
FIRST = [pytest.param(*families.cases(module)[0], id=module) for module in families.MODULES]


def pixels(model: nn.Module, batch: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, *example_pixels(model).shape[1:], generator=generator)


def relu_plan(model: nn.Module) -> Plan:
    return make_plan(model, [Rule(drop=("all",))])


def test_every_site_kind_has_models() -> None:
    found = {site.kind for _, (name, args) in ALL_CASES for site in find_sites(families.build(name, **args))}
    assert found == set(SITES.names())


@pytest.mark.parametrize(("name", "args"), CASES)
def test_softmax_in_between_changes_nothing(name: str, args: dict[str, Any]) -> None:
    model = families.build(name, **args)
    before = copy.deepcopy(model.state_dict())
    x = pixels(model)
    with torch.no_grad():
        wanted = tensors(model(x))
        same = linearize(model, op="softmax").eval()
        assert set(same.state_dict()) == set(before) and sites_of(same)
        for mine, theirs in zip(tensors(same(x)), wanted, strict=True):
            assert theirs.std() > 1e-3 and (mine - theirs).abs().max() <= 1e-5 * max(1, float(theirs.abs().max()))
        assert all(torch.equal(a, b) for a, b in zip(tensors(model(x)), wanted, strict=True)), (
            "the original is as it was"
        )
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(("name", "args"), CASES)
def test_a_converted_model_is_audited_written_and_read_back(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    model = families.build(name, **args)
    plan = relu_plan(model)
    student = apply_plan(model, plan).eval()
    found = audit(model.state_dict(), student, plan, trained=False)
    assert found.softmax_left == 0 and not found.trained and bool(found.dropped) == bool(plan.drop_keys)
    x = pixels(model)
    with torch.no_grad():
        before = tensors(student(x))
        assert all(t.isfinite().all() for t in before)
        assert any(not torch.equal(a, b) for a, b in zip(before, tensors(model(x)), strict=True))
    timm.models.save_for_hf(student, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert sites_of(again).keys() == sites_of(student).keys()
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(before, tensors(again(x)), strict=True))


@pytest.mark.parametrize("exact", [KEEP, "softmax"])
@pytest.mark.parametrize(("name", "args"), FIRST)
def test_exact_sites_beside_linear_ones(name: str, args: dict[str, Any], exact: str, tmp_path: Path) -> None:
    """Every second site keeps its softmax, and with it all that linear operators cannot carry."""
    model = families.build(name, **args)
    kept = [s.path for s in find_sites(model)][::2]
    plan = make_plan(model, [*(Rule(op=exact, sites=path) for path in kept), Rule(drop=("all",))])
    student = apply_plan(model, plan).eval()
    found = audit(model.state_dict(), student, plan, trained=False)
    assert found.softmax_left == len(kept) and not any(
        k.startswith(tuple(f"{p}." for p in kept)) for k in found.dropped
    )
    timm.models.save_for_hf(student, str(tmp_path), safe_serialization=True)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = pixels(model)
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(tensors(student(x)), tensors(again(x)), strict=True))


@pytest.mark.parametrize(("name", "args"), CASES)
def test_two_steps_of_each_stage(name: str, args: dict[str, Any]) -> None:
    model = families.build(name, **args)
    plan = relu_plan(model)
    accelerator = Accelerator(cpu=True)
    teacher = apply_plan(model, plan.with_operator("softmax")).eval()
    for task_type, weights in ((SiteTask, {"site_output": 1.0}), (ModelTask, {"feature": 1.0, "site_output": 0.1})):
        student = apply_plan(model, plan).train()
        task = task_type(teacher, student, Objective(weights))
        task.prepare(accelerator)
        optimizer = torch.optim.Adam(student.parameters(), lr=1e-4)
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            found.append(float(task.backward(accelerator, pixels(model))))
            optimizer.step()
        assert 0 < found[-1] < found[0], f"{task_type.__name__}: {found}"
        assert all(any(p.grad is not None and p.grad.any() for p in s.parameters()) for s in sites_of(student).values())


@pytest.mark.parametrize(("name", "args"), CASES)
def test_losses_are_refused_until_they_are_accepted(name: str, args: dict[str, Any]) -> None:
    model = families.build(name, **args)
    plan = relu_plan(model)
    for feature, (words, paths) in plan.losses.items():
        assert len(words) > 10 and paths
        with pytest.raises(SurgeryError, match=r"cannot carry .*--drop") as refusal:
            linearize(model, "relu", drop=set(plan.losses) - {feature})
        assert feature in str(refusal.value)
    assert make_plan(model, [Rule(drop=tuple(plan.losses))]).operators == plan.operators


@pytest.mark.parametrize(("name", "args"), FIRST)
def test_plans_are_probed_without_weights(name: str, args: dict[str, Any]) -> None:
    with torch.device("meta"):
        skeleton = timm.create_model(name, **args)
    plan = relu_plan(skeleton)
    probed = probe(skeleton, plan)
    assert set(probed.sites) == {s.site.path for s in plan.replaced} and probed.flops > 0


@cache
def shared_model(name: str, module: str) -> nn.Module:
    """Built once: planning and applying change no model."""
    return families.build(name, **dict(families.cases(module)[0][1]))


@pytest.mark.parametrize("op", [n for n in OPERATORS.names() if n != "softmax"])
@pytest.mark.parametrize("module", families.MODULES)
def test_every_operator_at_every_kind(module: str, op: str) -> None:
    """It runs, or says why it cannot."""
    model = shared_model(families.cases(module)[0][0], module)
    try:
        plan = make_plan(model, [Rule(op=op, drop=("all",))])
        with torch.no_grad():
            assert all(t.isfinite().all() for t in tensors(apply_plan(model, plan).eval()(pixels(model, batch=1))))
    except SurgeryError as refusal:
        assert op != "relu" and str(refusal)
