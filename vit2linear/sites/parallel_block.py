"""timm's ``ParallelScalingBlock``: attention and MLP side by side (ViT-22B, arXiv 2302.05442).

One projection feeds both, inside the block's own forward, so the site is the block.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import SiteKind
from vit2linear.sites._timm import context


class ParallelBlockSite(SiteKind):
    """Norm, fused projection and qk-norm before the routing; the MLP, layer scale and the residual after it."""

    output = "attn_out_proj"
    whole_block = True

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is ParallelScalingBlock

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, ParallelScalingBlock)
        return HeadGeometry(module.in_proj.in_features, module.num_heads, module.head_dim, module.scale)

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """The block's norm and projection; operators see the normalised input, as at any site."""
        ctx = context(site, site.in_norm(x), attn_mask, is_causal)
        mlp, q, k, v = site.in_proj(ctx.x).split(site.in_split, dim=-1)
        ctx.state = x, mlp
        return *self.heads(site, q, k, v), ctx

    def heads(self, site: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(batch, tokens, channels) as heads, then qk-norm."""
        q, k, v = (t.unflatten(-1, (site.num_heads, site.head_dim)).transpose(1, 2) for t in (q, k, v))
        return site.q_norm(q), site.k_norm(k), v

    def joined(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"]
    ) -> Float[Tensor, "batch tokens channels"]:
        """The inverse of ``heads``."""
        return heads.transpose(1, 2).flatten(2)

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """The MLP, the output projection (one for both or one each), layer scale, residual."""
        x, mlp = ctx.state
        if site.mlp_bias is not None:
            mlp = mlp + site.mlp_bias
        mlp, y = site.mlp_drop(site.mlp_act(mlp)), self.joined(site, heads)
        if site.out_proj is None:
            y = site.attn_out_proj(y) + site.mlp_out_proj(mlp)
        else:
            y = site.out_proj(torch.cat((y, mlp), dim=-1))
        out: Tensor = x + site.drop_path(site.ls(y))
        return out

    def answer(self, x: Tensor, output: Any) -> Tensor:
        """What the block adds to its input."""
        added: Tensor = output - x
        return added
