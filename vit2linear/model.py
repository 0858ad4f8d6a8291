"""Building "a base architecture with operators at sites"; the timm entry point ``vit2linear``.

One path for everything: the skeleton on the meta device, the loaded source, and an artifact read back are all
``timm.create_model("vit2linear", base=..., operators=...)``. So timm does what timm does (position embeddings, heads,
channels, strict loading, features_only, export), with the operators in place before the weights are loaded.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm
import torch
from timm.layers import LayerNorm
from timm.models import build_model_with_cfg
from torch import nn

from vit2linear.errors import UnsupportedModelError, WeightsError
from vit2linear.resolve import layout_of
from vit2linear.sources.base import ModelRef, ModelSpec
from vit2linear.surgery import apply

_patching = threading.RLock()


@dataclass(frozen=True)
class LoadedModel:
    """A source with its weights."""

    ref: ModelRef
    spec: ModelSpec
    module: nn.Module


def build(
    pretrained: bool = False,
    *,
    base: str = "",
    operators: dict[str, dict[str, Any]] | None = None,
    norm_eps: float | None = None,
    **kwargs: Any,
) -> nn.Module:
    """What the timm entry point does: the architecture ``base`` with operators at sites.

    Args:
        base: name of a timm architecture.
        operators: site path to ``{"op": name, "options": {...}}``.
        norm_eps: epsilon of the layer norms, where it is not the base's own.
        kwargs: everything else goes to the base's entry point.
    """
    if not base or not timm.is_model(base):
        raise UnsupportedModelError(
            f"'base' is {base!r}, which timm {timm.__version__} does not know.", "Upgrade timm."
        )
    if norm_eps is not None:
        kwargs["norm_layer"] = partial(LayerNorm, eps=norm_eps)
    overlay = {**(kwargs.pop("pretrained_cfg_overlay", None) or {}), "architecture": "vit2linear"}
    with _building_with(operators or {}):
        model: nn.Module = timm.models.model_entrypoint(base)(
            pretrained=pretrained, pretrained_cfg_overlay=overlay, **kwargs
        )
    return model


def skeleton(spec: ModelSpec) -> nn.Module:
    """The model on the meta device: shapes and names, no memory."""
    with torch.device("meta"):
        return _create(spec, pretrained=False)


def load(ref: ModelRef, spec: ModelSpec) -> LoadedModel:
    """Build the source and load its weights, in float32 and eval mode.

    Raises:
        WeightsError: keys or shapes do not fit, one line that names them.
    """
    weights = layout_of(ref).state_dict(ref)
    try:
        model = _create(spec, pretrained=True, state_dict=weights)
    except RuntimeError as error:
        if "state_dict" not in str(error) and "inconsistent" not in str(error):
            raise
        raise WeightsError(f"the weights of {ref.name!r} do not fit its config: {_condense(str(error))}.") from error
    return LoadedModel(ref, spec, model.eval())


def _create(spec: ModelSpec, pretrained: bool, **overlay: Any) -> nn.Module:
    # Passed as the overlay only: timm would keep a reference to the weights in the model's pretrained_cfg.
    model: nn.Module = timm.create_model(
        "vit2linear",
        pretrained=pretrained,
        pretrained_cfg=spec.pretrained_cfg,
        pretrained_cfg_overlay=overlay,
        base=spec.architecture,
        operators={},
        **spec.model_args,
    )
    model.pretrained_cfg.pop("state_dict", None)  # type: ignore[operator, union-attr]
    return model


@contextmanager
def _building_with(operators: dict[str, dict[str, Any]]) -> Iterator[None]:
    """While open, timm models are built with ``operators``, after their constructor and before their weights.

    timm's entry points choose class, checkpoint filter and feature config themselves and hand them to
    ``build_model_with_cfg``; that call is where the operators go in, so that everything the base knows keeps working.
    """

    def build_converted(model_cls: Callable[..., nn.Module], variant: str, pretrained: bool, **kwargs: Any) -> Any:
        if kwargs.keys().isdisjoint(("pretrained_cfg", "pretrained_cfg_overlay")):
            # A backbone that the entry point makes for the model, the ResNet of a hybrid: no site lies in it, and its
            # weights come with the model's.
            return build_model_with_cfg(model_cls, variant, False, **kwargs)
        return build_model_with_cfg(lambda **kw: apply(model_cls(**kw), operators), variant, pretrained, **kwargs)

    with _patching:
        modules = [
            m
            for name, m in list(sys.modules.items())
            if name.startswith("timm.models.") and getattr(m, "build_model_with_cfg", None) is build_model_with_cfg
        ]
        try:
            for module in modules:
                module.build_model_with_cfg = build_converted  # type: ignore[attr-defined]
            yield
        finally:
            for module in modules:
                module.build_model_with_cfg = build_model_with_cfg  # type: ignore[attr-defined]


def _condense(message: str) -> str:
    """Torch's multi-line report of a failed load as one line of bounded length."""
    lines = [line.strip().rstrip(".") for line in message.splitlines()[1:] if line.strip()] or [message]
    return "; ".join(line if len(line) < 200 else line[:200] + "..." for line in lines[:4])
