"""Honest descriptions of tiny models in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._hub import save_config_for_hf

from tests.sources.oracles import MODELS

TRANSFORMERS = (
    "vit",
    "deit-two-heads",
    "dinov2",
    "dinov2_with_registers",
    "dinov3_vit-gated",
    "beit",
    "clip",
    "siglip-classes",
    "siglip2",
    "aimv2",
    "swin",
    "swinv2",
    "hiera",
)
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": [1, 1], "num_heads": [2, 4]},
    "vit_small_patch16_dinov3": {"img_size": 64, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "naflexvit_base_patch16_gap": {"embed_dim": 48, "depth": 2, "num_heads": 3},
}
PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 36},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "resample": 3,
}
OPEN_CLIP = {
    "model_cfg": {
        "embed_dim": 20,
        "vision_cfg": {"image_size": 32, "layers": 2, "width": 48, "head_width": 16, "patch_size": 8, "mlp_ratio": 2.0},
        "text_cfg": {"context_length": 8},
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "resize_mode": "shortest"},
}
TRUNK = {
    "model_cfg": {
        "embed_dim": 20,
        "vision_cfg": {"image_size": 160, "timm_model_name": "test_vit", "timm_pool": "", "timm_proj": "linear"},
    },
    "preprocess_cfg": {"resize_mode": "squash", "interpolation": "bicubic"},
}

Files = dict[str, dict[str, Any]]


def descriptions() -> dict[str, Files]:
    """Honest descriptions of tiny models in every layout: file name to content."""
    found: dict[str, Files] = {"open_clip": {"open_clip_config.json": OPEN_CLIP}}
    found["open_clip-timm"] = {"open_clip_config.json": TRUNK}
    for name in TRANSFORMERS:
        model = MODELS[name]()
        config = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
        found[name] = {"config.json": config} | ({"preprocessor_config.json": PROCESSOR} if name == "clip" else {})
    for name, args in TIMM.items():
        with torch.device("meta"):
            model = timm.create_model(name, **args, num_classes=5)
        model.pretrained_cfg = {k: v for k, v in model.pretrained_cfg.items() if k not in ("url", "hf_hub_id")}
        path = Path("config.json")
        save_config_for_hf(model, str(path), {"label_names": ["a", "b", "c", "d", "e"]})
        found[f"timm-{name}"] = {"config.json": json.loads(path.read_text())}
        path.unlink()
    flat = found["timm-vit_tiny_patch16_224"]["config.json"]
    found["timm-old"] = {"config.json": {"architecture": "test_vit", "num_features": 64, **flat["pretrained_cfg"]}}
    return found
