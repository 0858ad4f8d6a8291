"""What makes steps cheaper and leaves their results alone: blocks computed again, and compiled modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import timm
import torch
from timm.layers import set_reentrant_ckpt, use_reentrant_ckpt
from torch import nn

from vit2linear.errors import RecipeError
from vit2linear.losses import LOSSES
from vit2linear.recipe import DistillOptions, RunOptions
from vit2linear.site import sites_of

RECOMPILATIONS = 64
"""Of one method, before torch gives up: a model with stages has sites of several shapes."""


@contextmanager
def economies(teacher: nn.Module, student: nn.Module, run: RunOptions) -> Iterator[None]:
    """Those that the recipe asks for; both models are as they were afterwards."""
    with ExitStack() as stack:
        if run.grad_checkpointing:
            stack.enter_context(blocks_recomputed(student))
        if run.compile:
            stack.enter_context(compiled(teacher, student))
        yield


@contextmanager
def blocks_recomputed(student: nn.Module) -> Iterator[None]:
    """timm's gradient checkpointing: a block keeps its input only, and is computed again in the backward pass.

    Raises:
        RecipeError: the architecture has none.
    """
    reentrant = use_reentrant_ckpt()
    # The reentrant kind runs blocks without gradients at first, and what hooks see of them would have none.
    set_reentrant_ckpt(False)
    try:
        _recompute(student, True)
        yield
    finally:
        set_reentrant_ckpt(reentrant)
        _recompute(student, False)


def check_economies(model: nn.Module, run: RunOptions, distill: DistillOptions) -> None:
    """Raise ``RecipeError`` for what cannot be had with this model and these losses; the model is left as it is."""
    if run.grad_checkpointing:
        with blocks_recomputed(model):
            pass
    for name, stage in distill.stages.items():
        for loss in stage.losses if run.compile and stage.share else ():
            if "maps" in LOSSES[loss].needs:
                raise RecipeError(
                    f"run.compile: the loss {loss!r} of stage {name!r} reads routing maps inside of compiled sites.",
                    "Leave --compile out, or use the loss site_output.",
                )


@contextmanager
def compiled(*models: nn.Module) -> Iterator[None]:
    """Compile what models spend their time in, the sites and the MLPs; names, parameters and hooks stay as they are.

    Not whole models: compiled code does not see hooks that are added later, as stages add theirs to the sites.
    """
    modules = [module for model in models for module in _compilable(model)]
    for module in modules:
        module.forward = torch.compile(module.forward, recompile_limit=RECOMPILATIONS)  # type: ignore[call-overload]
    try:
        yield
    finally:
        for module in modules:
            del module.forward


def check_compiles(device: torch.device) -> None:
    """Compile something small.

    Raises:
        RecipeError: there is no compiler for this device, or it does not work.
    """
    try:
        torch.compile(lambda x: (x + 1).relu())(torch.ones(8, device=device))
    except Exception as error:  # whatever a compiler may raise
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise RecipeError(
            f"run.compile: torch.compile does not work here: {said}",
            "Install what torch names (a C++ compiler on the CPU, Triton on a GPU), or leave --compile out.",
        ) from error


def _compilable(model: nn.Module) -> list[nn.Module]:
    """The sites, and the modules that timm calls ``mlp`` outside of them."""
    sites = sites_of(model)
    inside = tuple(f"{path}." for path in sites)
    mlps = [m for path, m in model.named_modules() if path.split(".")[-1] == "mlp" and not path.startswith(inside)]
    return [*sites.values(), *mlps]


def _recompute(model: nn.Module, enable: bool) -> None:
    try:
        model.set_grad_checkpointing(enable)  # type: ignore[operator]
    except (AssertionError, AttributeError) as error:
        raise RecipeError(
            f"run.grad_checkpointing: timm {timm.__version__} cannot compute blocks of {type(model).__name__} again.",
            "Leave --grad-checkpointing out; --grad-accum-steps saves memory too.",
        ) from error
