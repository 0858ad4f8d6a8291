"""Plan, then apply: which sites a model has, what happens to each, and the new model.

Nothing is changed before the plan is whole, so a bad rule costs nothing and breaks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from vit2linear.attention import LinearAttention, Operator, Site, SiteKind, set_submodule, sites_of
from vit2linear.context import GridRef, HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError
from vit2linear.modifiers import Modifiers
from vit2linear.recipe import KEEP, OPERATORS, Rule
from vit2linear.registry import Registry
from vit2linear.strict import build

SITES: Registry[SiteKind] = Registry("site kind", "vit2linear.sites", "vit2linear.attention:SiteKind")


@dataclass(frozen=True)
class SitePlan:
    """What happens at one site."""

    site: Site
    op: str
    """An operator's name, or ``keep``."""
    options: dict[str, Any] = field(default_factory=dict)
    modifiers: Modifiers = field(default_factory=Modifiers)
    evaluation: str = ""
    """Evaluation order at the model's own size, and landmarks where there are any."""

    @property
    def entry(self) -> dict[str, Any]:
        """The JSON form that an artifact stores."""
        changed = {k: v for k, v in asdict(self.modifiers).items() if v != getattr(Modifiers(), k)}
        return {"op": self.op, "options": self.options, **changed}


@dataclass(frozen=True)
class Plan:
    """What happens to a model, site by site."""

    sites: tuple[SitePlan, ...]

    @property
    def replaced(self) -> tuple[SitePlan, ...]:
        """Sites that get an operator."""
        return tuple(s for s in self.sites if s.op != KEEP)

    @property
    def operators(self) -> dict[str, dict[str, Any]]:
        """The JSON form that an artifact stores: site path to operator and options."""
        return {s.site.path: s.entry for s in self.replaced}

    def with_operator(self, op: str) -> Plan:
        """The same sites, all replaced ones with another operator (``softmax`` makes the teacher)."""
        return Plan(tuple(SitePlan(s.site, s.op if s.op == KEEP else op) for s in self.sites))


def find_sites(model: nn.Module) -> list[Site]:
    """Every softmax attention module that a site kind recognises, in the model's order."""
    kinds = {name: kind() for name, kind in SITES.all().items()}
    found = []
    for path, module in model.named_modules():
        for name, kind in kinds.items():
            if kind.matches(module):
                found.append(Site(path, name, kind.geometry(module)))
    return found


def make_plan(model: nn.Module, rules: Sequence[Rule]) -> Plan:
    """Match every site with the first rule that fits.

    Raises:
        SurgeryError: the model has no sites, or is converted already.
        RecipeError: a rule matches no site, or options that an operator does not have.
    """
    if sites_of(model):
        raise SurgeryError("the model is converted already.", "Convert the original softmax model instead.")
    sites = find_sites(model)
    if not sites:
        raise SurgeryError(
            f"no softmax attention that can be replaced was found in {type(model).__name__}.",
            f"Supported kinds: {', '.join(SITES.names())}.",
        )
    used = set()
    plans = []
    for site in sites:
        for i, rule in enumerate(rules):
            if fnmatchcase(site.path, rule.sites):
                used.add(i)
                plans.append(_plan_site(model, site, rule))
                break
        else:
            plans.append(SitePlan(site, KEEP))
    for i, rule in enumerate(rules):
        if i not in used:
            paths = ", ".join(s.path for s in sites)
            raise RecipeError(f"convert.{i}: no site is left for the rule {rule.sites!r}.", f"Sites: {paths}.")
    return Plan(tuple(plans))


def make_operator(entry: dict[str, Any], geometry: HeadGeometry) -> Operator:
    """The operator of one site, from the JSON form that an artifact stores.

    Raises:
        UnknownNameError, RecipeError: no such operator, or options that it does not have or bear.
    """
    kind: type[Operator] = OPERATORS.get(entry["op"])
    options = build(kind.Options, entry.get("options", {}), kind.Options(), f"operator {entry['op']!r}")
    op = kind(geometry, options)
    op.add_modifiers(Modifiers(entry.get("local", "none"), entry.get("center_keys", False)))
    return op


def _plan_site(model: nn.Module, site: Site, rule: Rule) -> SitePlan:
    """Try the rule's operator on the meta device: bad options show here, and so does the evaluation order."""
    modifiers = Modifiers(rule.local, rule.center_keys)
    plan = SitePlan(site, rule.op, dict(rule.options), modifiers)
    if rule.op == KEEP:
        return plan
    with torch.device("meta"):
        op = make_operator(plan.entry, site.geometry)
        grid = tuple(getattr(getattr(model, "patch_embed", None), "grid_size", None) or (14, 14))
        return replace(plan, evaluation=op.evaluation(grid, int(getattr(model, "num_prefix_tokens", 0))))


def apply(model: nn.Module, operators: dict[str, dict[str, Any]]) -> nn.Module:
    """Replace the sites in place, as ``Plan.operators`` says, and record how to build the result again.

    New parameters are made on the device and in the dtype of the module that they join.

    Raises:
        SurgeryError: a path is no site of this model.
    """
    kinds = {name: kind() for name, kind in SITES.all().items()}
    grid_ref = GridRef(getattr(model, "num_prefix_tokens", 0))
    for path, entry in operators.items():
        module = dict(model.named_modules()).get(path)
        kind = next((k for k in kinds.values() if module is not None and k.matches(module)), None)
        if module is None or kind is None:
            raise SurgeryError(f"{path!r} is not a softmax attention module of this {type(model).__name__}.")
        reference = next(module.parameters())
        with torch.device(reference.device):
            op = make_operator(entry, kind.geometry(module)).to(reference.dtype)
        set_submodule(model, path, LinearAttention(module, kind, op, grid_ref))
    if operators:
        model.get_submodule("patch_embed").register_forward_hook(grid_ref)
    return model


def linearize(
    model: nn.Module,
    op: str = "relu",
    *,
    options: dict[str, Any] | None = None,
    local: Literal["none", "dwc3", "dwc5"] = "none",
    center_keys: bool = False,
) -> nn.Module:
    """A converted copy of any timm model: surgery alone, no training, no files.

    Args:
        model: a timm Vision Transformer; it is not changed.
        op: operator for every site; ``softmax`` gives a model with the same outputs.
        options: the operator's own options.
        local, center_keys: modifiers that any operator takes; see ``Rule``.

    Returns:
        A new model, saved and loaded by timm's own functions wherever ``vit2linear`` is imported.

    Raises:
        UnknownNameError, RecipeError, SurgeryError
    """
    OPERATORS.check(op)
    rule = Rule(op=op, options=options or {}, local=local, center_keys=center_keys)
    return apply_plan(model, make_plan(model, [rule]))


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """A converted copy of ``model``, which knows (as timm's exporter asks) how it is built again."""
    student = apply(copy.deepcopy(model), plan.operators)
    cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    args = dict(getattr(model, "_model_args", {}))
    args.setdefault("base", cfg.get("architecture"))
    student._model_args = {**args, "operators": plan.operators}  # type: ignore[assignment]
    student.pretrained_cfg = {**cfg, "architecture": "vit2linear"}  # type: ignore[assignment]
    return student


def plan_to_json(plan: Plan) -> list[dict[str, Any]]:
    """One JSON object for each site."""
    return [asdict(s) for s in plan.sites]
