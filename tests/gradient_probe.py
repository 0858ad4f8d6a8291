"""An operator whose import has every optimiser write down what it is about to use, for tests of several processes.

Only where ``GRADIENT_PROBE`` names a folder. Each optimiser is one stage. Before its steps 1 and 5 every process writes
the gradients, as they are after averaging and clipping, and the weights, by their places in the parameter groups, to
``<stage>-<step>-<rank>.safetensors``; the metadata has the number of processes.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.ops.relu import ReLUAttention

STEPS = (1, 5)
_taken: Counter[Optimizer] = Counter()


class Picky(ReLUAttention):
    """ReLU attention with a parameter that no image uses, and one for bright images only, as an expert has.

    So a parameter may have a gradient on one process alone, or on none.
    """

    name = "picky"

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        self.idle = nn.Parameter(torch.ones(1))
        self.bright = nn.Parameter(torch.ones(geometry.head_dim))

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """A factor on the heads of the images whose last token is bright."""
        heads = super().forward(q, k, v, ctx)
        bright = ctx.x[:, -1, 0] > 0
        if bright.is_meta or not bright.any():
            return heads
        return torch.where(bright[:, None, None, None], heads * self.bright, heads)


class NotANumber(ReLUAttention):
    """ReLU attention that trains on one process only."""

    name = "not-a-number"

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """NaN wherever gradients are wanted on the second process."""
        heads = super().forward(q, k, v, ctx)
        return heads * torch.nan if torch.is_grad_enabled() and os.environ.get("RANK") == "1" else heads


class Cramped(Picky):
    """The same where memory holds one image on the second process; the error is torch's own."""

    name = "cramped"

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Ask for 128 TiB where gradients of more than one image are wanted."""
        if torch.is_grad_enabled() and q.shape[0] > 1 and not q.is_meta and os.environ.get("RANK") == "1":
            torch.empty(2**45)
        return super().forward(q, k, v, ctx)


def _write(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    _taken[optimizer] += 1
    if _taken[optimizer] not in STEPS:
        return
    there = distributed.is_initialized()
    rank, world = (distributed.get_rank(), distributed.get_world_size()) if there else (0, 1)
    found = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            found[f"weight.{g}.{i}"] = parameter.detach().clone()
            if parameter.grad is not None:
                found[f"gradient.{g}.{i}"] = parameter.grad.clone()
    name = f"{list(_taken).index(optimizer)}-{_taken[optimizer]}-{rank}.safetensors"
    save_file(found, Path(os.environ["GRADIENT_PROBE"]) / name, metadata={"world": str(world)})


if "GRADIENT_PROBE" in os.environ:
    register_optimizer_step_pre_hook(_write)
