"""``dinov3_vit``: rotary positions only, on timm's ``Eva``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON
from vit2linear.sources._transformers.vit import PlainViT


class Dinov3(PlainViT):
    """Class token and registers without positions, layer scale, an optional SwiGLU."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"dinov3_vit": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "query_bias": True,
        "value_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
        "layerscale_value": 1.0,
        "use_gated_mlp": False,
        "num_register_tokens": 0,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "DINOv3ViTImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"\.layer_scale(\d)\.lambda1$", r".gamma_\1"),
        (r"\.mlp\.gate_proj\.", ".mlp.fc1_g."),
        (r"\.mlp\.down_proj\.", ".mlp.fc2."),
        *_keys.PLAIN,
    )
    separate_bias: ClassVar[bool] = True

    @property
    def architecture(self) -> str:
        """timm's own DINOv3; the arguments say the size."""
        return "vit_small_patch16_dinov3_qkvb"

    def args(self) -> dict[str, Any]:
        """The class token is the pooled feature, as upstream."""
        args = super().args() | {
            "global_pool": "token",
            "init_values": float(self.values["layerscale_value"]),
            "num_reg_tokens": int(self.values["num_register_tokens"]),
            "rope_temperature": float(self.values["rope_theta"]),
            "qkv_bias": bool(self.values["query_bias"] or self.values["value_bias"]),
        }
        gated = bool(self.values["use_gated_mlp"])
        del args["act_layer"]
        self.activation("silu" if gated else "gelu")
        # An alignment of 1 asks for gate and value apart, as this layout has them.
        return args | ({"swiglu_mlp": True, "swiglu_align_to": 1} if gated else {})

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Biases that the config leaves out are zero."""
        values = self.values
        up = "fc1_x" if values["use_gated_mlp"] else "fc1"
        converted = {k.replace(".mlp.up_proj.", f".mlp.{up}."): v for k, v in super().convert(weights).items()}
        if not values["num_register_tokens"]:
            converted.pop("reg_token", None)  # saved, with no rows
        without = [] if values["proj_bias"] else ["attn.proj"]
        without += [] if values["mlp_bias"] else ["mlp.fc1", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2"]
        return _keys.with_zero_biases(converted, *without) if without else converted
