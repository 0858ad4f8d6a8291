"""What a family of transformers models is: defaults that its configs leave out, its timm twin, its weights' names."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._description import check_kinds
from vit2linear.sources._transformers import _keys

ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}
COMMON: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
_SIDES: dict[str, Any] = dict.fromkeys(("image_size", "patch_size"), (224, [224]))
_TOP: dict[str, Any] = {
    "vision_config": {},
    "architectures": [""],
    "num_labels": 2,
    "id2label": {},
    "projection_dim": 512,
}
"""Kinds of values that the defaults do not tell."""
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


class Family(ABC):
    """One config of a family of model types, read; no weight file is opened.

    A two-tower config has the vision part under ``vision_config``: that is ``self.values``, the whole is ``self.top``.
    """

    model_types: ClassVar[dict[str, dict[str, Any]]] = {}
    """``model_type`` to the values that it adds to ``defaults``."""
    defaults: ClassVar[dict[str, Any]] = COMMON
    """What transformers' config class assumes for keys that the file leaves out."""
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "ViTImageProcessor"}
    """What is assumed where ``preprocessor_config.json`` is missing."""
    renames: ClassVar[_keys.Table] = _keys.PLAIN
    """Patterns of the weights' names, old and new, to timm's names; applied in order."""
    separate_bias: ClassVar[bool] = False
    """timm's twin holds the biases of query and value by themselves, and none of the key."""
    classifier: ClassVar[str] = "head"
    """Where timm's twin has its last layer."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.top = config
        self.model_type = str(config["model_type"])
        check_kinds(f"config.json of {name!r}", config, _TOP)
        vision = config.get("vision_config") or config
        check_kinds(f"config.json of {name!r}", vision, {**self.defaults, **_SIDES})
        stated = {k: v for k, v in vision.items() if v is not None}
        self.values = {**self.defaults, **self.model_types[self.model_type], **stated}

    @property
    @abstractmethod
    def architecture(self) -> str:
        """The timm architecture."""

    @abstractmethod
    def args(self) -> dict[str, Any]:
        """JSON arguments that make the architecture this very model; sizes of the input aside."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know."""
        return ()

    @property
    def labels(self) -> list[str] | None:
        """Names of the classes, ``None`` without a classifier."""
        if not self.is_class("ForImageClassification"):
            return None
        table = self.top.get("id2label")
        if table is None:
            return [f"LABEL_{i}" for i in range(int(self.top.get("num_labels", 2)))]
        try:
            return [str(table[str(i)]) for i in range(len(table))]
        except (KeyError, TypeError) as error:
            raise self.unsupported("id2label in config.json does not number its classes from 0") from error

    @property
    def num_classes(self) -> int:
        """Outputs of the last layer; 0 without one."""
        return len(self.labels or [])

    @property
    def image_size(self) -> Any:
        """Native size: a side, or height and width."""
        return self.values["image_size"]

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights under timm's names."""
        renamed = _keys.rename(self.name, weights, self.renames)
        return _keys.fuse_qkv(self.name, renamed, self.separate_bias)

    def is_class(self, words: str) -> bool:
        """Whether the class that the checkpoint was saved from has ``words`` in its name."""
        return any(words in str(a) for a in self.top.get("architectures") or [])

    def side(self, key: str) -> int:
        """A size that may be written as a number or as equal height and width."""
        value = self.values[key]
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int):
            raise self.unsupported(f"{key} is {value!r}", "Square ones are supported.")
        return value

    def activation(self, *allowed: str) -> str:
        """timm's name of the MLP's activation; ``allowed`` are the only ones that the twin can have, if any."""
        act = ACTIVATIONS.get(self.values["hidden_act"])
        if act is None or (allowed and act not in allowed):
            supported = [k for k, v in ACTIVATIONS.items() if not allowed or v in allowed]
            raise self.unsupported(
                f"the activation is {self.values['hidden_act']!r}", f"Supported: {', '.join(supported)}."
            )
        return act

    def mlp_ratio(self) -> float:
        """The ratio from which timm computes exactly this checkpoint's hidden width."""
        return ratio(int(self.values["intermediate_size"]), int(self.values["hidden_size"]))

    def unsupported(self, what: str, hint: str | None = None) -> UnsupportedModelError:
        """The error for a variant that the twin cannot be."""
        return UnsupportedModelError(f"{self.name!r} is a {self.model_type!r} model, and {what}.", hint)


def ratio(hidden: int, width: int) -> float:
    """The float that gives ``hidden`` as ``int(width * ratio)``."""
    value = hidden / width
    return value if int(width * value) == hidden else math.nextafter(value, math.inf)


def is_named(labels: list[str]) -> bool:
    """Whether class names are more than transformers' place holders."""
    return any(not re.fullmatch(r"LABEL_\d+", name) for name in labels)
