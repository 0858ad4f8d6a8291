"""The stages: which task each one is, what it minimises, how many steps it gets."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

from vit2linear.distill.tasks import ModelTask, SiteTask, Task
from vit2linear.errors import RecipeError
from vit2linear.losses import LOSSES, Objective
from vit2linear.operator import Operator
from vit2linear.recipe import DistillOptions

TASKS: dict[str, type[Task]] = {"attention": SiteTask, "feature": ModelTask, "task": ModelTask}


def check_stages(options: DistillOptions, operators: Iterable[type[Operator]], num_classes: int) -> DistillOptions:
    """The stages as they can run with these operators: without a head there is no loss ``logits``.

    Raises:
        UnknownNameError: a loss that does not exist.
        RecipeError: a loss that its stage, the operators or the model cannot give.
    """
    stages = dict(options.stages)
    for name, stage in options.stages.items():
        weights = {n: w for n, w in stage.losses.items() if n != "logits" or num_classes}
        stages[name] = replace(stage, losses=weights)
        where, objective = f"distill.{name}.losses", Objective(weights)
        for loss in weights:
            missing = sorted(LOSSES[loss].needs - TASKS[name].fields)
            if missing:
                allowed = sorted(n for n, known in LOSSES.items() if known.needs <= TASKS[name].fields)
                raise RecipeError(f"{where}: {loss!r} needs {', '.join(missing)}; possible here: {', '.join(allowed)}.")
        if stage.share and not weights:
            raise RecipeError(f"{where}: no loss is left for a model without a class head.", "Use feature.")
        if stage.share and "labels" in objective.needs and not num_classes:
            raise RecipeError(f"{where}: 'labels' needs a class head, and the model has none.")
        for op in operators if stage.share and "maps" in objective.needs else ():
            if not op.has_map or op.streams > 1 or (op.signed and "map_kl" in weights):
                fault = "whose routing map can be negative" if op.signed else "which has no such routing map"
                raise RecipeError(f"{where}: maps are compared with operator {op.name!r}, {fault}.", "Use site_output.")
    return replace(options, attention=stages["attention"], feature=stages["feature"], task=stages["task"])


def objective_of(options: DistillOptions, stage: str) -> Objective:
    """What a stage minimises."""
    return Objective(options.stages[stage].losses, options.temperature, options.label_smoothing)


def split_steps(options: DistillOptions, total: int) -> dict[str, int]:
    """Optimiser steps of each stage, summing to ``total``."""
    shares = [stage.share for stage in options.stages.values()]
    ends = [0, *(round(total * part / sum(shares)) for part in itertools.accumulate(shares))]
    return {name: b - a for name, a, b in zip(options.stages, ends, ends[1:], strict=False)}
