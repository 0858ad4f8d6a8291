"""Building "a base architecture with operators at sites"; the timm entry point ``vit2linear``.

One path for everything: the skeleton on the meta device, the loaded source, and an artifact read back are all
``timm.create_model("vit2linear", base=..., operators=...)``. So timm does what timm does (position embeddings, heads,
channels, strict loading, features_only, export), with the operators in place before the weights are loaded.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import timm
import torch
from timm.layers import RmsNorm
from timm.models import build_model_with_cfg
from torch import nn

from vit2linear.errors import UnsupportedModelError, Vit2LinearError, WeightsError
from vit2linear.heads import with_head
from vit2linear.outline import outline
from vit2linear.probe import example_pixels
from vit2linear.resolve import layout_of
from vit2linear.sizes import Size, show_size
from vit2linear.sources._weights import check_finite, check_fit, in_float32
from vit2linear.sources.base import ModelRef, ModelSpec
from vit2linear.strict import shown
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
    head: str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """What the timm entry point does: the architecture ``base`` with operators at sites.

    Args:
        base: name of a timm architecture.
        operators: site path to ``{"op": name, "options": {...}}``.
        norm_eps: epsilon of the norms, where it is not the base's own.
        head: one of ``vit2linear.heads``, where it is not the base's own.
        kwargs: everything else goes to the base's entry point.
    """
    if not base or not timm.is_model(base):
        raise UnsupportedModelError(
            f"'base' is {shown(base)}, which timm {timm.__version__} does not know.", "Upgrade timm."
        )
    overlay = {**(kwargs.pop("pretrained_cfg_overlay", None) or {}), "architecture": "vit2linear"}
    with _building_with(operators or {}, norm_eps, head):
        model: nn.Module = timm.models.model_entrypoint(base)(
            pretrained=pretrained, pretrained_cfg_overlay=overlay, **kwargs
        )
    return model


def skeleton(spec: ModelSpec) -> nn.Module:
    """The model on the meta device: shapes and names, no memory.

    Raises:
        UnsupportedModelError: timm cannot build what the spec describes.
    """
    return outline(f"the {spec.architecture!r} that the config describes", lambda: _create(spec, pretrained=False))


def input_size(module: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width in pixels that a timm model was made for."""
    channels, height, width = example_pixels(module).shape[1:]
    return channels, height, width


@cache
def takes(architecture: str, argument: str) -> bool:
    """Whether the class of a timm architecture has a constructor's argument of that name, its own or inherited."""
    with torch.device("meta"):
        model = timm.create_model(architecture)
    return any(argument in inspect.signature(kind.__init__).parameters for kind in type(model).__mro__)  # type: ignore[misc]


def takes_size(architecture: str) -> bool:
    """Whether a timm architecture is built for an image size; the others take any image as they are."""
    return takes(architecture, "img_size")


def at_size(spec: ModelSpec, size: Size) -> ModelSpec:
    """The same model for inputs of height and width ``size`` in pixels; its notes name every weight that is resized.

    timm resizes position embeddings and relative tables while it loads them. Models that are built for no size take
    any image as they are.

    Raises:
        SourceError: the architecture cannot be built at that size.
    """
    before = skeleton(spec)
    sized = {"img_size": list(size)} if takes_size(spec.architecture) else {}
    spec = replace(
        spec,
        model_args={**spec.model_args, **sized},
        pretrained_cfg={**spec.pretrained_cfg, "input_size": [getattr(before, "in_chans", 3), *size]},
    )
    try:
        after = skeleton(spec)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(
            f"for {show_size(size)} pixels, {error.message}",
            "Choose a size that its patches and windows divide.",
        ) from error
    shapes = {key: tuple(value.shape) for key, value in before.state_dict().items()}
    resized = [
        f"{key} {'x'.join(map(str, shapes[key]))} -> {'x'.join(map(str, value.shape))}"
        for key, value in after.state_dict().items()
        if key in shapes and shapes[key] != tuple(value.shape)
    ]
    what = f"resized for it: {_some(resized)}" if resized else "nothing had to be resized"
    return replace(spec, notes=(*spec.notes, f"input of {show_size(size)} pixels; {what}"))


def load(ref: ModelRef, spec: ModelSpec) -> LoadedModel:
    """Build the source and load its weights, in float32 and eval mode.

    Raises:
        WeightsError: keys, shapes or kinds of numbers do not fit, one line that names them; or some are not finite.
    """
    expected = skeleton(spec).state_dict()
    try:
        weights, dtype = in_float32(ref.name, layout_of(ref).state_dict(ref))
        check_fit(ref.name, weights, expected)
        model = _create(spec, pretrained=True, state_dict=weights)
    except Vit2LinearError:
        raise
    except Exception as error:  # timm renames and resizes what it takes to be its own
        if isinstance(error, MemoryError) or "allocate" in str(error):
            raise
        raise WeightsError(f"the weights of {ref.name!r} do not fit its config: {_condense(str(error))}.") from error
    check_finite(ref.name, dict(model.named_parameters()))
    return LoadedModel(ref, replace(spec, dtype=dtype), model.eval())


def fresh(spec: ModelSpec, seed: int) -> nn.Module:
    """The source's architecture with weights as timm initialises them, the same for the same seed; on the CPU.

    The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _create(spec, pretrained=False).eval()


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
def _building_with(operators: dict[str, dict[str, Any]], norm_eps: float | None, head: str | None) -> Iterator[None]:
    """While open, timm models are built as ``build`` says, after their constructor and before their weights.

    timm's entry points choose class, checkpoint filter and feature config themselves and hand them to
    ``build_model_with_cfg``; that call is where the changes go in, so that everything the base knows keeps working.
    """

    def build_converted(model_cls: Callable[..., nn.Module], variant: str, pretrained: bool, **kwargs: Any) -> Any:
        if kwargs.keys().isdisjoint(("pretrained_cfg", "pretrained_cfg_overlay")):
            # A backbone that the entry point makes for the model, the ResNet of a hybrid: no site lies in it, and its
            # weights come with the model's.
            return build_model_with_cfg(model_cls, variant, False, **kwargs)

        def make(**kw: Any) -> nn.Module:
            model: nn.Module = with_head(model_cls, head)(**kw)
            for norm in model.modules():
                if norm_eps is not None and isinstance(norm, nn.LayerNorm | RmsNorm):
                    norm.eps = norm_eps
            return apply(model, operators)

        return build_model_with_cfg(make, variant, pretrained, **kwargs)

    with _patching:
        modules = [
            m
            for name, m in sys.modules.copy().items()
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
    lines = [line.strip().rstrip(".") for line in message.splitlines()[1:] if line.strip()] or [message or "no reason"]
    return "; ".join(line if len(line) < 200 else line[:200] + "..." for line in lines[:4])


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")
