"""The transformers layout: ``config.json`` with a ``model_type``.

Read from the files alone (``config.json``, ``preprocessor_config.json``, the weights): names on disk have not changed
in years, while the library's module names have. What differs between model types is in ``_transformers/``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vit2linear.sources._preprocessing import data_config
from vit2linear.sources._transformers import family_of
from vit2linear.sources._transformers.family import Family, is_named
from vit2linear.sources.base import Layout, ModelRef, ModelSpec


class TransformersLayout(Layout):
    """A key table over the raw files."""

    def matches(self, config: dict[str, Any]) -> bool:
        """transformers writes ``model_type``."""
        return "model_type" in config

    def describe(self, ref: ModelRef) -> ModelSpec:
        """timm architecture and arguments; the input size is what the processor says."""
        family = _family(ref)
        stated = ref.json("preprocessor_config.json") or (ref.json("processor_config.json") or {}).get(
            "image_processor"
        )
        channels = int(family.values["num_channels"])
        preprocessing, note = data_config(stated, family.processor, family.model_type, channels, family.image_size)
        labels = family.labels
        cfg = {
            **preprocessing,
            "architecture": family.architecture,
            "num_classes": family.num_classes,
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": family.classifier,
        }
        if labels and is_named(labels):
            cfg["label_names"] = labels
        args = {"img_size": list(preprocessing["input_size"][1:]), "in_chans": channels, **family.args()}
        dtype = family.top.get("dtype") or family.top.get("torch_dtype") or "float32"
        return ModelSpec(family.architecture, args, cfg, (note, *family.notes), str(dtype))

    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """Under timm's names."""
        return _family(ref).convert(ref.weights())


def _family(ref: ModelRef) -> Family:
    return family_of(ref.name, ref.json("config.json") or {})
