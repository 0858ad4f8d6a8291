"""``dinov2`` and ``dinov2_with_registers``, with their classifier."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON, IMAGENET, ratio
from vit2linear.sources._transformers.vit import PlainViT


class Dinov2(PlainViT):
    """Layer scale, optionally registers and SwiGLU; the classifier reads class token and mean of the patches."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {
        "dinov2": {},
        "dinov2_with_registers": {"num_register_tokens": 4, "patch_size": 16},
    }
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "mlp_ratio": 4.0,
        "layer_norm_eps": 1e-6,
        "use_swiglu_ffn": False,
        "patch_size": 14,
        "layerscale_value": 1.0,
        "num_register_tokens": 0,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "BitImageProcessor", **IMAGENET}
    renames: ClassVar[_keys.Table] = (
        (r"\.mlp\.weights_in\.", ".mlp.fc1."),
        (r"\.mlp\.(weights_out|down_proj)\.", ".mlp.fc2."),
        *_keys.PLAIN,
    )

    @property
    def architecture(self) -> str:
        """The twin with the packed SwiGLU has another MLP class."""
        return "vit_giant_patch14_dinov2" if self.values["use_swiglu_ffn"] else super().architecture

    def args(self) -> dict[str, Any]:
        """timm keeps no positions for class token and registers where there are registers."""
        args = super().args() | {"init_values": float(self.values["layerscale_value"])}
        if self.values["use_swiglu_ffn"]:
            args["act_layer"] = "silu"  # whatever hidden_act says
        if self._registers:
            args |= {"reg_tokens": self._registers, "no_embed_class": True}
        if self.labels is not None:
            args["head"] = "cls_mean"
        return args

    def mlp_ratio(self) -> float:
        """A SwiGLU is two thirds as wide, rounded up to eight, twice."""
        width, hidden = int(self.values["hidden_size"]), int(self.values["hidden_size"] * self.values["mlp_ratio"])
        return ratio(2 * ((int(hidden * 2 / 3) + 7) // 8 * 8) if self.values["use_swiglu_ffn"] else hidden, width)

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pack gate and value; with registers, the class token's position becomes part of the token."""
        converted = super().convert(weights)
        for gate in [k for k in converted if ".mlp.gate_proj." in k]:
            packed = [converted.pop(gate), converted.pop(gate.replace("gate_proj", "up_proj"))]
            converted[gate.replace("gate_proj", "fc1")] = torch.cat(packed)
        if self._registers and {"pos_embed", "cls_token"} <= converted.keys():
            positions = converted["pos_embed"].float()
            converted["cls_token"] = converted["cls_token"].float() + positions[:, :1]
            converted["pos_embed"] = positions[:, 1:]
        return converted

    @property
    def _registers(self) -> int:
        return int(self.values["num_register_tokens"])
