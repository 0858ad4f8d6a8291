"""SimA: no softmax, queries and keys normalised over tokens."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from vit2linear.context import AttentionContext
from vit2linear.ops.base import PlainRule, count_keys


class SimA(PlainRule):
    """A = q' k'^T, each channel of q and k divided by its L1 norm over tokens (SimA, arXiv 2206.08898)."""

    name = "sima"
    family = "kernel"
    signed = True
    summary = "A = q' k'^T, channels of q and k divided by their L1 norms over tokens; signed, rows sum to anything"
    reference = "SimA, arXiv 2206.08898"
    notes = (
        "Nothing makes a row sum to 1, and entries are of the order of d / N^2: right after conversion the attention "
        "says almost nothing, so it has to be distilled."
    )
    cost = "2 N d^2"
    carries = frozenset({"key_mask", "pooling"})

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """q over its norm; k over its norm, times the number of keys."""
        return _normalised(q, ctx.key_mask), _normalised(k, ctx.key_mask) * count_keys(k, ctx)


def _normalised(
    x: Float[Tensor, "batch heads tokens head_dim"], mask: Bool[Tensor, "batch tokens"] | None
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Each channel over the sum of its magnitudes at valid tokens."""
    return F.normalize(x if mask is None else torch.where(mask[:, None, :, None], x, 0.0), p=1, dim=-2)
