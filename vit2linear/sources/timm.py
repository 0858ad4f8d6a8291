"""The timm layout: ``config.json`` with an architecture and a pretrained_cfg, or a name of timm's registry."""

from __future__ import annotations

from typing import Any

import timm
import timm.models
from torch import Tensor

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources.base import Layout, ModelRef, ModelSpec
from vit2linear.strict import shown


class TimmLayout(Layout):
    """timm reads its own layout; this file only splits description and weights."""

    def matches(self, config: dict[str, Any]) -> bool:
        """timm writes ``architecture`` and ``pretrained_cfg``; old files only the former."""
        return "architecture" in config

    def describe(self, ref: ModelRef) -> ModelSpec:
        """From the registry for a registry name, otherwise from ``config.json``."""
        if ref.registry_name is not None:
            cfg = timm.get_pretrained_cfg(ref.registry_name).to_dict(remove_source=True)
            return ModelSpec(ref.registry_name.split(".")[0], {}, cfg)
        cfg, architecture, args = timm.models._hub._parse_model_cfg(ref.json("config.json") or {}, {})
        cfg = {k: v for k, v in cfg.items() if k not in ("file", "source", "hf_hub_id", "hf_hub_filename", "url")}
        if architecture == "vit2linear":
            raise UnsupportedModelError(
                f"{ref.name!r} is already converted by vit2linear.", "Convert the softmax model that it came from."
            )
        if not timm.is_model(str(architecture)):
            raise UnsupportedModelError(
                f"{ref.name!r} is a {shown(architecture)}, which timm {timm.__version__} does not know.",
                "Upgrade timm, or check 'architecture' in config.json.",
            )
        return ModelSpec(architecture, dict(args), {**cfg, "architecture": architecture})

    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """As stored: the architecture's own filter in timm renames what needs it."""
        return ref.weights()
