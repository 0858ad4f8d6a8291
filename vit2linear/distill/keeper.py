"""What a stage hands out while it runs, and gets back when it is resumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Saved:
    """A stage between two steps."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    """``student``, ``optimiser`` and, with averaged weights, ``average``."""
    state: dict[str, Any]
    """The rest; JSON."""


class Keeper:
    """Keeps nothing; a conversion's keeper writes checkpoints and metrics."""

    resumed: Saved | None = None
    """Where the stage goes on."""

    def due(self, step: int) -> bool:
        """Whether the state is to be saved after this step."""
        return False

    def save(self, saved: Saved) -> None:
        """Keep the state of the stage."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Keep what was measured at a step."""

    def stop_wanted(self) -> bool:
        """Whether the run is to end after this step, the same on every process."""
        return False

    def stop(self) -> None:
        """End the run, after ``stop_wanted`` and ``save``."""
