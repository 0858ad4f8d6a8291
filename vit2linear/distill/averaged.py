"""Averaged weights against the last ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from timm.utils import ModelEmaV3
from torch import nn

from vit2linear.data import Batch
from vit2linear.distill.tasks import ModelTask

CHECK_BATCH = 64
"""Images of one forward when weights are chosen."""


@dataclass(frozen=True)
class Averaged:
    """The averaged weights against the last ones, by the stage's loss on training images in the evaluation view."""

    decay: float
    loss: float
    loss_averaged: float

    @property
    def kept(self) -> bool:
        """Whether the average was better."""
        return self.loss_averaged < self.loss


def keep_better(
    task: ModelTask, student: nn.Module, ema: ModelEmaV3, check: Batch, accelerator: Accelerator
) -> Averaged:
    """Leave the averaged weights in ``student`` where the stage's loss on ``check`` is lower with them."""

    @torch.no_grad()
    def loss() -> float:
        parts = zip(*(x.to(accelerator.device).split(CHECK_BATCH) for x in check), strict=True)
        found = [task.loss(accelerator, pixels, labels) * len(pixels) for pixels, labels in parts]
        # Rounding may differ between processes; what they keep must not.
        return float(broadcast(torch.stack(found).sum() / len(check[0])))

    last = {k: v.clone() for k, v in student.state_dict().items()}
    before = loss()
    student.load_state_dict(ema.module.state_dict())
    report = Averaged(ema.decay, before, loss())
    if not report.kept:
        student.load_state_dict(last)
    return report
