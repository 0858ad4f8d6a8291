"""transformers' ``preprocessor_config.json`` as timm's data configuration."""

from __future__ import annotations

import math
import re
from typing import Any

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._description import check_kinds

_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "size": {"shortest_edge": 224},
    "crop_size": 224,
    "do_center_crop": True,
    "resample": 3,
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {**_HALF, "size": 224, "resample": 2},
    "DeiT": {**_HALF, "size": 256, "crop_size": 224, "do_center_crop": True, "resample": 3},
    "Beit": {**_HALF, "size": 224, "crop_size": 224, "resample": 3},
    "Bit": _CLIP,
    "CLIP": _CLIP,
    "ChineseCLIP": _CLIP,
    "Siglip": {**_HALF, "size": 224, "resample": 3},
    "Siglip2": {**_HALF, "max_num_patches": 256, "patch_size": 16, "resample": 2},
    "DINOv3ViT": {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "size": 224, "resample": 2},
    "ConvNext": {**_HALF, "size": {"shortest_edge": 384}, "crop_pct": 224 / 256, "resample": 3},
}
"""What each class of image processor does where its file does not say otherwise."""

_SHORTEST = ("Bit", "CLIP", "ChineseCLIP", "ConvNext")
"""Processors for which a bare number is the shorter side."""

_KINDS: dict[str, Any] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize", "do_center_crop", "do_pad"), True),
    "image_mean": [0.5],
    "image_std": [0.5],
    **dict.fromkeys(("size", "crop_size"), (224, [224], {})),
    **dict.fromkeys(("rescale_factor", "crop_pct"), 0.5),
    **dict.fromkeys(("resample", "max_num_patches", "patch_size"), 1),
}
"""Kinds of values, by examples."""

Size = tuple[int, int]


def data_config(
    stated: dict[str, Any] | None, default: dict[str, Any], model_type: str, channels: int, image_size: Any
) -> tuple[dict[str, Any], str]:
    """timm's input_size, interpolation, crop_pct, crop_mode, mean and std, and a line that says where they are from.

    Args:
        stated: ``preprocessor_config.json``, ``None`` if there is none.
        default: what is assumed then, at the model's own size.
        model_type: for the line.
        channels: the model's input channels.
        image_size: the model's own size.

    Raises:
        UnsupportedModelError: a processor, or an option of one, that timm's transforms cannot do.
    """
    if stated is None:
        own = {"size": image_size, "crop_size": image_size}
        stated, note = default | own, f"no preprocessor_config.json: preprocessing by the default of {model_type!r}"
        if channels != 3:
            stated = stated | {"image_mean": [0.5] * channels, "image_std": [0.5] * channels}
    else:
        name = stated.get("image_processor_type") or stated.get("feature_extractor_type")
        note = f"preprocessing from preprocessor_config.json ({name or 'unnamed processor'})"
    kind = _kind(stated, default)
    check_kinds("preprocessor_config.json", stated, _KINDS)
    options = {**_PROCESSORS[kind], **{k: v for k, v in stated.items() if v is not None}}
    if options["resample"] not in _RESAMPLE:
        raise UnsupportedModelError(
            f"preprocessor_config.json has resample = {options['resample']}.",
            f"Supported: {', '.join(f'{number} ({name})' for number, name in _RESAMPLE.items())}.",
        )
    _refuse_other_ranges(options)
    crop, resize, mode = _sizes(options, kind)
    normalize = options.get("do_normalize", True)
    cfg = {
        "input_size": (channels, *crop),
        "interpolation": _RESAMPLE[options["resample"]],
        "crop_pct": _crop_pct(crop, resize),
        "crop_mode": mode,
        "mean": tuple(options["image_mean"]) if normalize else (0.0,) * channels,
        "std": tuple(options["image_std"]) if normalize else (1.0,) * channels,
    }
    return cfg, note


def _kind(stated: dict[str, Any], default: dict[str, Any]) -> str:
    """``ViT`` of ``ViTImageProcessorFast``; the model type's own processor where the file does not name one."""
    name = stated.get("image_processor_type") or stated.get("feature_extractor_type") or default["image_processor_type"]
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    if kind not in _PROCESSORS:
        raise UnsupportedModelError(
            f"preprocessor_config.json names {name!r}.",
            f"Supported processors: {', '.join(f'{k}ImageProcessor' for k in _PROCESSORS)}.",
        )
    return kind


def _refuse_other_ranges(options: dict[str, Any]) -> None:
    if not options.get("do_rescale", True) or abs(options.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise UnsupportedModelError(
            "preprocessor_config.json does not scale pixels by 1/255.",
            "Models on other input ranges are not supported.",
        )
    if not options.get("do_resize", True) or options.get("do_pad"):
        raise UnsupportedModelError(
            "preprocessor_config.json does not resize to one size, so images differ in size.",
            "Set do_resize and size in it, and remove do_pad.",
        )


def _sizes(options: dict[str, Any], kind: str) -> tuple[Size, Size, str]:
    """What the model sees, what the image is resized to before, and timm's ``crop_mode``."""
    if kind == "Siglip2" and "size" not in options:
        side = math.isqrt(int(options["max_num_patches"])) * int(options["patch_size"])
        return (side, side), (side, side), "squash"
    resize, shortest = _size(options["size"], kind in _SHORTEST)
    if kind == "ConvNext":
        # From 384 pixels on, this processor squashes.
        edge = resize[0]
        return (resize, resize, "squash") if edge >= 384 else (resize, (int(edge / options["crop_pct"]),) * 2, "center")
    cropped = bool(options.get("do_center_crop", False))
    if shortest and not cropped:
        raise UnsupportedModelError(
            "preprocessor_config.json resizes the shorter side without a crop, so images differ in size.",
            "Add do_center_crop and crop_size to it.",
        )
    crop = _size(options["crop_size"], False)[0] if cropped else resize
    return crop, resize, "center" if shortest else "squash"


def _size(value: Any, shortest: bool) -> tuple[Size, bool]:
    """(height, width), and whether it is the shorter side that is meant."""
    if isinstance(value, dict) and "shortest_edge" in value:
        return (int(value["shortest_edge"]),) * 2, True
    if isinstance(value, dict) and {"height", "width"} <= value.keys():
        return (int(value["height"]), int(value["width"])), False
    if isinstance(value, dict):
        raise UnsupportedModelError(
            f"preprocessor_config.json has a size with {', '.join(value)}.",
            "Supported: shortest_edge, or height and width.",
        )
    if isinstance(value, list | tuple):
        return (int(value[0]), int(value[1])), False
    return (int(value),) * 2, shortest


def _crop_pct(crop: Size, resize: Size) -> float:
    """The float from which timm computes exactly ``resize``, as floor(crop / crop_pct)."""
    if crop[0] * resize[1] != crop[1] * resize[0]:
        raise UnsupportedModelError(f"preprocessor_config.json resizes to {resize} and crops {crop}, of another shape.")
    value = crop[0] / resize[0]
    while math.floor(crop[0] / value) < resize[0]:
        value = math.nextafter(value, 0)
    return value
