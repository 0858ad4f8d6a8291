"""CaiT's ``TalkingHeadAttn`` (arXiv 2103.17239): heads mixed before and after the softmax (arXiv 2003.02436).

Its class attention has one query, so its cost is linear already: it is no site.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from timm.models.cait import TalkingHeadAttn
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry, HeadMix
from vit2linear.site import Feature, SiteKind

MIX = "talking-heads"


class TalkingHeadsSite(SiteKind):
    """Fused qkv and two linear maps over the heads, which only an operator with logits and rows can carry."""

    models = ("Cait",)

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is TalkingHeadAttn

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The width of a head is not stored."""
        assert isinstance(module, TalkingHeadAttn)
        width = module.qkv.in_features
        return HeadGeometry(width, module.num_heads, width // module.num_heads, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """The mixing of heads."""
        words = "linear maps over the heads, of the logits and of the softmax's rows"
        return {MIX: Feature(words, "head_mix", ("proj_l", "proj_w"))}

    def num_prefix(self, model: nn.Module, path: str) -> int:
        """None: the class token joins after these blocks."""
        return 0

    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv; the mixing goes to the operator."""
        q, k, v = site.qkv(x).unflatten(-1, (3, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mix = None if MIX in site.dropped else HeadMix(site.proj_l, site.proj_w)
        return q, k, v, AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, head_mix=mix)

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        out: Tensor = site.proj_drop(site.proj(heads.transpose(1, 2).flatten(2)))
        return out
