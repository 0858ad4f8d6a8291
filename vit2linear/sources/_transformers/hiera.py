"""``hiera``: attention in mask units, then global, with pooled queries between stages."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON, Family


class Hiera(Family):
    """timm's model has the same parts; its blocks are one list."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"hiera": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "layer_norm_eps": 1e-6,
        "image_size": [224, 224],
        "embed_dim": 96,
        "patch_size": [7, 7],
        "patch_stride": [4, 4],
        "patch_padding": [3, 3],
        "mlp_ratio": 4.0,
        "depths": [2, 3, 16, 3],
        "num_heads": [1, 2, 4, 8],
        "embed_dim_multiplier": 2.0,
        "num_query_pool": 3,
        "query_stride": [2, 2],
        "masked_unit_size": [8, 8],
        "masked_unit_attention": [True, True, False, False],
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "BitImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        *_keys.STEM,
        *_keys.IN_BLOCK,
        (r"^(pooler\.layernorm|encoder_norm)\.", "head.norm."),
        (r"^classifier\.", "head.fc."),
    )
    classifier: ClassVar[str] = "head.fc"

    @property
    def architecture(self) -> str:
        """The arguments say the size."""
        return "hiera_tiny_224"

    def args(self) -> dict[str, Any]:
        """Sizes of stages, mask units and pooling."""
        values = self.values
        heads, masked = list(values["num_heads"]), list(values["masked_unit_attention"])
        grows = heads[1] / heads[0] if len(heads) > 1 else 1.0
        if heads != [int(heads[0] * grows**i) for i in range(len(heads))]:
            raise self.unsupported(f"its heads {heads} do not grow by a constant factor", "timm's Hiera needs that.")
        if masked != sorted(masked, reverse=True):
            raise self.unsupported("it attends in mask units after a stage that attends globally")
        self.activation("gelu")
        return {
            "embed_dim": int(values["embed_dim"]),
            "num_heads": int(heads[0]),
            "head_mul": grows,
            "dim_mul": float(values["embed_dim_multiplier"]),
            "stages": [int(n) for n in values["depths"]],
            "q_pool": int(values["num_query_pool"]),
            "q_stride": list(values["query_stride"]),
            "mask_unit_size": list(values["masked_unit_size"]),
            "mask_unit_attn": masked,
            "patch_kernel": list(values["patch_size"]),
            "patch_stride": list(values["patch_stride"]),
            "patch_padding": list(values["patch_padding"]),
            "mlp_ratio": float(values["mlp_ratio"]),
            "norm_eps": float(values["layer_norm_eps"]),
        }

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Stages flatten into one list of blocks; query, key and value are fused already."""
        depths = [int(n) for n in self.values["depths"]]

        def flat(match: re.Match[str]) -> str:
            return f"blocks.{sum(depths[: int(match[1])]) + int(match[2])}."

        converted = super().convert(weights)
        return {re.sub(r"^encoder\.stages\.(\d+)\.layers\.(\d+)\.", flat, k): v for k, v in converted.items()}
