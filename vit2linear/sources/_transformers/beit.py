"""``beit`` and ``data2vec-vision``: relative position bias, on timm's ``Beit``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON
from vit2linear.sources._transformers.vit import PlainViT


class Beit(PlainViT):
    """Tables of relative positions per layer or shared, no key bias, layer scale."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"beit": {}, "data2vec-vision": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "use_absolute_position_embeddings": False,
        "use_relative_position_bias": False,
        "use_shared_relative_position_bias": False,
        "layer_scale_init_value": 0.1,
        "use_mean_pooling": True,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "BeitImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"^(encoder\.relative_position_bias|shared_position_bias)\.", "rel_pos_bias."),
        *_keys.PLAIN,
        (r"\.(attn\.)?relative_position_bias\.relative_position_bias_table$", ".attn.relative_position_bias_table"),
        (r"\.lambda_(\d)$", r".gamma_\1"),
        (r"^pooler\.layernorm\.", "fc_norm."),
    )
    separate_bias: ClassVar[bool] = True

    @property
    def architecture(self) -> str:
        """timm's own BEiT; the arguments say the size."""
        return "beit_base_patch16_224"

    def args(self) -> dict[str, Any]:
        """With mean pooling the norm comes after it, but masked modelling has a norm of its own on all tokens."""
        values, masked = self.values, self.is_class("ForMaskedImageModeling")
        if masked and not values["use_mean_pooling"]:
            raise self.unsupported("its masked-modelling head has a second final norm")
        self.activation("gelu")
        args = super().args() | {
            "qkv_bias": True,
            "init_values": float(values["layer_scale_init_value"]),
            "use_abs_pos_emb": bool(values["use_absolute_position_embeddings"]),
            "use_rel_pos_bias": bool(values["use_relative_position_bias"]),
            "use_shared_rel_pos_bias": bool(values["use_shared_relative_position_bias"]),
            "global_pool": "avg" if values["use_mean_pooling"] else "token",
            "use_fc_norm": bool(values["use_mean_pooling"]) and not masked,
        }
        del args["act_layer"]
        return args

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Headless files may lack the pooler's norm, which then is one without scale and shift."""
        converted = super().convert(weights)
        if self.labels is None and self.args()["use_fc_norm"]:
            width = int(self.values["hidden_size"])
            converted = {"fc_norm.weight": torch.ones(width), "fc_norm.bias": torch.zeros(width)} | converted
        return converted
