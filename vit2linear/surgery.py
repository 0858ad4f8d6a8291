"""Plan, then apply: which sites a model has, what happens to each, and the new model.

Nothing is changed before the plan is whole, so a bad rule costs nothing and breaks nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import nn

from vit2linear.context import GridReader, GridRef, HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError
from vit2linear.modifiers import Modifiers
from vit2linear.operator import Operator
from vit2linear.recipe import ALL, KEEP, OPERATORS, Rule
from vit2linear.registry import Registry
from vit2linear.site import Feature, LinearAttention, Site, SiteKind, dropped_names, set_submodule, sites_of
from vit2linear.strict import build

NOT_SOFTMAX_ROUTING = {
    "XCA": "its attention mixes channels, not tokens, at a cost that is linear in the tokens already",
    "ChannelAttention": "it mixes channels, not tokens, at a cost that is linear in the tokens already",
    "ChannelAttentionV2": "it mixes channels, not tokens, at a cost that is linear in the tokens already",
    "OutlookAttention": "outlook attention takes its weights from each token alone, not from pairs of tokens",
    "ClassAttn": "its only query is the class token, so its cost is linear in the tokens already",
    "CrossAttention": "its only query is the class token, so its cost is linear in the tokens already",
    "AttentionPoolLatent": "it pools the tokens with one query, so its cost is linear in the tokens already",
    "LiteMLA": "its attention is linear already",
}
"""Attention modules (by class) that are no sites, and why."""

SITES: Registry[SiteKind] = Registry("site kind", "vit2linear.sites", "vit2linear.site:SiteKind")


@dataclass(frozen=True)
class SitePlan:
    """What happens at one site."""

    site: Site
    op: str
    """An operator's name, or ``keep``."""
    options: dict[str, Any] = field(default_factory=dict)
    modifiers: Modifiers = field(default_factory=Modifiers)
    global_windows: bool = False
    """Route over the whole map where the source routes inside windows."""
    drop: dict[str, str] = field(default_factory=dict)
    """What of the source's attention is given up, name to words."""
    drop_keys: tuple[str, ...] = ()
    """The parameters that go with it."""

    @property
    def entry(self) -> dict[str, Any]:
        """The JSON form that an artifact stores: a rule without its sites."""
        changed = {k: v for k, v in asdict(self.modifiers).items() if v != getattr(Modifiers(), k)}
        changed |= {"global_windows": True} if self.global_windows else {}
        changed |= {"drop": [*self.drop]} if self.drop else {}
        return {"op": self.op, "options": self.options, **changed}


@dataclass(frozen=True)
class Plan:
    """What happens to a model, site by site."""

    sites: tuple[SitePlan, ...]
    shared: frozenset[str] = frozenset()
    """Modules of the model that serve only what every site gives up."""

    @property
    def replaced(self) -> tuple[SitePlan, ...]:
        """Sites that get an operator."""
        return tuple(s for s in self.sites if s.op != KEEP)

    @property
    def operators(self) -> dict[str, dict[str, Any]]:
        """The JSON form that an artifact stores: site path to operator and options."""
        return {s.site.path: s.entry for s in self.replaced}

    @property
    def drop_keys(self) -> frozenset[str]:
        """Prefixes of the source's weights that the plan gives up."""
        return self.shared | {f"{s.site.path}.{key}" for s in self.replaced for key in s.drop_keys}

    @property
    def losses(self) -> dict[str, tuple[str, tuple[str, ...]]]:
        """What is given up: name to words and the sites where."""
        found: dict[str, tuple[str, tuple[str, ...]]] = {}
        for plan in self.replaced:
            for name, words in plan.drop.items():
                found[name] = (words, (*found.get(name, ("", ()))[1], plan.site.path))
        return found

    def with_operator(self, op: str) -> Plan:
        """The same sites, all replaced ones with another operator (``softmax`` makes the teacher)."""
        return Plan(tuple(SitePlan(s.site, s.op if s.op == KEEP else op) for s in self.sites))


def kind_of(model: nn.Module, module: nn.Module) -> str | None:
    """Name of the site kind of ``module``: those for the model's class first."""
    kinds = sorted(SITES.all().items(), key=lambda item: not item[1].models)
    for name, kind in kinds:
        if (not kind.models or type(model).__name__ in kind.models) and kind().matches(module):
            return name
    return None


def kind_at(model: nn.Module, site: Site) -> SiteKind:
    """The kind of a site of ``model``, which knows where it is."""
    kind: SiteKind = SITES.get(site.kind)()
    return kind.at(model, site.path)


def find_sites(model: nn.Module) -> list[Site]:
    """Every softmax attention module that a site kind recognises, in the model's order."""
    found = []
    for path, module in model.named_modules():
        name = kind_of(model, module)
        if name is not None:
            kind = SITES.get(name)().at(model, path)
            found.append(Site(path, name, kind.geometry(module), kind.window(module)))
    return found


def make_plan(model: nn.Module, rules: Sequence[Rule]) -> Plan:
    """Match every site with the first rule that fits.

    Raises:
        SurgeryError: the model has no sites or is converted already, or an operator cannot do what a site needs.
        RecipeError: a rule matches no site, options that an operator does not have, or a ``drop`` that no site has.
    """
    if sites_of(model):
        raise SurgeryError("the model is converted already.", "Convert the original softmax model instead.")
    sites = find_sites(model)
    if not sites:
        raise SurgeryError(*_no_sites(model))
    chosen = {site.path: next((r for r in rules if fnmatchcase(site.path, r.sites)), None) for site in sites}
    for i, rule in enumerate(rules):
        if not any(rule is r for r in chosen.values()):
            raise RecipeError(
                f"convert.{i}: no site is left for the rule {rule.sites!r}.", f"Sites: {', '.join(chosen)}."
            )
    _check_drops(model, sites, rules)
    plans = [_plan_site(model, s, r) if (r := chosen[s.path]) is not None else SitePlan(s, KEEP) for s in sites]
    plan = Plan(tuple(plans))
    return replace(plan, shared=_shared_by_none(model, plan.operators))


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
    """Check the rule against the site, and make its operator on the meta device: bad options show here."""
    if rule.op == KEEP:
        return SitePlan(site, KEEP)
    kind = kind_at(model, site)
    module = model.get_submodule(site.path)
    plan = SitePlan(
        site,
        rule.op,
        dict(rule.options),
        Modifiers(rule.local, rule.center_keys),
        rule.global_windows and site.window is not None and kind.windowed,
    )
    with torch.device("meta"):
        op = make_operator(plan.entry, site.geometry)
    features = kind.features(module)
    if rule.local != "none":
        _check_local(site, features)
    missing = {n: f for n, f in features.items() if f.missed(op.carries, plan.global_windows)}
    for name, feature in missing.items():
        if not feature.droppable or not {ALL, name} & set(rule.drop):
            raise _cannot_carry(plan, name, feature)
    words = {name: feature.words for name, feature in missing.items()}
    return replace(plan, drop=words, drop_keys=dropped_names(kind, module, words))


def _check_local(site: Site, features: Mapping[str, Feature]) -> None:
    for name, feature in features.items():
        if feature.needs == "pooling":
            raise SurgeryError(
                f"{site.path}: local convolves the values around each query, whose own value is not there, {name}: "
                f"{feature.words}.",
                "Leave local out there, by a rule of its own for these sites in a recipe.",
            )


def _cannot_carry(plan: SitePlan, name: str, feature: Feature) -> SurgeryError:
    able = ", ".join(n for n in OPERATORS.names() if not feature.missed(OPERATORS.get(n).carries, plan.global_windows))
    accept = f"accept the loss with --drop {name} (in Python: drop={{{name!r}}}) and let distillation recover it, "
    other = f"use an operator that carries it ({able}), or keep softmax there" if able else "or keep the windows"
    return SurgeryError(
        f"{plan.site.path}: the operator {plan.op!r} cannot carry what the source has there, {name}: {feature.words}.",
        f"Either {accept if feature.droppable else ''}{other}.",
    )


def _check_drops(model: nn.Module, sites: Sequence[Site], rules: Sequence[Rule]) -> None:
    known = {name for s in sites for name in kind_at(model, s).features(model.get_submodule(s.path))}
    for name in {name for rule in rules for name in rule.drop} - known - {ALL}:
        has = f"Its attention has: {', '.join(sorted(known))}." if known else "Its attention has nothing to drop."
        raise RecipeError(f"drop: no site of this {type(model).__name__} has {name!r}.", has)


def _shared_by_none(model: nn.Module, operators: dict[str, dict[str, Any]]) -> frozenset[str]:
    """Modules of ``model`` that serve only features which every site gives up."""
    kept: dict[str, list[bool]] = {}
    for site in find_sites(model):
        drop = operators.get(site.path, {}).get("drop", ())
        for name, feature in kind_at(model, site).features(model.get_submodule(site.path)).items():
            kept.setdefault(feature.shared, []).append(name not in drop)
    return frozenset(module for module, sites in kept.items() if module and not any(sites))


def _no_sites(model: nn.Module) -> tuple[str, str]:
    """Why nothing can be converted, and what to do."""
    for module in model.modules():
        reason = NOT_SOFTMAX_ROUTING.get(type(module).__name__)
        if reason is not None:
            return (
                f"{type(model).__name__} has no softmax over tokens to replace: {reason}.",
                "There is nothing to win.",
            )
    return (
        f"no softmax attention that can be replaced was found in {type(model).__name__}.",
        f"Supported kinds: {', '.join(SITES.names())}.",
    )


def apply(model: nn.Module, operators: dict[str, dict[str, Any]]) -> nn.Module:
    """Replace the sites in place, as ``Plan.operators`` says, and record how to build the result again.

    New parameters are made on the device and in the dtype of the module that they join.

    Raises:
        SurgeryError: a path is no site of this model.
    """
    modules = dict(model.named_modules())
    shared = _shared_by_none(model, operators)
    refs: dict[tuple[str, GridReader, int], GridRef] = {}
    for path, entry in operators.items():
        module = modules.get(path)
        name = kind_of(model, module) if module is not None else None
        if module is None or name is None:
            raise SurgeryError(f"{path!r} is not a softmax attention module of this {type(model).__name__}.")
        kind: SiteKind = SITES.get(name)().at(model, path)
        for setting, value in kind.settings.items():
            setattr(model, setting, value)
        prefix, source = kind.num_prefix(model, path), kind.grid_source(model, path)
        ref = GridRef(prefix) if source is None else refs.setdefault((*source, prefix), GridRef(prefix, source[1]))
        reference = next(module.parameters())
        with torch.device(reference.device):
            op = make_operator(entry, kind.geometry(module)).to(reference.dtype)
        site = LinearAttention(module, kind, op, ref, entry.get("drop", ()), entry.get("global_windows", False))
        set_submodule(model, path, site)
    for (path, _, _), ref in refs.items():
        model.get_submodule(path).register_forward_hook(ref)
    for path in shared:
        set_submodule(model, path, None)
    return model


def linearize(
    model: nn.Module,
    op: str = "relu",
    *,
    options: dict[str, Any] | None = None,
    local: Literal["none", "dwc3", "dwc5"] = "none",
    center_keys: bool = False,
    drop: Collection[str] | Literal["all"] = (),
    global_windows: bool = False,
) -> nn.Module:
    """A converted copy of any timm model: surgery alone, no training, no files.

    Args:
        model: a timm Vision Transformer; it is not changed.
        op: operator for every site; ``softmax`` gives a model with the same outputs.
        options: the operator's own options.
        local, center_keys, global_windows: for any operator; see ``Rule``.
        drop: what of the source's attention may be given up, such as ``{"relative-position-bias"}``, or ``"all"``.

    Returns:
        A new model, saved and loaded by timm's own functions wherever ``vit2linear`` is imported.

    Raises:
        UnknownNameError, RecipeError, SurgeryError
    """
    OPERATORS.check(op)
    drops = (drop,) if isinstance(drop, str) else tuple(sorted(drop))
    rule = Rule(
        op=op,
        options=options or {},
        local=local,
        center_keys=center_keys,
        drop=drops,
        global_windows=global_windows,
    )
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


def plan_notes(plan: Plan) -> list[str]:
    """What a person should know before anything is trained: what is given up, and where nothing can be won."""
    notes = [f"given up at {len(paths)} sites: {name}, {words}" for name, (words, paths) in plan.losses.items()]
    inside = [s.site for s in plan.replaced if s.site.window is not None and not s.global_windows]
    if inside:
        sizes = ", ".join(sorted({str(site.window) for site in inside}, key=int))
        notes.append(
            f"{len(inside)} sites attend inside windows of {sizes} tokens, whose cost is linear in the image already: "
            "converting there gains nothing; --global-windows routes over the whole map instead, which softmax cannot "
            "afford"
        )
    return notes
