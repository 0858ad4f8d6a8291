"""Differential attention (arXiv 2410.05258) as plain heads: two softmaxes of the same values, subtracted.

A head of the source has two sets of queries and keys, and values twice as wide as they are. So it is four heads of the
operator, one for each set and half of the value's channels, all of one width.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from vit2linear.context import HeadGeometry


def paired_geometry(module: Any, width: int) -> HeadGeometry:
    """Sizes of a module that names them as timm's ``DiffAttention`` does."""
    return HeadGeometry(width, 4 * module.num_heads, module.head_dim, module.scale)


def paired_heads(
    site: Any,
    q: Float[Tensor, "batch tokens channels"],
    k: Float[Tensor, "batch tokens channels"],
    v: Float[Tensor, "batch tokens channels"],
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the operator, (batch, 4 heads, tokens, head_dim), from those of the projection; the half runs fastest.

    qk-norm is that of each set.
    """
    sets = 2 * site.num_heads, site.head_dim
    q = site.q_norm(q.unflatten(-1, sets).transpose(1, 2)).repeat_interleave(2, 1)
    k = site.k_norm(k.unflatten(-1, sets).transpose(1, 2)).repeat_interleave(2, 1)
    halves = v.unflatten(-1, (site.num_heads, 1, 2, site.head_dim)).expand(-1, -1, -1, 2, -1, -1)
    return q, k, halves.flatten(2, 4).transpose(1, 2)


def difference(site: Any, heads: Float[Tensor, "batch maps tokens head_dim"]) -> Float[Tensor, "batch tokens channels"]:
    """First set minus lambda times the second, normalised and scaled as in the source."""
    first, second = heads.unflatten(1, (site.num_heads, 2, 2)).unbind(2)
    y = first - site._compute_lambda().type_as(heads) * second
    y = site.sub_norm(y.transpose(2, 3).flatten(3)) * (1 - site.lambda_init)
    out: Tensor = y.transpose(1, 2).flatten(2)
    return out
