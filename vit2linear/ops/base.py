"""The shared core of kernel operators: feature maps and a row rule, evaluated in two orders or as a map.

With features ``K_ij = phi_q(q_i) . phi_k(k_j)`` over N valid keys and row means ``z_i = mean_j K_ij``, the map is

    A_ij = (a(z_i) K_ij + b(z_i)) / N

and the same definition gives, without ever forming A,

    out_i = a(z_i) phi_q(q_i) [phi_k(k)^T v / N] + b(z_i) mean(v),    z_i = phi_q(q_i) . mean_j phi_k(k_j).

Means instead of sums keep every intermediate of the order of the inputs, whatever the number of tokens.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vit2linear.attention import AttentionContext, Operator


class KernelOperator(Operator):
    """An operator that is given by its feature maps and its row rule."""

    @abstractmethod
    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch heads queries features"], Float[Tensor, "batch heads keys features"]]:
        """phi_q(q) and phi_k(k)."""

    @abstractmethod
    def row_rule(
        self, z: Float[Tensor, "batch heads queries 1"]
    ) -> tuple[Float[Tensor, "batch heads queries 1"], Float[Tensor, "batch heads queries 1"] | None]:
        """a(z) and b(z); ``None`` for b = 0."""

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """A v, in the order that costs less."""
        wide = torch.promote_types(v.dtype, torch.float32)
        with torch.autocast(v.device.type, enabled=False):
            phi_q, phi_k = self.features(q.to(wide), k.to(wide), ctx)
            queries, keys, width, value_dim = phi_q.shape[-2], phi_k.shape[-2], phi_q.shape[-1], v.shape[-1]
            quadratic = queries * keys * (width + value_dim) < (queries + keys) * width * value_dim
            order = self.quadratic_order if quadratic else self.linear_order
            return order(phi_q, phi_k, v.to(wide), ctx.key_mask).to(v.dtype)

    def linear_order(
        self,
        phi_q: Float[Tensor, "batch heads queries features"],
        phi_k: Float[Tensor, "batch heads keys features"],
        v: Float[Tensor, "batch heads keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """phi_q (phi_k^T v): cost linear in the number of tokens."""
        phi_k, v, count = _valid_keys(phi_k, v, key_mask)
        state = phi_k.transpose(-2, -1) @ v / count
        z = phi_q @ (phi_k.sum(-2, keepdim=True) / count).transpose(-2, -1)
        a, b = self.row_rule(z)
        out = (phi_q @ state) * a
        return out if b is None else out + b * (v.sum(-2, keepdim=True) / count)

    def quadratic_order(
        self,
        phi_q: Float[Tensor, "batch heads queries features"],
        phi_k: Float[Tensor, "batch heads keys features"],
        v: Float[Tensor, "batch heads keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """(phi_q phi_k^T) v: cheaper for few tokens."""
        return self._routing(phi_q, phi_k, key_mask) @ v

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries keys"]:
        """The routing matrix A."""
        wide = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            return self._routing(*self.features(q.to(wide), k.to(wide), ctx), ctx.key_mask)

    def _routing(self, phi_q: Tensor, phi_k: Tensor, key_mask: Tensor | None) -> Tensor:
        phi_k, _, count = _valid_keys(phi_k, None, key_mask)
        kernel = phi_q @ phi_k.transpose(-2, -1)
        a, b = self.row_rule(kernel.sum(-1, keepdim=True) / count)
        routing = a * kernel / count
        if b is None:
            return routing
        valid = 1.0 if key_mask is None else key_mask[:, None, None].to(kernel.dtype)
        return routing + b * valid / count


class SumRule(KernelOperator):
    """Kernel operators whose rows are divided by their sum: a = 1 / (z + eps), b = 0."""

    eps = 1e-6
    """Floor of the row mean: keeps a row without any positive feature finite (it routes nothing)."""

    def row_rule(
        self, z: Float[Tensor, "batch heads queries 1"]
    ) -> tuple[Float[Tensor, "batch heads queries 1"], Float[Tensor, "batch heads queries 1"] | None]:
        """A = 1 / (z + eps), b = 0."""
        return (z + self.eps).reciprocal(), None


def _valid_keys(phi_k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Features and values with masked keys zeroed, and the number of valid keys (broadcastable to maps)."""
    values = phi_k if v is None else v
    if key_mask is None:
        return phi_k, values, phi_k.shape[-2]
    mask = key_mask[:, None, :, None]
    count = mask.sum(-2, keepdim=True).clamp_min(1).to(phi_k.dtype)
    # where() and not a product: what stands at a masked key may be infinite.
    return torch.where(mask, phi_k, 0.0), torch.where(mask, values, 0.0), count
