"""A scale and a threshold for queries and keys, folded into the projection that makes them.

Softmax does not see a vector that is added to all keys of a head; a kernel does. So keys are centred by their mean over
the images, which for relu, elu or a Taylor series is much nearer to softmax than the copied offset. A threshold below
zero then leaves only what stands out (softmax's rows are sharper than those of kernels), and a scale moves an operator
that bends (elu, exp) to where it bends most like softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.calibration.ridge import Step
from vit2linear.site import LinearAttention

CANDIDATES = ((1.0, 0.0), (1.0, -0.5), (0.7, 0.0), (2.0, 0.0), (4.0, -1.0))
"""Scales, and thresholds in standard deviations of the head's queries and keys."""
FIT, HELD = 3, 1
"""Batches that decide; the fit that follows reads all."""


@dataclass(frozen=True)
class HeadFit:
    """What was done to queries and (centred) keys: times ``scale``, after ``threshold`` deviations were added."""

    scale: float
    threshold: float


def fit_heads(
    site: LinearAttention, fit: list[Any], held: list[Any], propose: Callable[[list[Any], list[Any]], Step]
) -> HeadFit | None:
    """Leave in ``site.qkv`` the candidate after which ``propose`` errs least; ``None``: what was there is best.

    Args:
        site: where queries and keys come straight from one projection with a bias; others are left as they are.
        fit, held: batches on their way into the site, with ``args`` and ``kwargs``.
        propose: fits the output projection and tells its error on held-out tokens.
    """
    layer: Any = getattr(site, "qkv", None)
    plain = all(isinstance(getattr(site, n, None), nn.Identity | None) for n in ("q_norm", "k_norm"))
    heads = site.op.geometry.num_heads
    width = heads * site.op.geometry.head_dim
    if not (plain and isinstance(layer, nn.Linear) and layer.bias is not None and layer.out_features == 3 * width):
        return None
    fit, held = fit[:FIT], held[:HELD]
    q, k = _queries_and_keys(site, layer, fit)
    weight, bias = layer.weight.clone(), layer.bias.clone()
    best, error = None, propose(fit, held).error
    for fitted in (HeadFit(*c) for c in CANDIDATES):
        apply(layer, weight, bias, q, k, heads, fitted)
        found = propose(fit, held).error
        if found < error:
            best, error = fitted, found
    if best is None:
        layer.weight.copy_(weight), layer.bias.copy_(bias)
    else:
        apply(layer, weight, bias, q, k, heads, best)
    return best


def apply(
    layer: nn.Linear,
    weight: Float[Tensor, "outputs inputs"],
    bias: Float[Tensor, " outputs"],
    q: Float[Tensor, "tokens channels"],
    k: Float[Tensor, "tokens channels"],
    heads: int,
    fitted: HeadFit,
) -> None:
    """Set a fused projection from its copied ``weight`` and ``bias``; q and k are what it gave before."""
    width = q.shape[1]
    shifts = torch.cat([fitted.threshold * _deviation(q, heads), fitted.threshold * _deviation(k, heads) - k.mean(0)])
    layer.weight.copy_(weight), layer.bias.copy_(bias)
    layer.weight[: 2 * width] *= fitted.scale
    layer.bias[: 2 * width] = fitted.scale * (bias[: 2 * width] + shifts.to(bias))


def _deviation(x: Float[Tensor, "tokens channels"], heads: int) -> Float[Tensor, " channels"]:
    """Of each head, over tokens and about each channel's mean; the same for all of its channels."""
    per_head: Tensor = x.var(0, correction=0).unflatten(0, (heads, -1)).mean(1).sqrt()
    return per_head.repeat_interleave(x.shape[1] // heads)


def _queries_and_keys(site: LinearAttention, layer: nn.Linear, batches: list[Any]) -> tuple[Tensor, Tensor]:
    outputs: list[Tensor] = []
    handle = layer.register_forward_hook(lambda _, args, output: outputs.append(output.float().flatten(0, -2)))
    try:
        for batch in batches:
            site(*batch.args, **batch.kwargs)
    finally:
        handle.remove()
    q, k, _ = torch.cat(outputs).chunk(3, dim=1)
    return q, k
