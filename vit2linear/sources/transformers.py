"""The transformers layout for ``vit``, ``deit``, ``dinov2`` and ``dinov2_with_registers``.

Read from the files alone (``config.json``, ``preprocessor_config.json``, ``model.safetensors``): names on disk have not
changed in years, while the library's module names have.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vit2linear.errors import UnsupportedModelError, WeightsError
from vit2linear.sources._preprocessing import data_config
from vit2linear.sources.base import Layout, ModelRef, ModelSpec


@dataclass(frozen=True)
class Family:
    """One model_type: what its config leaves out, and what its timm twin needs to be told."""

    defaults: dict[str, Any]
    layer_scale: bool = False
    distilled: bool = False


_COMMON = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "gelu",
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "qkv_bias": True,
}
_VIT = {**_COMMON, "intermediate_size": 3072, "layer_norm_eps": 1e-12}
_DINOV2 = {**_COMMON, "mlp_ratio": 4, "layer_norm_eps": 1e-6, "use_swiglu_ffn": False, "patch_size": 14}
FAMILIES = {
    "vit": Family(_VIT),
    "deit": Family(_VIT, distilled=True),
    "dinov2": Family(_DINOV2, layer_scale=True),
    "dinov2_with_registers": Family({**_DINOV2, "num_register_tokens": 4}, layer_scale=True),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}

_PREFIX = re.compile(r"^(vit|deit|dinov2|dinov2_with_registers|model)\.")
_DROPPED = re.compile(r"^(embeddings\.mask_token|pooler\.|decoder\.)")
_RENAMES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"^(encoder\.layers?|layers?)\.(\d+)\.", r"blocks.\2."),
        (r"^embeddings\.cls_token$", "cls_token"),
        (r"^embeddings\.register_tokens$", "reg_token"),
        (r"^embeddings\.distillation_token$", "dist_token"),
        (r"^embeddings\.position_embeddings$", "pos_embed"),
        (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
        (r"\.attention\.attention\.(query|key|value)\.", r".attn.\1."),
        (r"\.attention\.q_proj\.", ".attn.query."),
        (r"\.attention\.k_proj\.", ".attn.key."),
        (r"\.attention\.v_proj\.", ".attn.value."),
        (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
        (r"\.mlp\.weights_in\.", ".mlp.fc1."),
        (r"\.mlp\.weights_out\.", ".mlp.fc2."),
        (r"\.layernorm_before\.", ".norm1."),
        (r"\.layernorm_after\.", ".norm2."),
        (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
        (r"^(layernorm|norm)\.", "norm."),
        (r"^(cls_)?classifier\.", "head."),
        (r"^distillation_classifier\.", "head_dist."),
    ]
]


class TransformersLayout(Layout):
    """A key table over the raw files."""

    def matches(self, config: dict[str, Any]) -> bool:
        """transformers writes ``model_type``."""
        return "model_type" in config

    def spec(self, ref: ModelRef) -> ModelSpec:
        """timm architecture and arguments; the input size is what the processor says."""
        config = ref.json("config.json") or {}
        family = _family(ref.name, config)
        full = {**family.defaults, **{k: v for k, v in config.items() if v is not None}}
        preprocessing, note = data_config(ref.json("preprocessor_config.json"), full)
        labels = _labels(full, ref.name) if _has_head(full) else None
        args: dict[str, Any] = {
            "img_size": list(preprocessing["input_size"][1:]),
            "patch_size": _side(ref.name, full, "patch_size"),
            "in_chans": int(full["num_channels"]),
            "embed_dim": int(full["hidden_size"]),
            "depth": int(full["num_hidden_layers"]),
            "num_heads": int(full["num_attention_heads"]),
            "mlp_ratio": _mlp_ratio(full),
            "qkv_bias": bool(full["qkv_bias"]),
            "norm_eps": float(full["layer_norm_eps"]),
        }
        architecture = "vit_base_patch16_224"
        if full.get("use_swiglu_ffn"):
            architecture = "vit_giant_patch14_dinov2"  # the twin with the packed SwiGLU
        elif full["hidden_act"] in ACTIVATIONS:
            args["act_layer"] = ACTIVATIONS[full["hidden_act"]]
        else:
            raise UnsupportedModelError(
                f"{ref.name!r} uses the activation {full['hidden_act']!r}.", f"Supported: {', '.join(ACTIVATIONS)}."
            )
        if family.layer_scale:
            args["init_values"] = float(full.get("layerscale_value", 1.0))
        if "num_register_tokens" in family.defaults:
            args |= {"reg_tokens": int(full["num_register_tokens"]), "no_embed_class": True}
        if family.distilled:
            if _two_heads(full):
                architecture = "deit_base_distilled_patch16_224"
            else:
                args["reg_tokens"] = 1  # a token with a position that the class head does not read
        cfg = {
            **preprocessing,
            "architecture": architecture,
            "num_classes": len(labels) if labels else 0,
            "fixed_input_size": True,
            "first_conv": "patch_embed.proj",
            "classifier": ("head", "head_dist") if architecture.startswith("deit") else "head",
        }
        if labels and any(not re.fullmatch(r"LABEL_\d+", name) for name in labels):
            cfg["label_names"] = labels
        return ModelSpec(architecture, args, cfg, (note,))

    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """Rename, fuse q, k, v, and fold what timm stores elsewhere."""
        config = ref.json("config.json") or {}
        family = _family(ref.name, config)
        full = {**family.defaults, **config}
        weights = _fuse_qkv(ref.name, _rename(ref.weights()))
        if family.distilled and not _two_heads(full) and "dist_token" in weights:
            weights["reg_token"] = weights.pop("dist_token")
        if "num_register_tokens" in family.defaults and {"pos_embed", "cls_token"} <= weights.keys():
            # timm keeps no position for the class token here: it is part of the token.
            weights["cls_token"] = weights["cls_token"] + weights["pos_embed"][:, :1]
            weights["pos_embed"] = weights["pos_embed"][:, 1:]
        return weights


def _family(name: str, config: dict[str, Any]) -> Family:
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{name!r} is a {model_type!r} model in the transformers layout.",
            f"Supported model types: {', '.join(FAMILIES)}; any timm checkpoint works as well.",
        )
    if model_type.startswith("dinov2") and _has_head(config):
        raise UnsupportedModelError(
            f"{name!r} carries DINOv2's classifier on class token and patch mean, which its timm twin cannot hold.",
            "Convert the backbone that it was tuned from, or a timm checkpoint.",
        )
    return FAMILIES[model_type]


def _has_head(config: dict[str, Any]) -> bool:
    return any("ForImageClassification" in str(a) for a in config.get("architectures") or [])


def _two_heads(config: dict[str, Any]) -> bool:
    return any("WithTeacher" in str(a) for a in config.get("architectures") or [])


def _labels(config: dict[str, Any], name: str) -> list[str]:
    table = config.get("id2label")
    if table is None:
        return [f"LABEL_{i}" for i in range(int(config.get("num_labels", 2)))]
    try:
        return [str(table[str(i)]) for i in range(len(table))]
    except (KeyError, TypeError) as error:
        raise UnsupportedModelError(
            f"id2label in config.json of {name!r} does not number its classes from 0."
        ) from error


def _side(name: str, config: dict[str, Any], key: str) -> int:
    value = config[key]
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise UnsupportedModelError(f"{key} of {name!r} is {value!r}.", "Square patches are supported.")
    return value


def _mlp_ratio(config: dict[str, Any]) -> float:
    """The ratio from which timm computes exactly this checkpoint's hidden width."""
    width = int(config["hidden_size"])
    if config.get("use_swiglu_ffn"):
        hidden = 2 * ((int(width * config["mlp_ratio"] * 2 / 3) + 7) // 8 * 8)
    elif "mlp_ratio" in config:
        hidden = int(width * config["mlp_ratio"])
    else:
        hidden = int(config["intermediate_size"])
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def _rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in weights.items():
        key = _PREFIX.sub("", name)
        if _DROPPED.match(key):
            continue
        for pattern, replacement in _RENAMES:
            key = pattern.sub(replacement, key)
        renamed[key] = tensor
    return renamed


def _fuse_qkv(name: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate query, key and value in this order; a missing bias among present ones is zero."""
    fused: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in weights.items():
        match = re.fullmatch(r"(.*\.attn)\.(query|key|value)\.(weight|bias)", key)
        if match:
            parts.setdefault(f"{match[1]}.qkv.{match[3]}", {})[match[2]] = tensor
        else:
            fused[key] = tensor
    for key, qkv in parts.items():
        missing = {"query", "key", "value"} - qkv.keys()
        if missing and not key.endswith("bias"):
            raise WeightsError(f"{name!r} lacks the {' and '.join(sorted(missing))} weights of {key!r}.")
        zeros = torch.zeros_like(next(iter(qkv.values())))
        fused[key] = torch.cat([qkv.get(part, zeros) for part in ("query", "key", "value")])
    return fused
