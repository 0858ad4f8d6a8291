"""The vision towers of ``clip`` and of models built like it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON
from vit2linear.sources._transformers.vit import PlainViT

_TWO_TOWERS = ("clip", "metaclip_2", "altclip", "chinese_clip")


class Clip(PlainViT):
    """Pre-norm after the stem, patches without bias, and one of three heads: none, the projection, a classifier."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {
        name: {} for tower in _TWO_TOWERS for name in (tower, f"{tower}_vision_model")
    }
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "layer_norm_eps": 1e-5,
        "hidden_act": "quick_gelu",
        "patch_size": 32,
        "projection_dim": 512,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "CLIPImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"^pre_layrnorm\.", "norm_pre."),
        (r"^visual_projection\.", "head."),
        *_keys.PLAIN,
    )

    def args(self) -> dict[str, Any]:
        """The classifier of transformers reads the mean of the patches before the final norm."""
        args = super().args() | {"pre_norm": True}
        if self.labels is not None:
            args |= {"global_pool": "avg", "fc_norm": False, "final_norm": False}
        return args

    @property
    def num_classes(self) -> int:
        """The projection into the space shared with text is a linear layer like a classifier."""
        if not self._projected:
            return super().num_classes
        return int(self.top.get("projection_dim") or self.values["projection_dim"])

    @property
    def notes(self) -> tuple[str, ...]:
        """That outputs need not be classes."""
        if not self._projected:
            return ()
        return (f"the {self.num_classes} outputs are the projection into the space shared with text, not classes",)

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The projection has no bias, and the classifier no final norm."""
        converted = super().convert(weights)
        if self._projected and "head.weight" in converted:
            converted["head.bias"] = torch.zeros_like(converted["head.weight"][:, 0])
        return converted if self.labels is None else _keys.without(converted, ["norm."])

    @property
    def _projected(self) -> bool:
        return self.is_class("WithProjection") or (
            self.model_type in _TWO_TOWERS and self.labels is None and not self.is_class("VisionModel")
        )
