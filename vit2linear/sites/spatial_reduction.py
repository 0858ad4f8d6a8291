"""Keys and values from a smaller map: PVT v2's ``Attention`` and Twins' ``GlobalSubSampleAttn``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from timm.models import pvt_v2, twins
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._pooled import pooled


class SpatialReductionSite(SiteKind):
    """Queries from all tokens, keys and values from a strided convolution of the map or from its 7 x 7 average pool.

    Pyramid Vision Transformer v2 (arXiv 2106.13797; with ``linear`` the pool) and Twins (arXiv 2104.13840).
    """

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's classes."""
        return type(module) in (pvt_v2.Attention, twins.GlobalSubSampleAttn)

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, pvt_v2.Attention | twins.GlobalSubSampleAttn)
        return HeadGeometry(module.dim, module.num_heads, module.dim // module.num_heads, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """Pooled keys, but in the last stage."""
        return pooled(keys=module.sr is not None)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """None: the block passes the size of the map."""
        return None

    def project(
        self, site: Any, x: Float[Tensor, "batch tokens channels"], size: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """q of all tokens; k and v of the reduced map."""
        ctx = AttentionContext(x, (size[0], size[1]))
        q = site.q(x).unflatten(-1, (site.num_heads, -1)).transpose(1, 2)
        if site.sr is not None:
            image = x.transpose(1, 2).unflatten(2, size)
            pool, act = getattr(site, "pool", None), getattr(site, "act", None)
            image = image if pool is None else pool(image)
            x = site.norm(site.sr(image).flatten(2).transpose(1, 2))
            x = x if act is None else act(x)
        k, v = site.kv(x).unflatten(-1, (2, site.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        out: Tensor = site.proj_drop(site.proj(heads.transpose(1, 2).flatten(2)))
        return out
