"""One forward of a model, with what losses and closed forms compare kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.context import AttentionContext
from vit2linear.losses import Outputs
from vit2linear.operator import Operator
from vit2linear.site import LinearAttention

Routing = tuple[Tensor, Tensor, AttentionContext]
"""Queries, keys and context of one site: what its routing map is made of."""


def run(model: nn.Module, pixels: Tensor, sites: Mapping[str, LinearAttention], maps: bool = False) -> Outputs:
    """One forward of a timm model with the outputs, and the routing maps, of ``sites`` kept."""
    outputs = Outputs()
    with _captured(sites, outputs), routing_captured(sites if maps else {}) as routed:
        features = last_features(model, pixels)
    # Not while the model runs: a block that is computed again in the backward pass would find no hooks then.
    outputs.maps = maps_of(sites, routed)
    outputs.tokens = _tokens(model, features)
    outputs.pooled = pooled_feature(model, features)
    if model.num_classes:
        outputs.logits = model.forward_head(features)  # type: ignore[operator]
    return outputs


def has_head(model: nn.Module) -> bool:
    """Whether ``forward_head`` works: timm's encoders for language models have neither it nor ``get_classifier``."""
    return hasattr(model, "get_classifier")


def last_features(model: nn.Module, pixels: Tensor) -> Any:
    """What the head reads; of an encoder without one, what it gives out."""
    return model.forward_features(pixels) if has_head(model) else model(pixels)  # type: ignore[operator]


def pooled_feature(model: nn.Module, features: Any) -> Tensor:
    """What the last layer of the head reads; of an encoder without one, the mean token."""
    if not has_head(model):
        return _tokens(model, features)[0].mean(1)
    feature: Tensor = model.forward_head(features, pre_logits=True)  # type: ignore[operator]
    return feature


def _tokens(model: nn.Module, features: Any) -> tuple[Float[Tensor, "batch _ _"], ...]:
    """The last features, one tensor of tokens for each branch of the model: mostly one."""
    branches = features if isinstance(features, list | tuple) else (features,)
    return tuple(_as_tokens(t, getattr(model, "output_fmt", "NCHW")) for t in branches)


def _as_tokens(features: Tensor, layout: str) -> Float[Tensor, "batch tokens channels"]:
    """Features as tokens, where timm leaves them as a map in the layout that the model names."""
    if features.ndim == 2:
        return features[:, None]
    if features.ndim == 3:
        return features
    return features.flatten(1, 2) if layout == "NHWC" else features.flatten(2).transpose(1, 2)


class Reached(Exception):  # noqa: N818, a signal and no error
    """Raised by a hook: what was wanted of a forward has been computed, and the rest of it is not needed."""


def run_until_reached(model: nn.Module, pixels: Tensor) -> None:
    """A forward without its head, for what hooks see of it; ends where one of them raises ``Reached``."""
    with suppress(Reached):
        last_features(model, pixels)


@contextmanager
def _captured(sites: Mapping[str, LinearAttention], outputs: Outputs) -> Iterator[None]:
    def keep(path: str) -> Any:
        def hook(module: LinearAttention, args: Any, output: Any) -> None:
            outputs.sites[path] = module.kind.answer(args[0], output)

        return hook

    hooks = [module.register_forward_hook(keep(path)) for path, module in sites.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def routing_captured(sites: Mapping[str, LinearAttention]) -> Iterator[dict[str, Routing]]:
    """Keep what every site that runs meanwhile routes by."""
    routed: dict[str, Routing] = {}

    def keep(path: str) -> Any:
        def hook(op: Operator, args: Any, _: Any) -> None:
            q, k, _, ctx = args
            routed[path] = q, k, ctx

        return hook

    hooks = [module.op.register_forward_hook(keep(path)) for path, module in sites.items()]
    try:
        yield routed
    finally:
        for hook in hooks:
            hook.remove()


def maps_of(sites: Mapping[str, LinearAttention], routed: Mapping[str, Routing]) -> dict[str, Tensor]:
    """The routing maps, by path: each (batch, heads, queries, keys)."""
    return {path: sites[path].op.map(*args) for path, args in routed.items()}
