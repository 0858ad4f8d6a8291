"""One cell at one seed: run it, keep what matters, find it again."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_file import Cell, Experiment, expand, expanded, paths_of

from vit2linear.errors import RecipeError
from vit2linear.recipe import Recipe, to_toml
from vit2linear.strict import build


@dataclass(frozen=True)
class Job:
    """One cell at one seed."""

    settings: dict[str, Any]
    """The whole recipe as a plain table, paths not expanded."""
    test: str | None
    output: Path

    @property
    def recipe(self) -> Recipe:
        """The settings as a recipe; keys that are younger than the settings have their defaults."""
        return build(Recipe, self.settings, Recipe(), str(self.output))

    @property
    def done(self) -> bool:
        """Whether the output holds a result of the same settings."""
        return result_of(self) is not None


def result_of(job: Job) -> dict[str, Any] | None:
    """The result that is there, if its settings are the job's."""
    try:
        result: dict[str, Any] = json.loads(job.output.read_text("utf-8"))
        kept = dataclasses.replace(job, settings=result["settings"], test=result["test_data"])
        return result if (kept.recipe, kept.test) == (job.recipe, job.test) else None
    except (OSError, ValueError, KeyError, TypeError, RecipeError):
        return None


def job_of(experiment: Experiment, cell: Cell, seed: int, results: Path) -> Job:
    """One cell at one seed."""
    settings = tomllib.loads(to_toml(cell.seeded(seed)))
    return Job(settings, experiment.test, results / experiment.name / f"{cell.name}-{seed}.json")


def jobs_of(experiment: Experiment, results: Path, only: str = "*", seeds: list[int] | None = None) -> list[Job]:
    """The jobs of the cells whose name matches ``only``; ``seeds`` default to the experiment's."""
    return [
        job_of(experiment, cell, seed, results)
        for seed in seeds or experiment.seeds
        for cell in experiment.cells
        if fnmatch.fnmatchcase(cell.name, only)
    ]


def results_of(experiment: Experiment, cell: Cell, results: Path) -> list[dict[str, Any]]:
    """The results of a cell that are there, of every seed and with its settings, in the order of the seeds."""
    prefix = f"{cell.name}-"
    names = (path.stem.removeprefix(prefix) for path in (results / experiment.name).glob(f"{prefix}*.json"))
    jobs = (job_of(experiment, cell, seed, results) for seed in sorted(int(n) for n in names if n.isdigit()))
    return [result for job in jobs if (result := result_of(job)) is not None]


def run_job(job: Job) -> None:
    """Convert, judge on the test images, and write the result.

    Raises:
        Vit2LinearError: as ``convert`` and ``evaluate`` raise it.
    """
    import torch

    import vit2linear

    start, recipe, test = time.perf_counter(), expand(job.recipe), expanded(job.test)
    with tempfile.TemporaryDirectory() as folder:
        output = dataclasses.replace(recipe.output, dir=str(Path(folder) / "artifact"), bench=False)
        artifact = vit2linear.convert(dataclasses.replace(recipe, output=output))
        tested = None
        if test is not None:
            tested = vit2linear.evaluate(
                artifact,
                data=test,
                batch_size=recipe.distill.batch_size,
                workers=recipe.data.workers,
                limit=recipe.data.eval_samples,
                device=recipe.run.device,
            )
    result: dict[str, Any] = {
        "settings": job.settings,
        "test_data": job.test,
        "test": dataclasses.asdict(tested) if tested is not None else None,
        **essentials(artifact.report),
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - start,
    }
    selected = zip(paths_of(job.recipe), paths_of(recipe), strict=True)
    for which, name, place in (("test", job.test, test), *(("select", *pair) for pair in selected)):
        if result[which] is not None and name is not None:  # where the images lie here is nobody else's business
            result[which]["data"] = result[which]["data"].replace(place, name)
    text = json.dumps(_rounded(result), indent=1) + "\n"
    job.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.output.with_suffix(".part")
    temporary.write_text(text, "utf-8")
    temporary.replace(job.output)


def essentials(report: dict[str, Any]) -> dict[str, Any]:
    """What is kept of an artifact's report: nothing of the machine's folders, sites that run alike together."""
    sites: dict[str, dict[str, Any]] = {}
    for site in report["plan"]:
        alike = {k: site[k] for k in ("op", "options", "modifiers", "evaluation") if k in site}
        sites.setdefault(json.dumps(alike), {**alike, "sites": []})["sites"].append(site["site"]["path"])
    stages = [
        {**{k: v for k, v in stage.items() if k != "losses"}, "first": stage["losses"][0], "last": stage["losses"][-1]}
        for stage in report["stages"]
    ]
    calibration = {k: v for k, v in (report["calibration"] or {}).items() if k != "sites"} or None
    return {
        "select": report["evaluation"],
        "history": [{k: v for k, v in moment.items() if k != "site_errors"} for moment in report["history"]],
        "calibration": calibration,
        "stages": stages,
        "plan": [*sites.values()],
        "source": {k: v for k, v in report["source"].items() if k != "name"},
        "versions": {"vit2linear": report["vit2linear"], **report["versions"]},
    }


def _rounded(value: Any) -> Any:
    """Floats of a JSON value to 6 significant digits."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
