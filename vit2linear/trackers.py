"""Experiment trackers, as accelerate has them; none unless the user asks for one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from vit2linear.errors import RecipeError, UnknownNameError

PROJECT = "vit2linear"


def check_trackers(names: Iterable[str]) -> None:
    """Raise for a tracker that cannot be had.

    Raises:
        UnknownNameError: accelerate has none of that name.
        RecipeError: it is not installed.
    """
    installed = sorted(str(name) for name in get_available_trackers())
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise UnknownNameError("tracker", name, LOGGER_TYPE_TO_CLASS)
        if name not in installed:
            raise RecipeError(
                f"run.track: {name!r} is not installed.",
                f"Install it, or use one that is: {', '.join(installed) or 'there is none'}.",
            )


def start_trackers(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """Start those that the accelerator was made with; files go into its project folder.

    Args:
        accelerator: of ``devices.accelerator_for``.
        settings: flat; what is no plain value is shown as text.
    """
    if not accelerator.log_with:
        return
    folder = Path(accelerator.project_dir)
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    plain = {k: v if isinstance(v, bool | int | float | str) else str(v) for k, v in settings.items()}
    accelerator.init_trackers(PROJECT, plain, {"wandb": {"dir": str(folder)}})
