"""``report.json``: all that is known of a finished conversion; card, pictures and page show it."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import vit2linear
from vit2linear import artifact, evidence, page, pictures
from vit2linear.audit import Audit
from vit2linear.card.card import render
from vit2linear.card.drawn import draw
from vit2linear.compare import EvalReport
from vit2linear.evaluation import Judge
from vit2linear.images import on_hub
from vit2linear.initial import start_words
from vit2linear.journal import Journal
from vit2linear.plan import plan_notes
from vit2linear.prepare import Prepared
from vit2linear.probe import plan_to_json
from vit2linear.recipe import Recipe, to_toml
from vit2linear.speed import Speed, job_of, measure_speed

LOOKED_AT = 64
"""Validation images among which the page finds the ones that differ most."""


def record_of(
    prepared: Prepared,
    dtype: str,
    journal: Journal,
    judge: Judge,
    audited: Audit,
    report: EvalReport,
    speed: Speed | None,
) -> dict[str, Any]:
    """The record, JSON; ``dtype`` is that of the source's weights as stored."""
    recipe, plan = prepared.recipe, prepared.plan
    paths = [recipe.data.path] if isinstance(recipe.data.path, str) else [*(recipe.data.path or ())]
    return {
        "format": 1,
        "vit2linear": vit2linear.__version__,
        "versions": {p: version(p) for p in ("torch", "timm", "accelerate")} | {"python": platform.python_version()},
        "source": {
            **prepared.ref.record(),
            "architecture": prepared.spec.architecture,
            "dtype": dtype,
            "gated": prepared.ref.repo is not None and prepared.ref.repo.gated,
            **prepared.licence.fields,
        },
        "data": {
            **judge.record,
            "on_hub": [path for path in paths if on_hub(path)],
            "bad": {"count": len(judge.bad.found), "images": judge.bad.found},
        },
        "input_size": prepared.data_config["input_size"],
        "flops": {"source": prepared.probe.flops_before, "student": prepared.probe.flops},
        "notes": plan_notes(plan),
        "plan": plan_to_json(plan, prepared.probe),
        "start": {
            "init": recipe.source.init,
            "head": recipe.source.head,
            "words": start_words(recipe.source, not prepared.num_classes),
        },
        "keep_softmax": journal.keep_softmax,
        "audit": dataclasses.asdict(audited),
        "calibration": journal.calibration,
        "stages": journal.stages,
        "history": journal.history,
        "evaluation": dataclasses.asdict(report),
        "speed": dataclasses.asdict(speed) if speed is not None else None,
    }


def timed(
    prepared: Prepared, teacher: nn.Module, student: nn.Module, device: torch.device, journal: Journal
) -> Speed | None:
    """The speed of both models, unless the recipe does without."""
    if not prepared.recipe.output.bench:
        return None
    job = job_of(prepared.spec.architecture, prepared.spec.model_args, prepared.plan.operators)
    height, width = prepared.data_config["input_size"][-2:]
    trained = sum((stage["seconds"] for stage in journal.stages), 0.0)
    return measure_speed(teacher, student, job, (height, width), device, trained)


def shown(
    prepared: Prepared, record: dict[str, Any], recipe: Recipe, teacher: nn.Module, student: nn.Module, judge: Judge
) -> tuple[str, dict[str, bytes]]:
    """The card's text, and pictures and page by file name; the record gets what the page says of routing."""
    name, files, found = prepared.output.name, draw(record), None
    if LOOKED_AT:
        pixels, labels = judge.look(LOOKED_AT), prepared.spec.pretrained_cfg.get("label_names")
        found = evidence.gather(teacher, student, pixels, prepared.data_config, labels)
        record["routing"] = {path: dataclasses.asdict(site) for path, site in found.routing.items()}
        record["looked_at"] = len(pixels)
    drawn = pictures.draw(record["stages"], found)
    drawn |= {key: files[f] for key, f in (("speed", artifact.SPEED), ("errors", artifact.SITES)) if f in files}
    files[artifact.PAGE] = page.render(name, record, to_toml(recipe), drawn).encode()
    return render(name, record, recipe), files
