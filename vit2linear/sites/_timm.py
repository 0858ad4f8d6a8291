"""What kinds with the signature of timm's ``Attention`` share: rotation, and all that follows the routing."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from timm.layers import apply_rot_embed_cat
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.errors import SurgeryError
from vit2linear.site import SiteKind, key_mask_or_bias


def context(site: Any, x: Tensor, attn_mask: Tensor | None, is_causal: bool) -> AttentionContext:
    """Grid and mask as timm hands them over."""
    if is_causal:
        raise SurgeryError("causal attention was asked of a converted site.", "Vision Transformers attend both ways.")
    key_mask, bias = key_mask_or_bias(attn_mask, x)
    return AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, key_mask, bias)


def split_heads(x: Float[Tensor, "batch tokens channels"], head_dim: int) -> Float[Tensor, "batch heads tokens width"]:
    """One projection as heads."""
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def rotate(
    site: Any,
    heads: Float[Tensor, "batch heads tokens head_dim"],
    rope: Float[Tensor, "*positions angles"] | None,
    like: Tensor,
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Queries or keys turned by their positions, but for the prefix, in the type of ``like``."""
    if rope is None:
        return heads
    prefix, patches = heads.split([site.num_prefix_tokens, heads.shape[2] - site.num_prefix_tokens], dim=2)
    return torch.cat([prefix, apply_rot_embed_cat(patches, rope, half=site.rotate_half)], dim=2).type_as(like)


def grouped(
    heads: Float[Tensor, "batch groups tokens head_dim"], num_heads: int
) -> Float[Tensor, "batch heads tokens head_dim"]:
    """Keys or values, each head once for every query head of its group."""
    return heads if heads.shape[1] == num_heads else heads.repeat_interleave(num_heads // heads.shape[1], dim=1)


def gated_output(
    site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
) -> Float[Tensor, "batch tokens channels"]:
    """Norm, gate, output projection."""
    y = site.norm(heads.transpose(1, 2).flatten(2))
    if site.gate is not None:
        y = y * site.gate(ctx.x).sigmoid()
    out: Tensor = site.proj_drop(site.proj(y))
    return out


class RotarySite(SiteKind):
    """Rotary positions, qk-norm, norm and gate before the output projection; kinds differ in their projections."""

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The queries' heads."""
        sizes: Any = module
        width = (sizes.q_proj if sizes.qkv is None else sizes.qkv).in_features
        return HeadGeometry(width, sizes.num_heads, sizes.head_dim, sizes.scale)

    @abstractmethod
    def projections(self, site: Any, x: Float[Tensor, "batch tokens channels"]) -> tuple[Tensor, ...]:
        """Queries, keys and values, heads side by side."""

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """Projections, qk-norm, rotation, then each key head once for every query head of its group; timm's order."""
        ctx = context(site, x, attn_mask, is_causal)
        q, k, v = (split_heads(part, site.head_dim) for part in self.projections(site, x))
        q, k = (rotate(site, heads, rope, v) for heads in (site.q_norm(q), site.k_norm(k)))
        return q, grouped(k, q.shape[1]), grouped(v, q.shape[1]), ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Norm, gate, output projection."""
        return gated_output(site, heads, ctx)
