"""transformers' ``preprocessor_config.json`` as timm's data configuration."""

from __future__ import annotations

from typing import Any

from vit2linear.errors import UnsupportedModelError

_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def data_config(processor: dict[str, Any] | None, config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """timm's input_size, interpolation, crop_pct, crop_mode, mean and std, and a line that says where they are from.

    Without a processor file: the model's own size and what the model type's processor does by default.
    """
    channels = int(config["num_channels"])
    model_type = config["model_type"]
    if processor is None:
        return _defaults(model_type, channels, config["image_size"])
    kind = str(processor.get("image_processor_type") or processor.get("feature_extractor_type") or "")
    if not processor.get("do_rescale", True) or abs(processor.get("rescale_factor", 1 / 255) * 255 - 1) > 1e-6:
        raise UnsupportedModelError(
            "preprocessor_config.json does not scale pixels by 1/255.",
            "Models on other input ranges are not supported.",
        )
    normalize = processor.get("do_normalize", True)
    mean = processor.get("image_mean", [0.5] * channels) if normalize else [0.0] * channels
    std = processor.get("image_std", [0.5] * channels) if normalize else [1.0] * channels
    resize, shortest = _size(processor.get("size", config["image_size"]), kind)
    crop_size = processor.get("crop_size", resize)
    crop = _size(crop_size, "square")[0] if processor.get("do_center_crop", False) else resize
    if shortest and not processor.get("do_center_crop", False):
        raise UnsupportedModelError(
            "preprocessor_config.json resizes the shorter side without a crop, so images differ in size.",
            "Add do_center_crop and crop_size to it.",
        )
    cfg = {
        "input_size": (channels, *crop),
        "interpolation": _RESAMPLE[int(processor.get("resample", 2))],
        "crop_pct": crop[0] / resize[0],
        "crop_mode": "center" if shortest else "squash",
        "mean": tuple(mean),
        "std": tuple(std),
    }
    return cfg, f"preprocessing from preprocessor_config.json ({kind or 'unnamed processor'})"


def _size(value: Any, kind: str) -> tuple[tuple[int, int], bool]:
    """(height, width), and whether it is the shorter side that is meant."""
    if isinstance(value, dict):
        if "shortest_edge" in value:
            return (int(value["shortest_edge"]),) * 2, True
        return (int(value["height"]), int(value["width"])), False
    shortest = kind.startswith(("CLIP", "Bit"))
    if isinstance(value, list | tuple):
        return (int(value[0]), int(value[1])), False
    return (int(value),) * 2, shortest


def _defaults(model_type: str, channels: int, image_size: Any) -> tuple[dict[str, Any], str]:
    size, _ = _size(image_size, "square")
    dino = model_type.startswith("dinov2")
    cfg = {
        "input_size": (channels, *size),
        "interpolation": "bicubic" if dino else "bilinear",
        "crop_pct": 1.0,
        "crop_mode": "center" if dino else "squash",
        "mean": (0.5,) * channels,
        "std": (0.5,) * channels,
    }
    if dino and channels == 3:
        cfg |= _IMAGENET
    return cfg, f"no preprocessor_config.json: preprocessing by the default of {model_type!r}"
