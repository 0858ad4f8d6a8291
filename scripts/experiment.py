"""Run an experiment: every cell of a table is a conversion, judged on images that chose nothing.

::

    python scripts/experiment.py recipes/experiments/ladder.toml
    python scripts/experiment.py --table

The first command runs each cell at each seed in a process of its own and leaves one JSON file of it in
``docs/results/EXPERIMENT/CELL-SEED.json``: scores on the images to choose by and on those to report, the history, what
the stages did, how the sites are evaluated, versions, and the settings. The weights are thrown away. A cell whose file
has the same settings is not run again, so an interrupted experiment goes on where it stopped, and a changed cell is run
anew. The second command writes all results as tables into ``docs/results.md``. ``experiment_file.py`` says what a file
holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_file import Experiment, expand, expanded, read_experiment

from vit2linear.errors import DataError, RecipeError, Vit2LinearError
from vit2linear.recipe import Recipe, to_toml
from vit2linear.strict import build

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
JOBS = 2
"""One thread each: on two cores that is faster than one job with two threads."""


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


def jobs_of(experiment: Experiment, results: Path, only: str = "*", seeds: list[int] | None = None) -> list[Job]:
    """The jobs of the cells whose name matches ``only``; ``seeds`` default to the experiment's."""
    return [
        Job(
            tomllib.loads(to_toml(cell.seeded(seed))),
            experiment.test,
            results / experiment.name / f"{cell.name}-{seed}.json",
        )
        for seed in seeds or experiment.seeds
        for cell in experiment.cells
        if fnmatch.fnmatchcase(cell.name, only)
    ]


def run_job(job: Job) -> None:
    """Convert, judge on the test images, and write the result.

    Raises:
        Vit2LinearError: as ``convert`` and ``evaluate`` raise it.
    """
    import torch

    import vit2linear

    start, recipe, test = time.perf_counter(), expand(job.recipe), expanded(job.test)
    with tempfile.TemporaryDirectory() as folder:
        output = dataclasses.replace(recipe.output, dir=str(Path(folder) / "artifact"))
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
    result = {
        "settings": job.settings,
        "test_data": job.test,
        "test": dataclasses.asdict(tested) if tested is not None else None,
        **essentials(artifact.report),
        "threads": torch.get_num_threads(),
        "seconds": time.perf_counter() - start,
    }
    text = json.dumps(_rounded(result), indent=1) + "\n"
    for name, place in ((job.test, test), (job.recipe.data.path, recipe.data.path)):
        text = text.replace(f'"{place} (', f'"{name} (') if name and place else text
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
        "history": report["history"],
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


def run_apart(job: Job, threads: int) -> float:
    """``run_job`` in a process of its own; returns its seconds.

    Raises:
        RuntimeError: it failed; the end of what it said.
    """
    start = time.perf_counter()
    text = json.dumps({**dataclasses.asdict(job), "output": str(job.output)})
    done = subprocess.run(
        [sys.executable, __file__, "--job"],
        input=text,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    if done.returncode:
        raise RuntimeError(f"{job.output.stem} failed: {done.stderr.strip()[-2000:]}")
    return time.perf_counter() - start


def run(todo: list[Job], parallel: int) -> bool:
    """Run the jobs, ``parallel`` at a time (0: in this process); whether all of them succeeded."""
    if not parallel:
        for job in todo:
            run_job(job)
        return True
    threads = max(1, (os.cpu_count() or 1) // parallel)
    pool = ThreadPoolExecutor(parallel)
    failed = 0
    try:
        running = {pool.submit(run_apart, job, threads): job for job in todo}
        for count, future in enumerate(as_completed(running), 1):
            name = f"[{count}/{len(todo)}] {running[future].output.stem}"
            try:
                seconds = future.result()
            except RuntimeError as error:
                failed += 1
                print(f"{name}: {error}", file=sys.stderr, flush=True)
            else:
                print(f"{name}: {seconds:.0f} s", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return not failed


def check_images(todo: list[Job]) -> None:
    """Raise ``DataError`` where a folder of images is not there, which ``convert`` would look for on the Hub."""
    for path in sorted({p for job in todo for p in (job.recipe.data.path, job.test) if p is not None}):
        if path != "demo" and not Path(str(expanded(path))).is_dir():
            raise DataError(
                f"there is no folder {path!r} here.", "Fashion-MNIST: python scripts/fashion_mnist.py IDX_DIR data."
            )


def main(arguments: list[str] | None = None) -> int:
    """Run cells, or write the tables; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, nargs="*", help="experiment files")
    parser.add_argument("--only", default="*", metavar="GLOB", help="cells to run, by name")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the file")
    parser.add_argument("--jobs", type=int, default=JOBS, help="at a time, sharing the cores; 0: in this process")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON files")
    parser.add_argument("--table", action="store_true", help="write the tables into docs/results.md")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    try:
        if args.job:
            logging.disable()
            job = json.load(sys.stdin)
            run_job(Job(job["settings"], job["test"], Path(job["output"])))
            return 0
        jobs = [
            job
            for path in args.experiment
            for job in jobs_of(read_experiment(path), args.results, args.only, args.seeds)
        ]
        todo = [job for job in jobs if not job.done]
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there, {len(todo)} to run", flush=True)
        check_images(todo)
        return 0 if run(todo, args.jobs) else 1
    except Vit2LinearError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
