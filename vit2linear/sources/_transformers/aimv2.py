"""The vision tower of ``aimv2``: RMS norms, SwiGLU, no biases."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers import build_sincos2d_pos_embed
from torch import Tensor

from vit2linear.sources._transformers import _keys
from vit2linear.sources._transformers.family import COMMON
from vit2linear.sources._transformers.vit import PlainViT


class Aimv2(PlainViT):
    """No class token; pooled by an attention of its own where the checkpoint has that, then projected in two towers."""

    model_types: ClassVar[dict[str, dict[str, Any]]] = {"aimv2": {}, "aimv2_vision_model": {}}
    defaults: ClassVar[dict[str, Any]] = {
        **COMMON,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "patch_size": 14,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "qkv_bias": False,
        "mlp_bias": False,
        "use_head": True,
        "is_native": False,
    }
    processor: ClassVar[dict[str, Any]] = {"image_processor_type": "CLIPImageProcessor"}
    renames: ClassVar[_keys.Table] = (
        (r"^embeddings\.rms_norm\.", "patch_embed.norm."),
        (r"\.ffn\.gate_proj\.", ".mlp.fc1_g."),
        (r"\.ffn\.up_proj\.", ".mlp.fc1_x."),
        (r"\.ffn\.down_proj\.", ".mlp.fc2."),
        (r"^head\.cls_token$", "attn_pool.query"),
        (r"^head\.([kv])_proj\.", r"attn_pool.\1."),
        (r"^head\.output_proj\.", "attn_pool.proj."),
        (r"^visual_projection\.", "head."),
        *_keys.PLAIN,
    )

    @property
    def architecture(self) -> str:
        """timm's own AIMv2; the arguments say the size."""
        return "aimv2_large_patch14_224"

    def args(self) -> dict[str, Any]:
        """``proj_bias`` is timm's switch for the biases of the MLP as well."""
        self.activation("silu")
        args = super().args() | {"norm_eps": float(self.values["rms_norm_eps"]), "proj_bias": self._biases}
        return args | ({"head": "aimv2"} if self.values["use_head"] else {})

    @property
    def num_classes(self) -> int:
        """Two towers meet after a projection."""
        return int(self.top.get("projection_dim") or 512) if self._projected else 0

    @property
    def notes(self) -> tuple[str, ...]:
        """That outputs are not classes."""
        if not self._projected:
            return ()
        return (f"the {self.num_classes} outputs are the projection into the space shared with text, not classes",)

    def convert(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Biases that the checkpoint lacks are zero; its native positions are a formula."""
        converted = super().convert(weights)
        layers = ["attn.proj", "mlp.fc1_g", "mlp.fc1_x", "mlp.fc2"] if self._biases else []
        layers += ["head"] if self._projected else []
        if layers:
            converted = _keys.with_zero_biases(converted, *layers)
        if self.values["is_native"]:
            grid = [self.side("image_size") // self.side("patch_size")] * 2
            width = int(self.values["hidden_size"])
            positions = build_sincos2d_pos_embed(grid, width, interleave_sin_cos=True)
            converted["pos_embed"] = positions.roll(width // 2, -1)[None]  # columns before rows, as in MAE
        return converted

    @property
    def _biases(self) -> bool:
        return bool(self.values["qkv_bias"] or self.values["mlp_bias"])

    @property
    def _projected(self) -> bool:
        return self.model_type == "aimv2" and not self.is_class("VisionModel")
