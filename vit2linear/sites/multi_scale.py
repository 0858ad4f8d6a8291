"""MViT v2's ``MultiScaleAttention``: queries, keys and values pooled by convolutions, relative positions."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from jaxtyping import Float
from timm.models.mvitv2 import MultiScaleAttention, cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._pooled import pooled

BIAS = "relative-position-bias"


class MultiScaleSite(SiteKind):
    """Pools after the projection, biases that depend on the query, queries added to the heads (arXiv 2112.01526)."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is MultiScaleAttention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, MultiScaleAttention)
        return HeadGeometry(module.qkv.in_features, module.num_heads, module.head_dim, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """Pools with strides, and relative positions."""
        assert isinstance(module, MultiScaleAttention)
        found = pooled(_strided(module.pool_k), _strided(module.pool_q))
        if module.rel_pos_type == "spatial":
            words = "a bias on the logits, the query's product with a learned vector for each row and column distance"
            found[BIAS] = Feature(words, "bias", ("rel_pos_h", "rel_pos_w"))
        return found

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """None: the block passes the size of the map."""
        return None

    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"], feat_size: Any
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, then each through its pool and norm; the class token is not pooled."""
        q, k, v = site.qkv(x).unflatten(-1, (3, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, q_size = _pool(site, q, site.pool_q, site.norm_q, feat_size)
        k, k_size = _pool(site, k, site.pool_k, site.norm_k, feat_size)
        v, _ = _pool(site, v, site.pool_v, site.norm_v, feat_size)
        bias = None
        if site.rel_pos_type == "spatial" and BIAS not in site.dropped:
            zeros = q.new_zeros(*q.shape[:3], k.shape[2])
            bias = cal_rel_pos_type(zeros, q, site.has_cls_token, q_size, k_size, site.rel_pos_h, site.rel_pos_w)
        grid = (int(feat_size[0]), int(feat_size[1]))
        return q, k, v, AttentionContext(x, grid, int(site.has_cls_token), bias=bias, state=(q, q_size))

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads queries head_dim"], ctx: AttentionContext
    ) -> tuple[Float[Tensor, "batch queries channels"], Any]:
        """The residual over pooling, output projection, and the size of the pooled map."""
        q, q_size = ctx.state
        heads = heads + q if site.residual_pooling else heads
        return site.proj(heads.transpose(1, 2).flatten(2)), q_size


def _pool(site: Any, x: Tensor, pool: nn.Module | None, norm: nn.Module | None, size: Any) -> tuple[Tensor, Any]:
    """Tokens of all heads through a pool and a norm, and the size of their map."""
    if pool is not None:
        image, token = reshape_pre_pool(x, size, site.has_cls_token)
        x, size = reshape_post_pool(pool(image), site.num_heads, token)
    return x if norm is None else norm(x), size


def _strided(pool: Any) -> bool:
    return pool is not None and prod(pool.stride) > 1
