"""timm's ``Gemma4Attention``: the vision tower of Gemma 4."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from timm.models.gemma4_vit import Gemma4Attention, apply_multidimensional_rope
from torch import Tensor, nn

from vit2linear.context import AttentionContext, GridReader, HeadGeometry
from vit2linear.site import SiteKind, patch_embedding_of
from vit2linear.sites._timm import grouped, split_heads


class Gemma4Site(SiteKind):
    """Projections that may clamp, norms on q, k and v, rotary positions in two dimensions, scale 1."""

    output = "o_proj"

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is Gemma4Attention

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """The queries' heads; their norm stands for the scale."""
        assert isinstance(module, Gemma4Attention)
        return HeadGeometry(module.q_proj.linear.in_features, module.num_heads, module.head_dim, 1.0)

    def grid_source(self, model: nn.Module, path: str) -> tuple[str, GridReader] | None:
        """The encoder's patch embedding, which has no ``dynamic_feat_size`` and takes patches as well as images."""
        name = patch_embedding_of(model, path)
        return None if name is None else (name, _grid)

    def project(
        self,
        site: Any,
        x: Float[Tensor, "batch tokens channels"],
        rope_cos: Float[Tensor, "batch tokens head_dim"],
        rope_sin: Float[Tensor, "batch tokens head_dim"],
        attn_mask: Float[Tensor, "batch 1 1 tokens"] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """Projections, norms, rotation, then each key head for its group of query heads; timm's order."""
        q, k, v = (split_heads(part(x), site.head_dim) for part in (site.q_proj, site.k_proj, site.v_proj))
        q, k = (
            apply_multidimensional_rope(heads, rope_cos, rope_sin, unsqueeze_dim=1)
            for heads in (site.q_norm(q), site.k_norm(k))
        )
        # The encoder makes the mask from padding alone, 0 and -inf.
        key_mask = None if attn_mask is None else attn_mask[:, 0, 0] == 0
        ctx = AttentionContext(x, site.grid_ref.grid, site.grid_ref.num_prefix, key_mask)
        return q, grouped(k, site.num_heads), grouped(site.v_norm(v), site.num_heads), ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "batch tokens channels"]:
        """Output projection."""
        out: Tensor = site.proj_drop(site.o_proj(heads.transpose(1, 2).flatten(2)))
        return out


def _grid(module: nn.Module, args: tuple[Any, ...], output: Any) -> tuple[int, int] | None:
    """Rows and columns of an image; patches that come with coordinates lie on no common grid."""
    x, patch_coord, _ = args
    if not isinstance(x, Tensor) or patch_coord is not None:
        return None
    rows, columns = (pixels // patch for pixels, patch in zip(x.shape[-2:], module.patch_size, strict=True))  # type: ignore[arg-type]
    return rows, columns
