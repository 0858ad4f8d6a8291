"""Where and how precisely to compute, as accelerate finds it."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from vit2linear.errors import RecipeError
from vit2linear.recipe import Recipe, override

PATIENCE = InitProcessGroupKwargs(timeout=timedelta(hours=2))
"""The other processes wait while the main one evaluates, which may take longer than the usual 10 minutes on GPUs."""


def accelerator_for(recipe: Recipe) -> Accelerator:
    """Devices, processes and precision, as accelerate finds them; a device that is not there is an error."""
    device, precision = recipe.run.device, recipe.run.mixed_precision
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device, True):
        raise RecipeError(f"run.device is {device!r}, but there is no such device here.", "Use --device auto or cpu.")
    on_gpu = present["cuda"] and device in ("auto", "cuda")
    if precision == "fp16" and not on_gpu:
        raise RecipeError("run.mixed_precision is 'fp16', which needs a CUDA GPU.", "Use --mixed-precision bf16 or no.")
    if precision == "auto":
        precision = "bf16" if on_gpu and torch.cuda.is_bf16_supported() else "no"
    started = int(os.environ.get("WORLD_SIZE", "1"))
    # Without a GPU accelerate would let each of several processes believe that it is alone.
    accelerator = Accelerator(
        cpu=device == "cpu" or (started > 1 and device == "auto" and not any(present.values())),
        mixed_precision=precision,
        kwargs_handlers=[PATIENCE],
        log_with=[*recipe.run.track] or None,
        project_dir=None if recipe.output.dir is None else f"{recipe.output.dir}-logs",
    )
    if accelerator.num_processes != started:
        raise RecipeError(
            f"{started} processes were started, and on device {device!r} accelerate joins {accelerator.num_processes}.",
            "Use --device cpu, or start one process.",
        )
    return accelerator


def device_of(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``mps`` as a device that is there."""
    device: torch.device = accelerator_for(override(Recipe(), run__device=name)).device
    return device
