"""Softmax to second order."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vit2linear.context import AttentionContext
from vit2linear.ops.base import SumRule

CHUNK = 8
"""Factors whose products with all others are formed at once, in linear order."""


class SecondOrderTaylor(SumRule):
    """K = 1 + t + t^2 / 2 with t = s q . k, rows divided by their sum (Based, arXiv 2402.18668).

    The core's "features" are here u_q = [sqrt(s) q, 1] / 2^(1/4) and u_k alike, so that K = (u_q . u_k)^2 + 1/2: one
    squaring of the map in quadratic order, and products of pairs in linear order.
    """

    name = "taylor2"
    family = "kernel"
    summary = "K = 1 + t + t^2 / 2, t = s q k^T, rows sum to 1"
    reference = "Based, arXiv 2402.18668"
    notes = (
        "The closest of the plain kernels to softmax with copied weights, closer still with centred keys. Its linear "
        "order has f = (d + 1) (d + 2) / 2 features, 2,145 for d = 64: up to f tokens it runs in quadratic order, and "
        "it takes some thousands of tokens more to be faster than softmax."
    )
    cost = "N d^3"
    carries = frozenset({"key_mask", "pooling"})

    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """u_q, u_k."""
        root = self.geometry.scale**0.5
        return _with_one(q * root) * 0.5**0.25, _with_one(k * root) * 0.5**0.25

    def prefers_quadratic(self, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> bool:
        """Whether squaring the map costs less than the pairs: N < f for N queries and keys."""
        queries, keys, width, value_dim = phi_q.shape[-2], phi_k.shape[-2], phi_q.shape[-1], v.shape[-1]
        return queries * keys * (width + value_dim) < (queries + keys) * (width * (width + 1) // 2) * value_dim

    def linear_order(
        self,
        phi_q: Float[Tensor, "batch maps queries features"],
        phi_k: Float[Tensor, "batch maps keys features"],
        v: Float[Tensor, "batch maps keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
        scratch: Tensor | None = None,
    ) -> Float[Tensor, "batch maps queries value_dim"]:
        """The squares as products of pairs, some factors at a time to bound the memory."""
        values, phi_k = _valid(_with_one(v), key_mask), _valid(phi_k, key_mask)
        squares = torch.zeros_like(values[..., :1, :])
        for start in range(0, phi_q.shape[-1], CHUNK):
            squares = squares + _pairs(phi_q, start) @ (_pairs(phi_k, start).transpose(-2, -1) @ values)
        return self._divided(squares, values)

    def quadratic_order(
        self,
        phi_q: Float[Tensor, "batch maps queries features"],
        phi_k: Float[Tensor, "batch maps keys features"],
        v: Float[Tensor, "batch maps keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
    ) -> Float[Tensor, "batch maps queries value_dim"]:
        """The map's squares times the values."""
        values, phi_k = _valid(_with_one(v), key_mask), _valid(phi_k, key_mask)
        return self._divided((phi_q @ phi_k.transpose(-2, -1)).square() @ values, values)

    def _divided(self, squares: Tensor, values: Tensor) -> Tensor:
        """Rows over their sums, which are the last column: it belongs to values that are 1."""
        sums = squares + values.sum(-2, keepdim=True) / 2
        count = values[..., -1:].sum(-2, keepdim=True)
        return sums[..., :-1] / (sums[..., -1:] + self.eps * count)

    def _routing(self, phi_q: Tensor, phi_k: Tensor, key_mask: Tensor | None) -> Tensor:
        ones = _valid(torch.ones_like(phi_k[..., :1]), key_mask).transpose(-2, -1)
        kernel = ((phi_q @ phi_k.transpose(-2, -1)).square() + 0.5) * ones
        return kernel / (kernel.sum(-1, keepdim=True) + self.eps * ones.sum(-1, keepdim=True))


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)


def _valid(x: Tensor, key_mask: Tensor | None) -> Tensor:
    return x if key_mask is None else torch.where(key_mask[:, None, :, None], x, 0.0)


def _pairs(u: Float[Tensor, "*batch tokens width"], start: int) -> Float[Tensor, "*batch tokens pairs"]:
    """Products of CHUNK entries with each other and with all later ones.

    Those with each other come in both orders, those with later ones in one: hence sqrt(2), in queries and keys alike.
    """
    some, later = u[..., start : start + CHUNK], u[..., start + CHUNK :]
    return (some[..., None] * torch.cat([some, later * 2**0.5], dim=-1)[..., None, :]).flatten(-2)
