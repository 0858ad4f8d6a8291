"""The only place that writes to the terminal: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.table import Table

from vit2linear.reporting import Progress, Reporter

PLAIN_EVERY = 10.0
"""Seconds between progress lines where stderr is no terminal."""

err = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    out.file.write(json.dumps(value, indent=2) + "\n")


def sites_table(title: str, sites: list[dict[str, Any]]) -> Table:
    """One row for each site, as ``plan_to_json`` gives them."""
    rows = []
    for s in sites:
        how = s.get("evaluation", "") + "".join(f"; no {name}" for name in s["drop"])
        keys, queries = s.get("keys", ""), s.get("queries", "")
        tokens = f"{keys}" if keys == queries else f"{queries} on {keys}"
        geometry = s["site"]["geometry"]
        rows.append([s["site"]["path"], s["op"], how, f"{geometry['num_heads']} x {geometry['head_dim']}", tokens])
    return table(title, ["site", "operator", "evaluation", "heads", "tokens"], rows, left=3)


class TerminalReporter(Reporter):
    """Rich bars on a terminal, plain lines otherwise."""

    def __init__(self) -> None:
        self._bars: Bars | None = None
        self._tasks: dict[str, Any] = {}
        self._last = 0.0

    def __enter__(self) -> TerminalReporter:
        if err.is_terminal:
            columns = [
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[info]}"),
            ]
            self._bars = Bars(*columns, console=err)
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def say(self, text: str) -> None:
        """A line, above the bars."""
        err.print(text, markup=False)

    def progress(self, progress: Progress) -> None:
        """Loss, images/s and time left of the running stage."""
        info = (
            f"loss {progress.loss:.4f}, {progress.images_per_second:.0f} images/s, {clock(progress.seconds_left)} left"
        )
        if self._bars is not None:
            if progress.stage not in self._tasks:
                self._tasks[progress.stage] = self._bars.add_task(
                    f"stage {progress.stage}", total=progress.total, info=""
                )
            self._bars.update(self._tasks[progress.stage], completed=progress.step, info=info)
            return
        now = time.monotonic()
        if progress.step == progress.total or now - self._last >= PLAIN_EVERY:
            self._last = now
            err.print(f"stage {progress.stage}: step {progress.step}/{progress.total}, {info}", markup=False)


def table(title: str, columns: list[str], rows: list[list[str]], left: int = 1) -> Table:
    """A table: the first ``left`` columns start at the left, the others end at the right."""
    result = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        result.add_column(column, justify="left" if i < left else "right")
    for row in rows:
        result.add_row(*row)
    return result


def clock(seconds: float) -> str:
    """``1:02:03``, or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
