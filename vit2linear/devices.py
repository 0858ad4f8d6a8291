"""Where and how precisely to compute, as accelerate finds it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, parse_flag_from_env

from vit2linear.errors import DistillError, RecipeError
from vit2linear.recipe import Recipe, override

PATIENCE = InitProcessGroupKwargs(timeout=timedelta(hours=2))
"""The other processes wait while the main one evaluates, which may take longer than the usual 10 minutes on GPUs."""


SHARDED = {"FSDP": "FSDP", "DEEPSPEED": "DeepSpeed", "MEGATRON_LM": "Megatron-LM"}
"""What accelerate's configuration may ask for and a conversion cannot do, by the variable that asks."""


def accelerator_for(recipe: Recipe) -> Accelerator:
    """Devices, processes and precision, as accelerate finds them.

    Raises:
        RecipeError: a device or a precision that is not there, or models that are to be split over processes.
    """
    for variable, name in SHARDED.items():
        if parse_flag_from_env(f"ACCELERATE_USE_{variable}"):
            raise RecipeError(
                f"accelerate's configuration asks for {name}, which splits models over processes. Stage attention "
                "runs single modules of the student, and gradients are averaged whole.",
                "Choose multi-GPU without it (accelerate config, or torchrun); --grad-checkpointing, "
                "--grad-accum-steps and --mixed-precision bf16 save memory.",
            )
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


@contextmanager
def processes_together() -> Iterator[None]:
    """What runs inside waits for the other processes again and again.

    Raises:
        DistillError: one of them is gone.
    """
    try:
        yield
    except RuntimeError as error:
        # NCCL has an error of its own; gloo's is told by the file that it names.
        if not isinstance(error, torch.distributed.DistError) and "gloo" not in str(error):
            raise
        seen = str(error).partition(". ")[0]
        raise DistillError(
            f"the processes lost each other ({seen}).",
            "See what ended the other one; then run the same command with --resume.",
        ) from error


def device_of(name: str) -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``mps`` as a device that is there."""
    device: torch.device = accelerator_for(override(Recipe(), run__device=name)).device
    return device
