"""SAM's image encoder (arXiv 2304.02643, ViTDet 2203.16527): tokens as a map, most blocks inside windows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from timm.layers import apply_rot_embed_cat, build_rotary_pos_embed
from timm.models.vision_transformer_sam import Attention, get_decomposed_rel_pos_bias
from torch import Tensor, nn

from vit2linear.context import AttentionContext, HeadGeometry
from vit2linear.site import Feature, SiteKind
from vit2linear.sites._heads import BIAS, fused_heads, projected
from vit2linear.sites._windows import Windows, known_map


class SamSite(SiteKind):
    """(batch, rows, columns, channels) in and out, where windows are the batch; qk-norm, decomposed bias or rope."""

    windowed = True
    block: Any
    """Knows the window; 0 is none."""

    def matches(self, module: nn.Module) -> bool:
        """Exactly timm's class."""
        return type(module) is Attention

    def at(self, model: nn.Module, path: str) -> SiteKind:
        """With its block."""
        self.block = model.get_submodule(path.rpartition(".")[0])
        return self

    def geometry(self, module: nn.Module) -> HeadGeometry:
        """Sizes as timm names them."""
        assert isinstance(module, Attention)
        return HeadGeometry(module.qkv.in_features, module.num_heads, module.head_dim, module.scale)

    def features(self, module: nn.Module) -> Mapping[str, Feature]:
        """The bias of MViTv2 (arXiv 2112.01526), which depends on the query."""
        if not module.use_rel_pos:
            return {}
        words = "a bias on the logits, the query times a learned vector for each vertical and horizontal offset"
        globally: Literal["lost", "as ever"] = "lost" if self.block.window_size else "as ever"
        return {BIAS: Feature(words, "bias", ("rel_pos_h", "rel_pos_w"), globally=globally)}

    def window(self, module: nn.Module) -> int | None:
        """The block's window, squared."""
        side: int = self.block.window_size
        return side**2 or None

    def project(
        self, site: Any, x: Float[Tensor, "windows rows columns channels"]
    ) -> tuple[Tensor, Tensor, Tensor, AttentionContext]:
        """qkv, qk-norm, then bias or rotation by the positions in the window, or in the map where that is undone."""
        grid, windows = (x.shape[1], x.shape[2]), None
        if site.global_windows:
            windows = Windows(known_map(site), grid)
            x, grid = windows.join(x), windows.grid
        else:
            x = x.flatten(1, 2)
        q, k, v = fused_heads(site, x)
        ctx = AttentionContext(x, grid, state=windows)
        q, k = site.q_norm(q), site.k_norm(k)
        if site.rope is not None:
            rope = site.rope.get_embed() if windows is None else _rope(site.rope, windows)
            q, k = apply_rot_embed_cat(q, rope).type_as(v), apply_rot_embed_cat(k, rope).type_as(v)
        elif site.use_rel_pos and BIAS not in site.dropped:
            bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), site.rel_pos_h, site.rel_pos_w, grid, grid)
            ctx.bias = bias.unflatten(0, q.shape[:2])
        return q, k, v, ctx

    def merge(
        self, site: Any, heads: Float[Tensor, "batch heads tokens head_dim"], ctx: AttentionContext
    ) -> Float[Tensor, "windows rows columns channels"]:
        """Output projection; a map again, or windows."""
        y = projected(site, heads)
        windows: Windows | None = ctx.state
        return y.unflatten(1, ctx.patch_grid()) if windows is None else windows.split(y)


def _rope(rope: Any, windows: Windows) -> Float[Tensor, "tokens twice_head_dim"]:
    """The rotation of a window continued over the map: a step between neighbours stays as long as it was."""
    reference = rope.ref_feat_shape
    if reference is not None:
        reference = [r * g / w for r, g, w in zip(reference, windows.grid, windows.size, strict=True)]
    parts = build_rotary_pos_embed(
        windows.grid,
        bands=rope.bands,
        in_pixels=rope.in_pixels,
        ref_feat_shape=reference,
        device=rope.bands.device,
        dtype=rope.pos_embed.dtype,
    )
    return torch.cat(parts, -1)
