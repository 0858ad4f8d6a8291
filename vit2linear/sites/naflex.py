"""Attention inside timm's ``NaFlexVit``, whose batches hold images of several shapes, padded to one length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from timm.layers import Attention, AttentionRope
from timm.models.eva import EvaAttention
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites.attention import AttentionSite
from vit2linear.sites.attention_rope import AttentionRopeSite
from vit2linear.sites.eva import EvaSite

_KINDS: dict[type[nn.Module], SiteKind] = {
    Attention: AttentionSite(),
    AttentionRope: AttentionRopeSite(),
    EvaAttention: EvaSite(),
}


class NaFlexSite(SiteKind):
    """One of timm's attentions with the masks of padded batches as key masks, and the grid of unpadded ones."""

    models = ("NaFlexVit",)
    # timm's default writes a mask for every pair of tokens; so it writes one row for all queries.
    settings: ClassVar[Mapping[str, Any]] = {"use_key_only_attn_mask": True}

    def matches(self, module: nn.Module) -> bool:
        """Exactly one of timm's classes."""
        return type(module) in _KINDS

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """As outside of ``NaFlexVit``."""
        return _KINDS[type(module)].geometry(module)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader]:
        """The embedding returns the grid of a batch of images, and none for patches with coordinates."""
        return "embeds", _grid

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        *,
        attn_mask: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """As outside of ``NaFlexVit``, given which patches are valid."""
        return _KINDS[site.source_class].project(site, x, attn_mask=_key_mask(attn_mask), **others)

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """As outside of ``NaFlexVit``."""
        out: Tensor = _KINDS[site.source_class].merge(site, heads, ctx)
        return out


def _grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
    grid = output[1]
    return None if grid is None else (int(grid[0]), int(grid[1]))


def _key_mask(mask: Tensor | None) -> Tensor | None:
    """A mask that says which patches are valid as (batch, 1, 1, tokens), boolean; any other as it is.

    timm's ``create_attention_mask`` adds the type's minimum where a key is padding, and in its symmetric form where the
    query is. What padding attends to is never read, so the two forms mean the same.
    """
    if mask is None or mask.ndim != 4 or mask.shape[1] != 1:
        return mask
    seen = mask if mask.dtype == torch.bool else mask == 0
    valid = seen if mask.shape[2] == 1 else seen.diagonal(dim1=2, dim2=3)[:, :, None]
    binary = mask.dtype == torch.bool or bool((seen | (mask <= torch.finfo(mask.dtype).min)).all())
    # Any other mask over pairs, such as that of several images packed into one sequence, is none over keys.
    forms = (valid, valid & valid.transpose(2, 3))
    return valid if binary and any(torch.equal(seen, form.expand_as(seen)) for form in forms) else mask
