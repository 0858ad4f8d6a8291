"""Focused linear attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.operator import Operator
from vit2linear.ops._parts import add_key_positions, check_positive, key_table, refuse_key_mask
from vit2linear.ops.base import SumRule


class FocusedAttention(SumRule):
    """phi(x) = |y| y^p / |y^p| for y = (relu(x) + 1e-6) / softplus(gamma), norms over all heads (arXiv 2308.00442).

    Keys have learned positions added first, zero at the start.
    """

    name = "focused"
    family = "kernel"
    summary = "phi(x) = |y| y^p / |y^p|, y = (relu(x) + 1e-6) / softplus(gamma), rows sum to 1"
    reference = "FLatten Transformer, arXiv 2308.00442"
    notes = (
        "Norms are over all channels and not over those of a head, as in the released code. Learned key positions "
        "start at zero and are resized to the running grid. The paper adds a 5x5 depthwise convolution: `--local dwc5`."
    )
    cost = "2 N d^2"
    carries = frozenset()

    @dataclass(frozen=True)
    class Options(Operator.Options):
        """Focused attention's options."""

        power: float = 3.0
        """The exponent p: the higher, the closer to the axes the features point."""

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        check_positive(self.name, power=options.power)
        self.gamma = nn.Parameter(torch.zeros(geometry.num_heads, 1, geometry.head_dim))
        self.positions = key_table(geometry)

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """The focused map of q and of k with positions."""
        refuse_key_mask(self.name, ctx)
        k = add_key_positions(k, self.positions, ctx)
        gain = F.softplus(self.gamma.to(q.dtype))
        return self._focus((F.relu(q) + 1e-6) / gain), self._focus((F.relu(k) + 1e-6) / gain)

    def _focus(self, y: Float[Tensor, "batch heads tokens head_dim"]) -> Float[Tensor, "batch heads tokens head_dim"]:
        # The scale cancels, so the largest entry may be 1: powers of y itself underflow.
        sharp = (y / y.detach().amax((1, 3), keepdim=True)).pow(self.options.power)
        return sharp * (_norm(y) / _norm(sharp))


def _norm(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dim=(1, 3), keepdim=True)
    return norm
