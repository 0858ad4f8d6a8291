"""Names of weights: transformers' old and new ones to timm's.

Files on the Hub keep the names of transformers 4 (``encoder.layer.N.attention.attention.query``); files saved with
``save_original_format=False`` have the modules of transformers 5 (``layers.N.attention.q_proj``). Prefixes such as
``vit.`` may be missing on some keys only: both mix in files that transformers 5 writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from vit2linear.errors import WeightsError

Table = tuple[tuple[str, str], ...]

_PREFIX = re.compile(
    r"^(vit|deit|dinov2|dinov2_with_registers|beit|data2vec_vision|ijepa|swin|swinv2|hiera|vision_model|model)\."
)
_DROPPED = re.compile(
    r"^(embeddings\.(mask_token|position_ids)$|pooler\.|decoder\.|lm_head\.|multiscale_fusion\.)"
    r"|^(text_model\.|text_projection\.|logit_(scale|bias)$)"
    r"|relative_position_index$|relative_coords_table$"
)
"""Parts that only training for another task used, the text tower, and buffers."""

IN_BLOCK: Table = (
    (r"\.attention\.(attention|self)\.", ".attn."),
    (r"\.(attention|self_attn)\.(output\.dense|out_proj|o_proj)\.", ".attn.proj."),
    (r"\.(attention|self_attn)\.", ".attn."),
    (r"\.attn\.q_proj\.", ".attn.query."),
    (r"\.attn\.k_proj\.", ".attn.key."),
    (r"\.attn\.v_proj\.", ".attn.value."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"\.(layernorm_before|layer_norm1|rms_norm1)\.", ".norm1."),
    (r"\.(layernorm_after|layer_norm2|rms_norm2)\.", ".norm2."),
)
STEM: Table = (
    (r"^embeddings\.(cls_token|class_embedding)$", "cls_token"),
    (r"^embeddings\.register_tokens$", "reg_token"),
    (r"^embeddings\.(position_embeddings|position_embedding\.weight)$", "pos_embed"),
    (
        r"^embeddings\.(patch_embeddings\.projection|patch_embeddings|patch_embedding|patch_embed)\.",
        "patch_embed.proj.",
    ),
)
PLAIN: Table = (
    (r"^(encoder\.layers?|layers?)\.(\d+)\.", r"blocks.\2."),
    *STEM,
    *IN_BLOCK,
    (r"\.layer_scale(\d)\.lambda1$", r".ls\1.gamma"),
    (r"^(layernorm|norm|post_layernorm|rms_norm)\.", "norm."),
    (r"^classifier\.", "head."),
)


def rename(name: str, weights: dict[str, Tensor], table: Table) -> dict[str, Tensor]:
    """Every weight under its new name and in timm's shape; what only served another task is left out.

    Raises:
        WeightsError: two weights of the source called ``name`` would get the same name.
    """
    patterns = [(re.compile(pattern), replacement) for pattern, replacement in table]
    renamed: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for old, tensor in weights.items():
        key = old
        while (shorter := _PREFIX.sub("", key)) != key:
            key = shorter
        for pattern, replacement in patterns:
            key = pattern.sub(replacement, key)
        if _DROPPED.search(key):
            continue
        if key in renamed:
            raise WeightsError(f"{name!r} holds {key!r} twice, as {origin[key]!r} and as {old!r}.")
        renamed[key], origin[key] = _as_tokens(key, tensor), old
    return renamed


def fuse_qkv(name: str, weights: dict[str, Tensor], separate_bias: bool = False) -> dict[str, Tensor]:
    """Concatenate query, key and value in this order; a missing bias among present ones is zero.

    Args:
        name: the source, for messages.
        weights: with ``attn.query``, ``attn.key`` and ``attn.value``.
        separate_bias: keep the biases apart as ``q_bias`` and ``v_bias``; there the key has none.

    Raises:
        WeightsError: a missing weight, or a key bias where there is no place for one.
    """
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
        if key.endswith("bias") and separate_bias:
            if qkv.get("key", zeros).any():
                raise WeightsError(
                    f"{name!r} has a key bias in {key!r} that is not zero, where its timm twin has none."
                )
            fused[key.replace("qkv.bias", "q_bias")] = qkv.get("query", zeros)
            fused[key.replace("qkv.bias", "v_bias")] = qkv.get("value", zeros)
        else:
            fused[key] = torch.cat([qkv.get(part, zeros) for part in ("query", "key", "value")])
    return fused


def with_zero_biases(weights: dict[str, Tensor], *layers: str) -> dict[str, Tensor]:
    """The weights with a bias of zeros for every layer with one of these names that has none."""
    endings = tuple(f"{layer}.weight" for layer in layers)
    zeros = {k.removesuffix("weight") + "bias": v.new_zeros(len(v)) for k, v in weights.items() if k.endswith(endings)}
    return zeros | weights


def without(weights: dict[str, Tensor], prefixes: Iterable[str]) -> dict[str, Tensor]:
    """The weights whose names do not start with any of ``prefixes``."""
    return {k: v for k, v in weights.items() if not k.startswith(tuple(prefixes))}


def _as_tokens(key: str, tensor: Tensor) -> Tensor:
    """timm keeps tokens and positions as (1, tokens, channels)."""
    if key in ("cls_token", "pos_embed"):
        return tensor.reshape((1,) * (3 - tensor.ndim) + tensor.shape)
    return tensor
