"""The vision towers of ``siglip`` and ``siglip2``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON
from vit2linear.sources._transformers.vit import PlainViT


class Siglip(PlainViT):
    """No class token; pooled by attention, or by the mean of the tokens where there is a classifier."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"siglip": {}, "siglip_vision_model": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
        "vision_use_head": True,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "SiglipImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"^head\.probe$", "attn_pool.latent"),
        (r"^head\.attention\.in_proj_", "attn_pool.in_proj."),
        (r"^head\.attention\.out_proj\.", "attn_pool.proj."),
        (r"^head\.layernorm\.", "attn_pool.norm."),
        (r"^head\.mlp\.", "attn_pool.mlp."),
        *_keys.PLAIN,
    )

    def args(self) -> dict[str, Any]:
        """The norm comes before the pooling."""
        pooling = {"global_pool": "map"} if self._attention_pooled else {"global_pool": "avg", "fc_norm": False}
        return super().args() | {"class_token": False, **pooling}

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Split the pooling's packed projection; a classifier does not read that pooling at all."""
        converted = super().convert(weights)
        if not self._attention_pooled:
            return _keys.without(converted, ["attn_pool."])
        for kind in ("weight", "bias"):
            packed = converted.pop(f"attn_pool.in_proj.{kind}", None)
            if packed is not None:
                width = packed.shape[0] // 3
                converted[f"attn_pool.q.{kind}"] = packed[:width]
                converted[f"attn_pool.kv.{kind}"] = packed[width:]
        return converted

    @property
    def _attention_pooled(self) -> bool:
        return bool(self.values["vision_use_head"]) and self.labels is None


class Siglip2(Siglip):
    """The flexible one ("NaFlex"): patches of any aspect ratio cut beforehand; read at its native square grid."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"siglip2": {}, "siglip2_vision_model": {}}
    defaults: ClassVar[dict[str, Any]] = {**Siglip.defaults, "num_patches": 256}
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "Siglip2ImageProcessor"}

    @property
    def image_size(self) -> Any:
        """The side of the square that has all patches."""
        side = math.isqrt(int(self.values["num_patches"]))
        return side * self.side("patch_size")

    @property
    def notes(self) -> tuple[str, ...]:
        """That aspect ratios are lost."""
        return ("images are squashed to a square, where the original keeps their aspect ratio",)

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The patches' linear layer, over (row, column, channel), as a convolution."""
        converted = super().convert(weights)
        linear, patch = converted.get("patch_embed.proj.weight"), self.side("patch_size")
        if linear is not None:
            kernel = linear.reshape(len(linear), patch, patch, -1).permute(0, 3, 1, 2)
            converted["patch_embed.proj.weight"] = kernel.contiguous()
        return converted
