"""The shared core of kernel operators: feature maps and a row rule, evaluated in two orders or as a map.

With features ``K_ij = phi_q(q_i) . phi_k(k_j)`` over N valid keys and row means ``z_i = mean_j K_ij``, the map is

    A_ij = (a(z_i) K_ij + b(z_i)) / N

and the same definition gives, without ever forming A,

    out_i = a(z_i) phi_q(q_i) [phi_k(k)^T v / N] + b(z_i) mean(v),    z_i = phi_q(q_i) . mean_j phi_k(k_j).

Means instead of sums keep every intermediate of the order of the inputs, whatever the number of tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vit2linear.context import AttentionContext, no_autocast
from vit2linear.operator import Operator


class Row(NamedTuple):
    """What the row rule says for a row mean z: factors of the kernel and of the mean value."""

    a: Tensor | None
    """Factor on K / N; ``None`` is 1."""
    b: Tensor | None
    """Factor on 1 / N; ``None`` is 0."""


class KernelOperator(Operator):
    """An operator that is given by its feature maps and its row rule."""

    @abstractmethod
    def features(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> tuple[Float[Tensor, "batch maps queries features"], Float[Tensor, "batch maps keys features"]]:
        """phi_q(q) and phi_k(k), float32 or wider; ``maps`` is heads times ``streams``, the stream running fastest.

        Masked keys need no care here, unless features mix tokens.
        """

    @abstractmethod
    def row_rule(self, z: Float[Tensor, "batch maps queries 1"]) -> Row:
        """a(z) and b(z)."""

    def finish(
        self,
        heads: Float[Tensor, "batch heads queries value_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """What an operator does to its heads after the routing: gates, branches. By default nothing; not in the map."""
        return heads

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """A v, in the order that costs less."""
        wide = torch.promote_types(v.dtype, torch.float32)
        with no_autocast(v.device):
            phi_q, phi_k = self.features(q.to(wide), k.to(wide), ctx)
            parts = self.split(v.to(wide))
            # An exported graph holds one order for every size, and whoever exports it wants no map of pairs in it.
            if not torch.compiler.is_exporting() and self.prefers_quadratic(phi_q, phi_k, parts):
                heads = self.quadratic_order(phi_q, phi_k, parts, ctx.key_mask)
            else:
                scratch = phi_q if _may_overwrite(phi_q, q, k, v) else None
                heads = self.linear_order(phi_q, phi_k, parts, ctx.key_mask, scratch)
            heads = self.join(heads)
            return self.finish(heads, v.to(wide), ctx).to(v.dtype)

    def order(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> str:
        """As ``prefers_quadratic`` decides."""
        if not self.linear:
            return "quadratic"
        return "quadratic" if self.prefers_quadratic(*self.features(q, k, ctx), self.split(v)) else "linear"

    def prefers_quadratic(self, phi_q: Tensor, phi_k: Tensor, v: Tensor) -> bool:
        """Whether forming the map costs less: N < 2 f d / (f + d) for N queries and keys."""
        queries, keys, width, value_dim = phi_q.shape[-2], phi_k.shape[-2], phi_q.shape[-1], v.shape[-1]
        return queries * keys * (width + value_dim) < (queries + keys) * width * value_dim

    def split(self, v: Float[Tensor, "batch heads keys value_dim"]) -> Tensor:
        """Values as (batch, heads * streams, keys, value_dim / streams)."""
        if self.streams == 1:
            return v
        parts: Tensor = v.unflatten(-1, (self.streams, -1)).transpose(2, 3).flatten(1, 2)
        return parts

    def join(self, heads: Float[Tensor, "batch maps queries part"]) -> Tensor:
        """The inverse of ``split``."""
        if self.streams == 1:
            return heads
        whole: Tensor = heads.unflatten(1, (-1, self.streams)).transpose(2, 3).flatten(3)
        return whole

    def linear_order(
        self,
        phi_q: Float[Tensor, "batch maps queries features"],
        phi_k: Float[Tensor, "batch maps keys features"],
        v: Float[Tensor, "batch maps keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
        scratch: Tensor | None = None,
    ) -> Float[Tensor, "batch maps queries value_dim"]:
        """phi_q (phi_k^T v): cost linear in the number of tokens. What ``scratch`` holds may be lost."""
        phi_k, v, count = _valid_keys(phi_k, v, key_mask)
        state = phi_k.transpose(-2, -1) @ v / count
        z = phi_q @ (phi_k.sum(-2, keepdim=True) / count).transpose(-2, -1)
        a, b = self.row_rule(z)
        out = phi_q @ state
        if scratch is not None and scratch.shape != out.shape:
            scratch = None
        if b is None:
            return out if a is None else torch.mul(out, a, out=scratch)
        out = out if a is None else out * a
        return torch.addcmul(out, b, v.sum(-2, keepdim=True) / count, out=scratch)

    def quadratic_order(
        self,
        phi_q: Float[Tensor, "batch maps queries features"],
        phi_k: Float[Tensor, "batch maps keys features"],
        v: Float[Tensor, "batch maps keys value_dim"],
        key_mask: Bool[Tensor, "batch keys"] | None,
    ) -> Float[Tensor, "batch maps queries value_dim"]:
        """(phi_q phi_k^T) v: cheaper for few tokens."""
        phi_k, v, _ = _valid_keys(phi_k, v, key_mask)
        return self._routing(phi_q, phi_k, key_mask) @ v

    def map(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch maps queries keys"]:
        """The routing matrix A."""
        wide = torch.promote_types(q.dtype, torch.float32)
        with no_autocast(q.device):
            return self._routing(*self.features(q.to(wide), k.to(wide), ctx), ctx.key_mask)

    def _routing(self, phi_q: Tensor, phi_k: Tensor, key_mask: Tensor | None) -> Tensor:
        phi_k, _, count = _valid_keys(phi_k, None, key_mask)
        kernel = phi_q @ phi_k.transpose(-2, -1) / count
        a, b = self.row_rule(kernel.sum(-1, keepdim=True))
        routing = kernel if a is None else a * kernel
        if b is None:
            return routing
        valid = 1.0 if key_mask is None else key_mask[:, None, None].to(kernel.dtype)
        return routing + b * valid / count


class SumRule(KernelOperator):
    """Rows divided by their sum: a = 1 / (z + eps), b = 0. For features that are not negative."""

    eps = 1e-6
    """Floor of the row mean: keeps a row without any positive feature finite (it routes nothing)."""

    def row_rule(self, z: Float[Tensor, "batch maps queries 1"]) -> Row:
        """a = 1 / (z + eps), b = 0."""
        return Row((z + self.eps).reciprocal(), None)


class AffineRule(KernelOperator):
    """Rows shifted to sum to 1: a = 1, b = 1 - z. Signed maps, no division."""

    def row_rule(self, z: Float[Tensor, "batch maps queries 1"]) -> Row:
        """a = 1, b = 1 - z."""
        return Row(None, 1 - z)


class PlainRule(KernelOperator):
    """A_ij = phi_q(q_i) . phi_k(k_j), as it is: the features bring their own normalisation over tokens.

    The core divides by the number of keys, so phi_k is N times the features of the formula: multiply by ``count_keys``.
    """

    def row_rule(self, z: Float[Tensor, "batch maps queries 1"]) -> Row:
        """a = 1, b = 0."""
        return Row(None, None)


def count_keys(
    k: Float[Tensor, "batch heads keys head_dim"], ctx: AttentionContext
) -> Float[Tensor, "batch 1 1 1"] | int:
    """The number of valid keys, broadcastable to features."""
    if ctx.key_mask is None:
        return k.shape[-2]
    return ctx.key_mask.sum(-1)[:, None, None, None].clamp_min(1).to(k.dtype)


def _valid_keys(phi_k: Tensor, v: Tensor | None, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Features and values with masked keys zeroed, and the number of valid keys (broadcastable to maps)."""
    values = phi_k if v is None else v
    if key_mask is None:
        return phi_k, values, phi_k.shape[-2]
    mask = key_mask[:, None, :, None]
    count = mask.sum(-2, keepdim=True).clamp_min(1).to(phi_k.dtype)
    # where() and not a product: what stands at a masked key may be infinite.
    return torch.where(mask, phi_k, 0.0), torch.where(mask, values, 0.0), count


def _may_overwrite(features: Tensor, *inputs: Tensor) -> bool:
    """Whether features are nobody's any more once they are used: no gradient needs them, no input lies under them.

    A fresh tensor of this size costs more (page faults) than filling it.
    """
    wanted = any(x.requires_grad for x in (features, *inputs))  # the values' gradient needs them, too
    if wanted or torch.compiler.is_compiling() or features.device.type == "meta":
        return False
    memory = features.untyped_storage().data_ptr()
    return all(memory != x.untyped_storage().data_ptr() for x in inputs)
