"""AdamW by groups, linear warm-up and cosine, and their state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vit2linear.errors import DistillError
from vit2linear.recipe import Stage
from vit2linear.site import sites_of


def parameter_groups(student: nn.Module, stage: Stage) -> list[dict[str, Any]]:
    """AdamW groups: copied attention, new operator weights, the rest; matrices decay, vectors do not.

    A group whose learning rate is 0 is left out, so its weights stay bitwise as they were copied.
    """
    paths = tuple(f"{path}." for path in sites_of(student))
    rates = {"attention": stage.lr or 0.0, "new": stage.lr_new or 0.0, "rest": stage.lr_rest or 0.0}
    groups: dict[tuple[str, bool], list[nn.Parameter]] = {}
    for name, parameter in student.named_parameters():
        kind = "rest" if not name.startswith(paths) else "new" if ".op." in name else "attention"
        if rates[kind] > 0:
            groups.setdefault((kind, parameter.ndim >= 2), []).append(parameter)
    if not groups:
        raise DistillError("every learning rate of the stage is 0, so nothing would be trained.")
    return [
        {"params": parameters, "lr": rates[kind], "weight_decay": stage.weight_decay if decays else 0.0}
        for (kind, decays), parameters in groups.items()
    ]


def warmup_cosine(steps: int, warmup: float) -> Callable[[int], float]:
    """Factor on the peak rate: linear over the first ``warmup`` share, then cosine to 1%."""
    ramp = max(1, round(warmup * steps))

    def factor(step: int) -> float:
        if step < ramp:
            return (step + 1) / ramp
        done = (step - ramp) / max(1, steps - ramp)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return factor


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's state, by the parameter's place and the state's name: ``3.exp_avg``."""
    state = optimiser.state_dict()["state"]
    return {f"{place}.{key}": value for place, values in state.items() for key, value in values.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put ``optimiser_tensors`` back into an optimiser of the same parameters; its rates stay as they are."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        place, key = name.split(".")
        state.setdefault(int(place), {})[key] = tensor
    optimiser.load_state_dict({**optimiser.state_dict(), "state": state})


def set_step(schedule: torch.optim.lr_scheduler.LambdaLR, steps: int) -> None:
    """Bring a fresh schedule to where it is after so many steps."""
    schedule.last_epoch = steps
    pairs = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    schedule._last_lr = [rate * factor(steps) for rate, factor in pairs]
    for group, rate in zip(schedule.optimizer.param_groups, schedule._last_lr, strict=True):
        group["lr"] = rate
