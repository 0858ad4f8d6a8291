"""``swin`` and ``swinv2``, on timm's models of the same names."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON, Family


class Swin(Family):
    """Windows, shifted in every second block, in stages; the mean of the last map is classified."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"swin": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "patch_size": 4,
        "embed_dim": 96,
        "depths": [2, 2, 6, 2],
        "num_heads": [3, 6, 12, 24],
        "window_size": 7,
        "mlp_ratio": 4.0,
        "layer_norm_eps": 1e-5,
        "use_absolute_embeddings": False,
    }
    renames: ClassVar[_keys.Table] = (
        (r"^encoder\.", ""),
        (r"^embeddings\.norm\.", "patch_embed.norm."),
        *_keys.STEM,
        *_keys.IN_BLOCK,
        (r"\.attn\.relative_position_bias\.relative_position_bias_table$", ".attn.relative_position_bias_table"),
        (r"\.attn\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
        (r"^layernorm\.", "norm."),
        (r"^classifier\.", "head.fc."),
    )
    classifier: ClassVar[str] = "head.fc"

    @property
    def architecture(self) -> str:
        """The arguments say the size."""
        return "swin_tiny_patch4_window7_224"

    def args(self) -> dict[str, Any]:
        """Sizes of stages and windows."""
        if self.values["use_absolute_embeddings"]:
            raise self.unsupported("it has absolute positions, which its timm twin has not")
        self.activation("gelu")
        return {
            "patch_size": self.side("patch_size"),
            "embed_dim": int(self.values["embed_dim"]),
            "depths": [int(n) for n in self.values["depths"]],
            "num_heads": [int(n) for n in self.values["num_heads"]],
            "window_size": int(self.values["window_size"]),
            "mlp_ratio": float(self.values["mlp_ratio"]),
            "qkv_bias": bool(self.values["qkv_bias"]),
            "norm_eps": float(self.values["layer_norm_eps"]),
        }

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """timm's stages begin with the downsampling that transformers' end with."""

        def next_stage(match: re.Match[str]) -> str:
            return f"layers.{int(match[1]) + 1}.downsample."

        converted = super().convert(weights)
        return {re.sub(r"^layers\.(\d+)\.downsample\.", next_stage, k): v for k, v in converted.items()}


class SwinV2(Swin):
    """Cosine attention, positions from a small MLP, no key bias, norms after the branches."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"swinv2": {"pretrained_window_sizes": [0, 0, 0, 0]}}
    separate_bias: ClassVar[bool] = True

    @property
    def architecture(self) -> str:
        """The arguments say the size."""
        return "swinv2_tiny_window8_256"

    def args(self) -> dict[str, Any]:
        """The windows of pre-training scale the MLP's coordinates."""
        windows = [int(n) for n in self.values["pretrained_window_sizes"]]
        return super().args() | {"pretrained_window_sizes": windows}
