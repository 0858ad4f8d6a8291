"""Tiny random models of ``transformers``, and what they say about pixels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

BASE: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8}
TINY: dict[str, Any] = {**BASE, "image_size": 32}
VIT: dict[str, Any] = {**TINY, "intermediate_size": 100}
CLASSES: dict[str, Any] = {"num_labels": 7}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
NAFLEX: dict[str, Any] = {**BASE, "intermediate_size": 100, "num_patches": 16}
MAE: dict[str, Any] = {
    "decoder_hidden_size": 32,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
    "mask_ratio": 0.0,
}
SWIN: dict[str, Any] = {
    "image_size": 64,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [2, 4, 8],
    "window_size": 4,
}
HIERA: dict[str, Any] = {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 2, 2, 1]}
DINOV2: dict[str, Any] = {**TINY, "mlp_ratio": 2}


def towers(kind: str, model: str, vision: dict[str, Any] = VIT, **more: Any) -> nn.Module:
    """A two-tower model of a library class."""
    config: Any = getattr(tf, f"{kind}Config")(vision_config=vision, text_config=TEXT, **more)
    built: nn.Module = getattr(tf, f"{kind}{model}")(config)
    return built


MODELS: dict[str, Callable[[], Any]] = {
    "vit": lambda: tf.ViTForImageClassification(tf.ViTConfig(**VIT, **CLASSES)),
    "vit-model": lambda: tf.ViTModel(tf.ViTConfig(**VIT)),
    "vit-no-bias": lambda: tf.ViTModel(tf.ViTConfig(**VIT, qkv_bias=False, hidden_act="gelu_new")),
    "vit-masked": lambda: tf.ViTForMaskedImageModeling(tf.ViTConfig(**VIT, encoder_stride=8)),
    "deit": lambda: tf.DeiTForImageClassification(tf.DeiTConfig(**VIT, **CLASSES)),
    "deit-two-heads": lambda: tf.DeiTForImageClassificationWithTeacher(tf.DeiTConfig(**VIT, **CLASSES)),
    "vit_msn": lambda: tf.ViTMSNForImageClassification(tf.ViTMSNConfig(**VIT, **CLASSES)),
    "vit_msn-model": lambda: tf.ViTMSNModel(tf.ViTMSNConfig(**VIT)),
    "vit_mae": lambda: tf.ViTMAEForPreTraining(tf.ViTMAEConfig(**VIT, **MAE)),
    "vit_mae-model": lambda: tf.ViTMAEModel(tf.ViTMAEConfig(**VIT, **MAE)),
    "ijepa": lambda: tf.IJepaForImageClassification(tf.IJepaConfig(**VIT, **CLASSES)),
    "ijepa-model": lambda: tf.IJepaModel(tf.IJepaConfig(**VIT)),
    "dinov2": lambda: tf.Dinov2ForImageClassification(tf.Dinov2Config(**DINOV2, **CLASSES)),
    "dinov2-model": lambda: tf.Dinov2Model(tf.Dinov2Config(**DINOV2)),
    "dinov2-swiglu": lambda: tf.Dinov2ForImageClassification(tf.Dinov2Config(**DINOV2, **CLASSES, use_swiglu_ffn=True)),
    "dinov2_with_registers": lambda: tf.Dinov2WithRegistersForImageClassification(
        tf.Dinov2WithRegistersConfig(**DINOV2, **CLASSES, num_register_tokens=3)
    ),
    "dinov3_vit": lambda: tf.DINOv3ViTModel(tf.DINOv3ViTConfig(**VIT, num_register_tokens=3)),
    "dinov3_vit-gated": lambda: tf.DINOv3ViTModel(
        tf.DINOv3ViTConfig(**VIT, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False)
    ),
    "dinov3_vit-no-bias": lambda: tf.DINOv3ViTModel(
        tf.DINOv3ViTConfig(**VIT, query_bias=False, proj_bias=False, mlp_bias=False, rope_theta=50.0)
    ),
    "dinov3_vit-backbone": lambda: tf.DINOv3ViTBackbone(tf.DINOv3ViTConfig(**VIT, num_register_tokens=2)),
    "beit": lambda: tf.BeitForImageClassification(tf.BeitConfig(**VIT, **CLASSES, use_relative_position_bias=True)),
    "beit-shared-token": lambda: tf.BeitForImageClassification(
        tf.BeitConfig(**VIT, **CLASSES, use_shared_relative_position_bias=True, use_mean_pooling=False)
    ),
    "beit-absolute": lambda: tf.BeitModel(
        tf.BeitConfig(**VIT, use_absolute_position_embeddings=True, layer_scale_init_value=0.0)
    ),
    "beit-masked": lambda: tf.BeitForMaskedImageModeling(
        tf.BeitConfig(**VIT, use_shared_relative_position_bias=True, use_mask_token=True, vocab_size=20)
    ),
    "data2vec-vision": lambda: tf.Data2VecVisionForImageClassification(
        tf.Data2VecVisionConfig(**VIT, **CLASSES, use_relative_position_bias=True)
    ),
    "data2vec-vision-shared": lambda: tf.Data2VecVisionModel(
        tf.Data2VecVisionConfig(**VIT, use_shared_relative_position_bias=True)
    ),
    "clip_vision_model": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(**VIT)),
    "clip_vision_model-projection": lambda: tf.CLIPVisionModelWithProjection(
        tf.CLIPVisionConfig(**VIT, projection_dim=20, hidden_act="gelu")
    ),
    "clip": lambda: towers("CLIP", "Model", projection_dim=20),
    "clip-classes": lambda: towers("CLIP", "ForImageClassification", **CLASSES),
    "metaclip_2": lambda: towers("MetaClip2", "Model", projection_dim=20),
    "metaclip_2-classes": lambda: towers("MetaClip2", "ForImageClassification", **CLASSES),
    "metaclip_2_vision_model": lambda: tf.MetaClip2VisionModelWithProjection(
        tf.MetaClip2VisionConfig(**VIT, projection_dim=20)
    ),
    "altclip_vision_model": lambda: tf.AltCLIPVisionModel(tf.AltCLIPVisionConfig(**VIT)),
    "chinese_clip_vision_model": lambda: tf.ChineseCLIPVisionModel(tf.ChineseCLIPVisionConfig(**VIT)),
    "siglip_vision_model": lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**VIT)),
    "siglip_vision_model-no-head": lambda: tf.SiglipVisionModel(tf.SiglipVisionConfig(**VIT, vision_use_head=False)),
    "siglip": lambda: towers("Siglip", "Model"),
    "siglip-classes": lambda: towers("Siglip", "ForImageClassification", **CLASSES),
    "siglip2_vision_model": lambda: tf.Siglip2VisionModel(tf.Siglip2VisionConfig(**NAFLEX)),
    "siglip2": lambda: towers("Siglip2", "Model", NAFLEX),
    "siglip2-classes": lambda: towers("Siglip2", "ForImageClassification", NAFLEX, **CLASSES),
    "aimv2_vision_model": lambda: tf.Aimv2VisionModel(tf.Aimv2VisionConfig(**VIT)),
    "aimv2_vision_model-native": lambda: tf.Aimv2VisionModel(
        tf.Aimv2VisionConfig(**VIT, is_native=True, use_head=False, qkv_bias=True)
    ),
    "aimv2": lambda: towers("Aimv2", "Model", projection_dim=20),
    "swin": lambda: tf.SwinForImageClassification(tf.SwinConfig(**SWIN, **CLASSES)),
    "swin-model": lambda: tf.SwinModel(
        tf.SwinConfig(**{**SWIN, "image_size": 56, "window_size": 7, "qkv_bias": False})
    ),
    "swin-masked": lambda: tf.SwinForMaskedImageModeling(tf.SwinConfig(**SWIN, encoder_stride=8)),
    "swinv2": lambda: tf.Swinv2ForImageClassification(tf.Swinv2Config(**SWIN, **CLASSES)),
    "swinv2-model": lambda: tf.Swinv2Model(tf.Swinv2Config(**SWIN, pretrained_window_sizes=[6, 6, 3])),
    "hiera": lambda: tf.HieraForImageClassification(tf.HieraConfig(**HIERA, **CLASSES)),
    "hiera-model": lambda: tf.HieraModel(tf.HieraConfig(**HIERA)),
}
TANH_POOLED = {"vit-model", "vit-no-bias", "ijepa-model"}
"""Their pooler is a layer that only the headless class of the library has; timm's twin pools without it."""


def make(name: str) -> Any:
    """The model with every weight moved off its initial value: init leaves zeros, where a lost key would not show."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


@dataclass
class Said:
    """What a model says about pixels; ``None`` where it says nothing."""

    tokens: Tensor
    pooled: Tensor | None = None
    outputs: Tensor | None = None


@torch.no_grad()
def ask(name: str, model: Any, pixels: Tensor) -> Said:
    """The library's answer."""
    prefix = "vision_model" if hasattr(model, "vision_model") else model.base_model_prefix
    tower = model if "dinov3" in name else getattr(model, prefix, model)
    inputs = _inputs(name, pixels)
    out = tower(**inputs)
    if hasattr(out, "feature_maps"):
        return Said(out.feature_maps[-1].flatten(2).transpose(1, 2))
    tokens, pooled = out.last_hidden_state, getattr(out, "pooler_output", None)
    if "ForImageClassification" in type(model).__name__:
        pools_by_itself = prefix == "vision_model" or "dinov2" in name
        return Said(tokens, None if pools_by_itself else pooled, model(**inputs).logits)
    if name == "beit-masked":
        tokens = model.layernorm(tokens)
    if hasattr(tower, "post_layernorm") and "clip" in name:
        tokens = tower.post_layernorm(tokens)  # the class token's, for timm all tokens'
    if name in TANH_POOLED:
        pooled = None
    outputs = model.visual_projection(pooled) if hasattr(model, "visual_projection") else None
    return Said(tokens, None if outputs is not None else pooled, outputs)


def _inputs(name: str, pixels: Tensor) -> dict[str, Tensor]:
    if name.startswith("vit_mae"):
        rows, columns = pixels.shape[2] // 8, pixels.shape[3] // 8
        order = torch.arange(rows * columns, dtype=torch.float32)
        return {"pixel_values": pixels, "noise": order.expand(len(pixels), -1)}
    if name.startswith("siglip2"):
        batch, channels, height, width = pixels.shape
        rows, columns = height // 8, width // 8
        patches = pixels.reshape(batch, channels, rows, 8, columns, 8).permute(0, 2, 4, 3, 5, 1)
        return {
            "pixel_values": patches.reshape(batch, rows * columns, -1),
            "pixel_attention_mask": torch.ones(batch, rows * columns, dtype=torch.int32),
            "spatial_shapes": torch.tensor([[rows, columns]] * batch),
        }
    return {"pixel_values": pixels}
