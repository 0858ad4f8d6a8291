"""Transformer-to-RNN: a learned ReLU feature map."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.ops.base import SumRule


class T2RAttention(SumRule):
    """phi(x) = relu(W x + b) of each head, rows divided by their sum (T2R, arXiv 2103.13076)."""

    name = "t2r"
    family = "learned kernel"
    summary = "phi(x) = relu(W x + b), rows sum to 1"
    reference = "T2R, arXiv 2103.13076"
    notes = (
        "W is square and starts as the identity, so that conversion starts from the operator relu; the paper takes 32 "
        "features and a random start. One map serves queries and keys of a head."
    )
    cost = "4 N d^2"
    carries = frozenset({"key_mask", "pooling"})

    def __init__(self, geometry: HeadGeometry, options: Any) -> None:
        super().__init__(geometry, options)
        heads, d = geometry.num_heads, geometry.head_dim
        self.weight = nn.Parameter(torch.eye(d).repeat(heads, 1, 1))
        self.bias = nn.Parameter(torch.zeros(heads, 1, d))

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """relu(W q + b), relu(W k + b)."""
        weight, bias = self.weight.to(q.dtype).transpose(-2, -1), self.bias.to(q.dtype)
        return F.relu(q @ weight + bias), F.relu(k @ weight + bias)
