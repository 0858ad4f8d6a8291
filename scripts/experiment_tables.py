"""Results of experiments as tables and plots in a page of the documentation."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiment_file import Cell, Experiment
from experiment_run import results_of

from vit2linear.recipe import OPERATORS

BLOCK = re.compile(r"<!-- experiment: (\S+) -->\n.*?<!-- /experiment -->\n", re.DOTALL)
# Okabe and Ito's colours, which colour-blind readers tell apart; each line has a marker of its own as well.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"


@dataclass(frozen=True)
class Metric:
    """A figure of an evaluation."""

    title: str
    form: str
    student: Callable[[dict[str, Any]], float | None]
    teacher: Callable[[dict[str, Any]], float | None] = lambda _: None


def _score(key: str, title: str) -> Metric:
    return Metric(title, ".2f", lambda e: e["student"].get(key), lambda e: e["teacher"].get(key))


SHOWN = {
    "top1": _score("top1", "top-1, %"),
    "knn": _score("knn", "10-NN, %"),
    "probe": _score("probe", "ridge probe, %"),
    "agreement": Metric("same first class, %", ".2f", lambda e: e["agreement"]),
    "feature_cosine": Metric("cosine of features", ".4f", lambda e: e["feature_cosine"]),
    "speedup": Metric("speed over softmax", ".2f", lambda e: e["speedup"]),
}
Found = dict[str, list[dict[str, Any]]]
"""Results by cell name."""


def update_page(docs: Path, experiments: list[Experiment]) -> None:
    """Write tables into ``docs/results.md`` from ``docs/results/``, and the plots beside it.

    A block lies between ``<!-- experiment: NAME -->`` and ``<!-- /experiment -->``; a new one goes to the end.
    """
    page = docs / "results.md"
    page.write_text(updated(page.read_text("utf-8"), docs, experiments), "utf-8")
    for experiment in experiments:
        found = _results(experiment, docs)
        if experiment.plot and any(found.values()):
            plot(experiment, found, docs / f"{experiment.name}.png")


def updated(text: str, docs: Path, experiments: list[Experiment]) -> str:
    """The page's text with the blocks of these experiments as the results are now; one without results has no block."""
    for experiment in experiments:
        block = render(experiment, _results(experiment, docs))
        start = f"<!-- experiment: {experiment.name} -->\n"
        if start in text:
            text = BLOCK.sub(lambda m: block if m[1] == experiment.name else m[0], text)  # noqa: B023  called at once
        elif block:
            text = f"{text.rstrip()}\n\n{block}"
    return f"{text.rstrip()}\n"


def render(experiment: Experiment, found: Found) -> str:
    """The block of one experiment, with its markers; empty where there are no results."""
    results = [result for cell in experiment.cells for result in found[cell.name]]
    if not results:
        return ""
    rows = list(dict.fromkeys(cell.row for cell in experiment.cells))
    columns = list(dict.fromkeys(cell.column for cell in experiment.cells))
    at = {(cell.row, cell.column): cell for cell in experiment.cells}
    best = {column: _best([c for c in experiment.cells if c.column == column], found) for column in columns}
    lines = [f"| | {' | '.join(map(_label, columns))} |", f"|---{'|---' * len(columns)}|"]
    teacher = _values(experiment, [_shown(results[0])], of_teacher=True)
    if teacher:
        lines.append(f"| teacher (softmax) | {' | '.join([teacher] * len(columns))} |")
    for row in rows:
        entries = []
        for column in columns:
            cell = at.get((row, column))
            text = "" if cell is None else _values(experiment, [_shown(r) for r in found[cell.name]]) or "-"
            entries.append(f"**{text}**" if cell is not None and cell.name == best[column] else text)
        lines.append(f"| {_label(row)} | {' | '.join(entries)} |")
    parts = [
        f"<!-- experiment: {experiment.name} -->",
        f"## {experiment.title}\n",
        *([f"{experiment.text}\n"] if experiment.text else []),
        f"```bash\npython scripts/experiment.py recipes/experiments/{experiment.name}.toml\n```\n",
        "\n".join(lines),
        "",
        _legend(experiment, found, results),
        *([f"\n![{experiment.title}]({experiment.name}.png)"] if experiment.plot else []),
        "<!-- /experiment -->\n",
    ]
    return "\n".join(parts)


def plot(experiment: Experiment, found: Found, path: Path) -> None:
    """The first metric against the steps: one line for each row, the teacher as a line across."""
    from vit2linear.plots import pyplot

    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.5))
    metric = SHOWN[experiment.metrics[0]]
    steps: set[int] = set()
    teacher = None
    for i, row in enumerate(dict.fromkeys(cell.row for cell in experiment.cells)):
        points = []
        for cell in experiment.cells:
            shown = [_shown(result) for result in found[cell.name]]
            values = [value for e in shown if (value := metric.student(e)) is not None]
            if cell.row == row and values:
                points.append((cell.recipe.distill.steps or 0, statistics.fmean(values), _deviation(values)))
                teacher = metric.teacher(shown[0])
        if points:
            x, y, error = zip(*sorted(points), strict=True)
            steps |= set(x)
            axis.errorbar(
                x,
                y,
                error if any(error) else None,
                color=COLOURS[i % 7],
                marker=MARKERS[i % 7],
                markersize=5,
                capsize=2,
                label=row,
            )
    if teacher is not None:
        axis.axhline(teacher, color="0.4", linestyle="--", linewidth=1, label="teacher (softmax)")
    # Logarithmic, but 0 has its place.
    first = min((s for s in steps if s), default=1)
    axis.set_xscale("symlog", linthresh=first, linscale=0.4)
    axis.set_xlim(left=-0.1 * first)
    axis.set_xticks(sorted(steps), [f"{s:,}" for s in sorted(steps)])
    axis.minorticks_off()
    axis.set_xlabel("optimiser steps")
    axis.set_ylabel(metric.title)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _results(experiment: Experiment, docs: Path) -> Found:
    return {cell.name: results_of(experiment, cell, docs / "results") for cell in experiment.cells}


def _label(text: str) -> str:
    return f"`{text}`" if text in OPERATORS.names() else text


def _shown(result: dict[str, Any]) -> dict[str, Any]:
    """The evaluation that is reported: on the test images, where there are any."""
    evaluation: dict[str, Any] = result["test"] or result["select"]
    return evaluation


def _values(experiment: Experiment, evaluations: list[dict[str, Any]], of_teacher: bool = False) -> str:
    """Mean over seeds of each metric, with the standard deviation where there are several."""
    texts = []
    for metric in (SHOWN[name] for name in experiment.metrics):
        get = metric.teacher if of_teacher else metric.student
        values = [value for e in evaluations if (value := get(e)) is not None]
        if values:
            text = f"{statistics.fmean(values):{metric.form}}"
            texts.append(f"{text} ± {_deviation(values):{metric.form}}" if len(values) > 1 else text)
    count = (
        f" (n = {len(evaluations)})" if texts and not of_teacher and len(evaluations) != len(experiment.seeds) else ""
    )
    return " / ".join(texts) + count


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _best(cells: list[Cell], found: Found) -> str | None:
    """The cell with the highest score on the images to choose by: top-1, or the features' cosine without labels."""
    scores = {}
    for cell in cells:
        evaluations = [result["select"] for result in found[cell.name]]
        values = [e["feature_cosine"] if e["student"]["top1"] is None else e["student"]["top1"] for e in evaluations]
        if values:
            scores[cell.name] = statistics.fmean(values)
    return max(scores, key=scores.__getitem__) if len(scores) > 1 else None


def _legend(experiment: Experiment, found: Found, results: list[dict[str, Any]]) -> str:
    """What the figures are: metrics, images, seeds, choice, evaluation orders, versions."""
    shown, chosen = _shown(results[0]), results[0]["select"]
    title = " / ".join(SHOWN[name].title for name in experiment.metrics)
    count = len(experiment.seeds)
    over = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    parts = [f"{title[0].upper()}{title[1:]} on {shown['data']}, {shown['images']:,} images; {over}."]
    if len({cell.row for cell in experiment.cells}) > 1 and results[0]["test"] is not None:
        by = "top-1" if chosen["student"]["top1"] is not None else "cosine of features"
        parts.append(f"Bold: the best {by} of its column on the images to choose by, {chosen['data']}, ")
        parts[-1] += f"{chosen['images']:,} images."
    there = sum(1 for cell in experiment.cells if found[cell.name])
    if there < len(experiment.cells):
        parts.append(f"{there} of {len(experiment.cells)} cells have been run.")
    orders: dict[str, dict[str, None]] = {}
    for result in results:
        for site in result["plan"]:
            if "evaluation" in site:
                orders.setdefault(site["op"], {})[site["evaluation"]] = None
    parts.append("Evaluated in: " + "; ".join(f"`{op}` {' or '.join(ways)}" for op, ways in orders.items()) + ".")
    versions = sorted({result["versions"]["torch"] for result in results})
    threads = sorted({result["threads"] for result in results})
    parts.append(f"torch {' and '.join(versions)}, {' or '.join(map(str, threads))} CPU thread(s) for each run.")
    return " ".join(parts)
