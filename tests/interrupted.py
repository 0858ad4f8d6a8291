"""Conversions that end at a chosen place, and what must be the same once they are resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from vit2linear import Recipe, convert
from vit2linear.recipe import override
from vit2linear.reporting import Progress, Reporter
from vit2linear.site import LinearAttention

EVERYTHING = {
    "distill__steps": 9,
    "distill__attention__share": 1.0,
    "distill__feature__share": 1.0,
    "distill__task__share": 1.0,
    # Three steps of 10 images go through the 24 images more than once, in parts of 4, 4 and 2.
    "distill__batch_size": 10,
    "distill__grad_accum_steps": 3,
    "distill__augment": "mild",
    "distill__ema": 0.5,
    "distill__calibration__images": 12,
    "distill__calibration__before": ["attention", "feature"],
}
"""Three stages of three steps, a closed form before two of them, and whatever else a checkpoint has to carry."""
TIMES = {"seconds", "waiting", "images_per_second", "speedup", "speed", "files"}
"""What no two runs have in common."""


class Cut(Exception):  # noqa: N818
    """Nothing that the package knows."""


def request(source: Path, images: Path, output: Path, **values: Any) -> Recipe:
    """A conversion on the CPU, by default of two steps of stage ``attention``."""
    base = {
        "source__model": str(source),
        "data__path": str(images),
        "data__workers": 0,
        "output__dir": str(output),
        "run__device": "cpu",
        "distill__steps": 2,
        "distill__batch_size": 4,
        "distill__feature__share": 0.0,
    }
    return override(Recipe(), **(base | values))


class Scissors(Reporter):
    """Cuts once ``event`` was heard and ``calls`` sites have run since; 0: in the reporter itself.

    An event is what is said, up to the colon, or stage and step: ``attention 2``.
    """

    def __init__(self, event: str = "", calls: int = 0) -> None:
        self.event, self.calls = event, calls
        self.left: int | None = None
        self.heard: list[str] = []

    def say(self, text: str) -> None:
        self._hear(text.partition(":")[0])

    def progress(self, progress: Progress) -> None:
        self._hear(f"{progress.stage} {progress.step}")

    def _hear(self, event: str) -> None:
        self.heard.append(event)
        if event == self.event:
            self.left = self.calls
            if not self.calls:
                self.cut()

    def count(self, module: nn.Module, args: Any) -> None:
        """Of every module's forward."""
        if self.left and isinstance(module, LinearAttention):
            self.left -= 1
            if not self.left:
                self.cut()

    def cut(self) -> None:
        """End the conversion."""
        raise Cut


def interrupt(recipe: Recipe, event: str, calls: int = 0, killed: bool = False) -> list[str]:
    """Begin or resume a conversion and cut it at a place; returns all that was heard.

    Args:
        recipe: what is converted.
        event, calls: the place.
        killed: leave the disk as it was at that moment, as SIGKILL does: nothing is put in order.
    """
    run = run_folder(recipe)
    asis = run.with_suffix(".asis")

    class Killing(Scissors):
        def cut(self) -> None:
            if run.exists():
                shutil.copytree(run, asis)
            super().cut()

    scissors = (Killing if killed else Scissors)(event, calls)
    handle = register_module_forward_pre_hook(scissors.count)
    try:
        with pytest.raises(Cut):
            convert(recipe, resume=True, reporter=scissors)
    finally:
        handle.remove()
    if asis.exists():
        shutil.rmtree(run, ignore_errors=True)
        asis.rename(run)
    return scissors.heard


def run_folder(recipe: Recipe) -> Path:
    """Where an unfinished conversion is."""
    output = Path(str(recipe.output.dir))
    return output.with_name(f"{output.name}.run")


def checkpoints(recipe: Recipe) -> list[str]:
    """Names of what looks like a checkpoint."""
    return sorted(path.name for path in run_folder(recipe).glob("checkpoint-*"))


def assert_same(one: Path, other: Path) -> None:
    """Bit-identical weights, and the same report and metrics but for the time that it took."""
    weights, others = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert weights.keys() == others.keys()
    assert not [key for key in weights if not torch.equal(weights[key], others[key])], "weights that differ"
    reports = [timeless(json.loads((folder / "report.json").read_text())) for folder in (one, other)]
    assert reports[0] == reports[1]
    metrics = [[timeless(json.loads(x)) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (one, other)]
    assert metrics[0] == metrics[1]


def timeless(value: Any) -> Any:
    """The same JSON without what no two runs have in common."""
    if isinstance(value, dict):
        return {key: timeless(item) for key, item in value.items() if key not in TIMES}
    return [timeless(item) for item in value] if isinstance(value, list) else value
