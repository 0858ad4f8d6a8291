"""Hedgehog: a learned feature map of both signs."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.ops.base import SumRule


class HedgehogAttention(SumRule):
    """phi(x) = [softmax(W x + b), softmax(-W x - b)] over features, rows divided by their sum (arXiv 2402.04347).

    W and b of each head, for queries and for keys; W starts as the identity, b at zero.
    """

    name = "hedgehog"
    family = "learned kernel"
    summary = "phi(x) = [softmax(y), softmax(-y)] over features, y = W x + b, rows sum to 1"
    reference = "Hedgehog, arXiv 2402.04347"
    notes = (
        "Made for conversion by distillation: with W = 1, rows start nearly uniform. The softmax over features is the "
        "numerically safe form of exp(y), exp(-y)."
    )
    cost = "6 N d^2"
    carries = frozenset({"key_mask", "pooling"})

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        heads, d = geometry.num_heads, geometry.head_dim
        self.weight_q = nn.Parameter(torch.eye(d).repeat(heads, 1, 1))
        self.weight_k = nn.Parameter(torch.eye(d).repeat(heads, 1, 1))
        self.bias_q = nn.Parameter(torch.zeros(heads, 1, d))
        self.bias_k = nn.Parameter(torch.zeros(heads, 1, d))

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """Both softmaxes of the mapped q and k."""
        return _phi(q, self.weight_q, self.bias_q), _phi(k, self.weight_k, self.bias_k)


def _phi(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = x @ weight.to(x.dtype).transpose(-2, -1) + bias.to(x.dtype)
    return torch.cat([y.softmax(-1), (-y).softmax(-1)], dim=-1)
