"""Reading a checkpoint: a folder of ``state.json`` and safetensors, complete or absent. ``RunFolder`` writes it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from vit2linear.errors import ArtifactError

STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path

    @property
    def place(self) -> tuple[int, int]:
        """Moment and step."""
        _, moment, step = self.folder.name.split("-")
        return int(moment), int(step)

    @property
    def state(self) -> dict[str, Any]:
        """All that is no tensor."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATE).read_text("utf-8"))
            if state["format"] != FORMAT:
                raise ValueError(f"its format is {state['format']}, and this version reads {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._broken(STATE, error) from error
        return state

    def tensors(self, device: str = "cpu") -> dict[str, dict[str, Tensor]]:
        """By file and key."""
        found = {}
        for name in self.state["files"]:
            try:
                found[name] = load_file(self.folder / f"{name}.safetensors", device)
            except (OSError, SafetensorError) as error:
                raise self._broken(f"{name}.safetensors", error) from error
        return found

    def _broken(self, name: str, error: Exception) -> ArtifactError:
        return ArtifactError(
            f"the checkpoint {str(self.folder)!r} cannot be read: {name}: {error}.", "Start anew with --overwrite."
        )
