"""What happens at each site, decided before anything is changed: a bad rule costs nothing and breaks nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import torch
from torch import nn

from vit2linear.context import HeadGeometry
from vit2linear.errors import RecipeError, SurgeryError
from vit2linear.modifiers import Modifiers
from vit2linear.operator import Operator
from vit2linear.recipe import ALL, KEEP, OPERATORS, Rule
from vit2linear.registry import Registry
from vit2linear.site import Feature, Site, SiteKind, dropped_names, sites_of
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


@cache
def _kinds() -> tuple[tuple[str, type[SiteKind]], ...]:
    """Every site kind, those for the models of certain classes first."""
    return tuple(sorted(SITES.all().items(), key=lambda item: not item[1].models))


def kind_of(model: nn.Module, module: nn.Module) -> str | None:
    """Name of the site kind of ``module``."""
    for name, kind in _kinds():
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
    chosen = {site.path: rule_for(site.path, rules) for site in sites}
    for i, rule in enumerate(rules):
        if not any(rule is r for r in chosen.values()):
            raise RecipeError(
                f"convert.{i}: no site is left for the rule {rule.sites!r}.", f"Sites: {', '.join(chosen)}."
            )
    _check_drops(model, sites, rules)
    plans = [_plan_site(model, s, r) if (r := chosen[s.path]) is not None else SitePlan(s, KEEP) for s in sites]
    plan = Plan(tuple(plans))
    return replace(plan, shared=shared_by_none(model, plan.operators))


def rule_for(path: str, rules: Sequence[Rule]) -> Rule | None:
    """The first rule that matches a site; ``None``: the site keeps its softmax."""
    return next((r for r in rules if fnmatchcase(path, r.sites)), None)


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


def shared_by_none(model: nn.Module, operators: dict[str, dict[str, Any]]) -> frozenset[str]:
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
