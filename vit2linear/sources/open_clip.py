"""The OpenCLIP layout: ``open_clip_config.json``, the vision tower of a CLIP model."""

from __future__ import annotations

from typing import Any, ClassVar

import timm
import torch
from torch import Tensor

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._description import check_kinds
from vit2linear.sources.base import Layout, ModelRef, ModelSpec

_PLAIN = {
    "attentional_pool": False,
    "final_ln_after_pool": False,
    "no_ln_pre": False,
    "pool_type": "tok",
    "pos_embed_type": "learnable",
    "ls_init_value": None,
    "act_kwargs": None,
    "block_type": None,
    "qk_norm": False,
    "scaled_cosine_attn": False,
}
"""Options of OpenCLIP's own tower that timm's CLIP has no counterpart for, at the values that it has."""

_VISION: dict[str, Any] = {
    "image_size": (224, [224]),
    "patch_size": 16,
    "width": 768,
    "layers": (12, [12]),
    "head_width": 64,
    "mlp_ratio": 4.0,
    "norm_kwargs": {},
    "timm_model_name": "",
}
"""Kinds of values, by examples."""

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_TRUNK = "visual.trunk."


class OpenClipLayout(Layout):
    """OpenCLIP's own tower, or a timm model as the tower; the text tower is dropped."""

    config_file: ClassVar[str] = "open_clip_config.json"

    def matches(self, config: dict[str, Any]) -> bool:
        """OpenCLIP writes ``model_cfg`` and ``preprocess_cfg``."""
        return "model_cfg" in config

    def describe(self, ref: ModelRef) -> ModelSpec:
        """The projection into the space shared with text is the last layer, as in timm's CLIP models."""
        config = ref.json(self.config_file) or {}
        what = f"{self.config_file} of {ref.name!r}"
        check_kinds(what, config, {"model_cfg": {}, "preprocess_cfg": {}})
        check_kinds(what, config["model_cfg"], {"embed_dim": 512, "vision_cfg": {}})
        model, vision = config["model_cfg"], config["model_cfg"].get("vision_cfg") or {}
        check_kinds(what, vision, _VISION)
        size = vision.get("image_size", 224)
        size = [size, size] if isinstance(size, int) else list(size)
        width = int(model["embed_dim"])
        if vision.get("timm_model_name"):
            architecture, args, classes = _timm_tower(ref.name, vision, width)
        else:
            architecture, args, classes = _own_tower(ref.name, model, vision, width)
        cfg = {
            **_preprocessing(ref.name, config.get("preprocess_cfg") or {}),
            "input_size": (3, *size),
            "architecture": architecture,
            "num_classes": classes,
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        }
        note = f"the {classes} outputs are the projection into the space shared with text, not classes"
        return ModelSpec(architecture, {"img_size": size, **args}, cfg, (note,) if classes else ())

    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """The vision tower; timm renames OpenCLIP's own while loading."""
        weights = {k: v for k, v in ref.weights().items() if k.startswith("visual.")}
        if not any(k.startswith(_TRUNK) for k in weights):
            return weights
        trunk = {k.removeprefix(_TRUNK): v for k, v in weights.items() if k.startswith(_TRUNK)}
        if (projection := weights.get("visual.head.proj.weight")) is not None:
            bias = weights.get("visual.head.proj.bias", torch.zeros(len(projection)))
            trunk |= {"head.weight": projection, "head.bias": bias}
        return trunk


def _own_tower(
    name: str, model: dict[str, Any], vision: dict[str, Any], classes: int
) -> tuple[str, dict[str, Any], int]:
    """timm's CLIP ViT, whose arguments say the size, whether or not timm has a name for it."""
    if not isinstance(vision.get("layers", 12), int):
        raise UnsupportedModelError(f"the vision tower of {name!r} is a ResNet.", "Vision transformers are supported.")
    for key, plain in _PLAIN.items():
        if vision.get(key, plain) != plain:
            raise UnsupportedModelError(
                f"the vision tower of {name!r} has {key} = {vision[key]!r}, which timm's CLIP models have not.",
                "Plain CLIP towers and timm models as towers are supported.",
            )
    width = int(vision.get("width", 768))
    args = {
        "patch_size": int(vision.get("patch_size", 16)),
        "embed_dim": width,
        "depth": int(vision.get("layers", 12)),
        "num_heads": width // int(vision.get("head_width", 64)),
        "mlp_ratio": float(vision.get("mlp_ratio", 4.0)),
        "act_layer": "quick_gelu" if model.get("quick_gelu") else "gelu",
        "norm_eps": float((vision.get("norm_kwargs") or {}).get("eps", 1e-5)),
    }
    return "vit_base_patch16_clip_224", args, classes


def _timm_tower(name: str, vision: dict[str, Any], width: int) -> tuple[str, dict[str, Any], int]:
    """The architecture that the config names; without a projection of its own the tower's head is the projection."""
    architecture, projection = str(vision["timm_model_name"]).split(".")[0], vision.get("timm_proj", "linear")
    if not timm.is_model(architecture):
        raise UnsupportedModelError(f"the vision tower of {name!r} is {architecture!r}, which timm does not know.")
    pool = vision.get("timm_pool", "avg")
    if projection == "mlp" or pool in ("abs_attn", "rot_attn"):
        raise UnsupportedModelError(
            f"the vision tower of {name!r} has timm_pool = {pool!r} and timm_proj = {projection!r}.",
            "Supported are timm's own pooling and a linear projection.",
        )
    return architecture, {"global_pool": pool} if pool else {}, 0 if projection == "none" else width


def _preprocessing(name: str, stated: dict[str, Any]) -> dict[str, Any]:
    modes = {"shortest": "center", "squash": "squash"}
    mode = stated.get("resize_mode", "shortest")
    if mode not in modes:
        raise UnsupportedModelError(f"{name!r} has resize_mode = {mode!r}.", f"Supported: {', '.join(modes)}.")
    return {
        "interpolation": stated.get("interpolation", "bicubic"),
        "crop_pct": 1.0,
        "crop_mode": modes[mode],
        "mean": tuple(stated.get("mean", _MEAN)),
        "std": tuple(stated.get("std", _STD)),
    }
