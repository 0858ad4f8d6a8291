"""ReLU linear attention."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext
from vit2linear.ops.base import SumRule


class ReLUAttention(SumRule):
    """phi(x) = relu(x), rows divided by their sum (EfficientViT, arXiv 2205.14756, single scale; SANA, 2410.10629)."""

    name = "relu"
    family = "kernel"
    summary = "phi(x) = relu(x), rows sum to 1"
    reference = "EfficientViT, arXiv 2205.14756"
    carries = frozenset({"key_mask", "pooling"})

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """relu(q), relu(k)."""
        return F.relu(q), F.relu(k)
