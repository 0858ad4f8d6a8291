"""Weights that no config describes, as their authors published them: timm's own reader of the stated architecture."""

from __future__ import annotations

from typing import Any

import timm
from torch import Tensor

from vit2linear.sources.base import Layout, ModelRef, ModelSpec


class OriginalLayout(Layout):
    """DINOv2, DINOv3, CLIP, EVA, MAE, Swin, ... files: timm's architecture renames what needs it while loading."""

    def matches(self, config: dict[str, Any]) -> bool:
        """Never: only the user can say which architecture it is."""
        return False

    def describe(self, ref: ModelRef) -> ModelSpec:
        """What timm's registry says about the architecture; classes are counted in a local file."""
        assert ref.arch is not None
        cfg = timm.get_pretrained_cfg(ref.arch).to_dict(remove_source=True)
        if "." not in ref.arch:
            cfg.pop("license", None)  # of whatever weights timm has by default, which need not be these
        if ref.repo is None:
            cfg["num_classes"] = _count_classes(ref.weights(), cfg)
        note = f"preprocessing and input size of timm's {cfg['architecture']}.{cfg['tag']}".removesuffix(".")
        return ModelSpec(ref.arch.split(".")[0], {}, cfg, (note,))

    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """As stored."""
        return ref.weights()


def _count_classes(weights: dict[str, Tensor], cfg: dict[str, Any]) -> int:
    """Rows of the classifier, or of CLIP's projection; 0 without either."""
    classifier = cfg["classifier"] or "head"
    head = classifier if isinstance(classifier, str) else classifier[0]
    if "visual.proj" in weights:
        return weights["visual.proj"].shape[1]
    names = (f"{head}.weight", f"{head.split('.')[0]}.weight", "head.projection.weight", "visual.head.proj.weight")
    found = next((weights[name] for name in names if name in weights), None)
    return 0 if found is None else found.shape[0]
