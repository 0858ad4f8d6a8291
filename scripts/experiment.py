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
import json
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from experiment_file import expanded, paths_of, read_experiment
from experiment_run import Job, jobs_of, run_job
from experiment_tables import update_page

from vit2linear.errors import DataError, Vit2LinearError

ROOT = Path(__file__).parents[1]
FILES = ROOT / "recipes" / "experiments"
DOCS = ROOT / "docs"
JOBS = 2
"""At a time: on two cores one thread each, where two threads of one job would mostly wait for each other."""


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
    for path in sorted({p for job in todo for p in (*paths_of(job.recipe), job.test) if p is not None}):
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
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of results.md and of the JSON files, results/")
    parser.add_argument("--table", action="store_true", help="write the tables into results.md")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not (args.experiment or args.table or args.job):
        parser.error("name an experiment file, or say --table")
    try:
        if args.job:
            logging.disable()
            job = json.load(sys.stdin)
            run_job(Job(job["settings"], job["test"], Path(job["output"])))
            return 0
        experiments = [read_experiment(path) for path in args.experiment or sorted(FILES.glob("*.toml"))]
        if args.table:
            update_page(args.docs, experiments)
            return 0
        jobs = [job for e in experiments for job in jobs_of(e, args.docs / "results", args.only, args.seeds)]
        todo = [job for job in jobs if not job.done]
        print(f"{len(jobs) - len(todo)} of {len(jobs)} runs are there, {len(todo)} to run", flush=True)
        check_images(todo)
        return 0 if run(todo, args.jobs) else 1
    except Vit2LinearError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
