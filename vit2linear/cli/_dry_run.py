"""What ``convert --dry-run`` shows: the plan, what it is expected to take, and with ``--probe`` what it takes."""

from __future__ import annotations

import os
from typing import Any

from vit2linear.cli._output import clock, err, out, print_json, sites_table
from vit2linear.expected import Expected, expected, to_json
from vit2linear.prepare import Prepared
from vit2linear.probe import plan_to_json
from vit2linear.trial import Trial, try_out


def show(prepared: Prepared, probe: bool, ignore_labels: bool, json: bool) -> None:
    """In the first process only, where ``torchrun`` or ``accelerate launch`` started several."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    estimate = expected(prepared, processes)
    main = os.environ.get("RANK", "0") == "0"
    if main and not json:
        _show_plan(prepared, estimate, processes, probe)
    trial = try_out(prepared, ignore_labels) if probe else None
    if not main:
        return
    if json:
        print_json({**_plan_json(prepared), "expected": to_json(estimate), "probe": trial and trial.to_json()})
    elif trial is not None:
        _show_trial(trial)


def _plan_json(prepared: Prepared) -> dict[str, Any]:
    return {
        "source": prepared.ref.name,
        "commit": prepared.ref.repo.commit if prepared.ref.repo is not None else None,
        "architecture": prepared.spec.architecture,
        "parameters": prepared.parameters,
        "input_size": list(prepared.data_config["input_size"]),
        "steps": prepared.recipe.distill.steps,
        "data": prepared.recipe.data.path,
        "output": str(prepared.output),
        "plan": plan_to_json(prepared.plan, prepared.probe),
        "notes": list(prepared.notes),
    }


def _show_plan(prepared: Prepared, estimate: tuple[Expected, ...], processes: int, probe: bool) -> None:
    commit = f" at {prepared.ref.repo.commit[:12]}" if prepared.ref.repo is not None else ""
    size = "x".join(map(str, prepared.data_config["input_size"]))
    err.print(f"{prepared.ref.name}{commit}: {prepared.spec.architecture}, input {size}", markup=False)
    out.print(sites_table("Plan", plan_to_json(prepared.plan, prepared.probe)))
    for note in prepared.notes:
        err.print(note, markup=False)
    recipe = prepared.recipe
    data = recipe.data.path if isinstance(recipe.data.path, str) else " and ".join(recipe.data.path or ())
    err.print(
        f"{prepared.parameters:,} parameters; {recipe.distill.steps} steps of {recipe.distill.batch_size} images from "
        f"{data}; would write {prepared.output}." + ("" if probe else " Nothing was read or written."),
        markup=False,
    )
    where = f" on each of {processes} processes" if processes > 1 else ""
    for stage in estimate:
        err.print(f"expected{where}: {stage.words}", markup=False)


def _show_trial(trial: Trial) -> None:
    for stage in trial.stages:
        err.print(f"measured: {stage.words}", markup=False)
    processes = f"{trial.processes} processes" if trial.processes > 1 else "one process"
    err.print(
        f"All stages take about {clock(trial.seconds)} on {trial.device} with {processes}; evaluation comes on top. "
        "Nothing was written.",
        markup=False,
    )
