"""Plain ViTs: ``vit``, ``vit_msn``, ``vit_mae`` (its encoder), ``deit`` and ``ijepa``."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import Family


class PlainViT(Family):
    """Families whose twin is timm's ``VisionTransformer``."""

    @property
    def architecture(self) -> str:
        """Any plain ViT: the arguments say the rest."""
        return "vit_base_patch16_224"

    def args(self) -> dict[str, Any]:
        """Sizes, activation and epsilon."""
        return {
            "patch_size": self.side("patch_size"),
            "embed_dim": int(self.values["hidden_size"]),
            "depth": int(self.values["num_hidden_layers"]),
            "num_heads": int(self.values["num_attention_heads"]),
            "mlp_ratio": self.mlp_ratio(),
            "qkv_bias": bool(self.values["qkv_bias"]),
            "norm_eps": float(self.values["layer_norm_eps"]),
            "act_layer": self.activation(),
        }


class ViT(PlainViT):
    """Class token, learned positions, final norm, a linear head on the class token."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"vit": {}}


class DeiT(PlainViT):
    """A ViT with a distillation token, and one head or two."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"deit": {}}
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "DeiTImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^cls_classifier\.", "head."),
        (r"^distillation_classifier\.", "head_dist."),
        *_keys.PLAIN,
    )

    @property
    def architecture(self) -> str:
        """timm's distilled DeiT averages two heads, and so does transformers' ``WithTeacher``."""
        return "deit_base_distilled_patch16_224" if self._two_heads else super().architecture

    def args(self) -> dict[str, Any]:
        """With one head, the distillation token is a token with a position that the head does not read."""
        return super().args() | ({} if self._two_heads else {"reg_tokens": 1})

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The distillation token goes where ``args`` made room for it."""
        converted = super().convert(weights)
        if not self._two_heads and "dist_token" in converted:
            converted["reg_token"] = converted.pop("dist_token")
        return converted

    @property
    def _two_heads(self) -> bool:
        return self.is_class("WithTeacher")


class MoreViT(PlainViT):
    """Plain ViTs by other trainings. MAE keeps its fixed sin-cos positions among the weights."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"vit_msn": {"layer_norm_eps": 1e-6}, "vit_mae": {}}


class IJepa(PlainViT):
    """No class token; the head reads the mean of the normalised tokens."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"ijepa": {}}

    def args(self) -> dict[str, Any]:
        """The norm comes before the mean."""
        return super().args() | {"class_token": False, "global_pool": "avg", "fc_norm": False}
