"""Which sites keep the softmax: those whose conversion costs most, by measuring.

A site's cost is the error of its output on the source's own input: what stage ``attention`` starts from. How far the
final features move when a site alone is converted tells more of a model that stays untrained, and less of one that is
calibrated or trained, as every conversion is by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.distill.forward import last_features
from vit2linear.errors import DistillError, RecipeError
from vit2linear.evaluation import Judge
from vit2linear.losses import unexplained
from vit2linear.plan import Plan, rule_for
from vit2linear.recipe import KEEP, Recipe, Rule
from vit2linear.reporting import Reporter
from vit2linear.site import LinearAttention, sites_of
from vit2linear.surgery import apply_plan

IMAGES = 256
"""Training images that are measured on."""
BATCH = 32
"""Images of one forward."""


@dataclass(frozen=True)
class KeepReport:
    """What was measured, and what follows from it."""

    images: int
    costs: dict[str, float]
    """Unexplained energy of the site's output on the source's own input, by path, the costliest first."""
    kept: tuple[str, ...]
    """The sites that keep the softmax, in the model's order."""


def check_keep(plan: Plan, count: int) -> None:
    """Refuse, before anything is read, to keep the softmax everywhere.

    Raises:
        RecipeError: no site is left to convert.
    """
    sites = len(plan.replaced)
    if not sites:
        raise RecipeError("the rules keep every site, so there is nothing to convert.")
    if count >= sites:
        raise RecipeError(
            f"keep_softmax: {count} sites are to keep the softmax and the rules convert {sites}, so there is nothing "
            "to convert.",
            f"Keep at most {sites - 1}." if sites > 1 else "Leave it out.",
        )


def site_costs(
    teacher: nn.Module, student: nn.Module, pixels: Float[Tensor, "images channels height width"]
) -> dict[str, float]:
    """Cost of every site of ``student``, the costliest first; neither model is changed.

    Args:
        teacher: the source with ``softmax`` at the student's sites.
        student: the source with the operators there, its weights copied.
        pixels: images as they are evaluated.

    Returns:
        Path to unexplained energy of the site's output: 0 is equal, 1 as bad as answering zero.

    Raises:
        DistillError: a site's operator gives numbers that are not finite.
    """
    mine, device = sites_of(student), next(student.parameters()).device
    costs = dict.fromkeys(mine, 0.0)
    share = 0.0

    def measure(path: str) -> Callable[..., None]:
        def hook(module: LinearAttention, args: Any, kwargs: Any, output: Any) -> None:
            site = mine[path]
            site.grid_ref.grid = module.grid_ref.grid  # the student's backbone does not run
            answer = site.kind.answer(args[0], site(*args, **kwargs))
            costs[path] += share * float(unexplained(answer, module.kind.answer(args[0], output)))

        return hook

    hooks = [
        module.register_forward_hook(measure(path), with_kwargs=True)
        for path, module in sites_of(teacher).items()
        if path in mine
    ]
    try:
        with torch.no_grad():
            for batch in pixels.split(BATCH):
                share = len(batch) / len(pixels)
                last_features(teacher, batch.to(device))
    finally:
        for handle in hooks:
            handle.remove()
    for path, cost in costs.items():
        if not cost < float("inf"):
            raise DistillError(
                f"the output of {path} is not finite once it is converted.", f"Keep it: --keep-softmax {path!r}."
            )
    return dict(sorted(costs.items(), key=lambda item: -item[1]))


def keep_costliest(
    source: nn.Module, recipe: Recipe, plan: Plan, judge: Judge, reporter: Reporter
) -> tuple[Recipe, KeepReport]:
    """Measure, and name the ``recipe.keep_softmax`` costliest sites in rules.

    Args:
        source: the model with its weights; it is not changed.
        recipe, plan: what is to be done with it.
        judge: gives the images.
        reporter: told every site's cost.

    Returns:
        The recipe that keeps these sites by rules, and what was measured. Rules that have no site left are gone: a
        recipe with such a rule does not run.
    """
    pixels, _ = judge.sample(IMAGES)
    # What the operators draw here leaves no trace, so that the returned recipe gives the same weights.
    with torch.random.fork_rng(devices=[]):
        teacher = apply_plan(source, plan.with_operator("softmax")).to(judge.device).eval()
        student = apply_plan(source, plan).to(judge.device).eval()
    # Rounding may differ between processes; what they build must not.
    (costs,) = broadcast_object_list([site_costs(teacher, student, pixels)])
    chosen = {*list(costs)[: recipe.keep_softmax]}
    for path, cost in costs.items():
        keeps = ": it keeps the softmax" if path in chosen else ""
        reporter.say(f"converting {path} leaves {cost:.1%} of its output unexplained{keeps}")
    kept = tuple(s.site.path for s in plan.sites if s.site.path in chosen)
    return keeping(recipe, plan, kept), KeepReport(len(pixels), costs, kept)


def keeping(recipe: Recipe, plan: Plan, kept: Sequence[str]) -> Recipe:
    """The recipe that keeps the softmax at the sites ``kept`` by rules, instead of by their number."""
    used = [rule_for(s.site.path, recipe.convert) for s in plan.sites if s.site.path not in kept]
    rules = [Rule(op=KEEP, sites=path) for path in kept]
    rules += [rule for rule in recipe.convert if any(rule is u for u in used)]
    return replace(recipe, keep_softmax=0, convert=tuple(rules))
