"""Calibration: a better start without any training, from one closed form.

Site by site, on the student's own inputs, the attention's output projection (weight and bias) is fitted by ridge
regression in float64 to what the teacher's projection gives on the same images, so that later sites make good what
earlier ones got wrong. Two things keep it honest where images are few: the ridge pulls towards the copied weights, not
towards zero, and a fit is accepted only if the final features of the *model* come closer to the teacher's on images
that took no part in the fit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.distill.forward import Reached, run, run_until_reached
from vit2linear.errors import DataError
from vit2linear.losses import unexplained
from vit2linear.recipe import Calibration
from vit2linear.reporting import Reporter
from vit2linear.site import LinearAttention, sites_of

BATCH = 32
"""Images of one forward."""


@dataclass(frozen=True)
class SiteFit:
    """What was accepted at one site."""

    ridge: float | None
    """In units of the mean squared input; ``None``: the copied projection stayed."""
    correction: float
    """Share of the residual stream's error that the site was asked to make good."""
    error: float
    """Held-out error of the model's final features afterwards."""


@dataclass(frozen=True)
class CalibrationReport:
    """What the calibration did."""

    images: int
    held_out: int
    seconds: float
    error_before: float
    """Unexplained energy of the final features on the held-out images."""
    error_after: float
    sites: dict[str, SiteFit]


def calibrate(
    teacher: nn.Module,
    student: nn.Module,
    pixels: Float[Tensor, "images channels height width"],
    options: Calibration,
    reporter: Reporter,
) -> CalibrationReport:
    """Fit the output projections of ``student`` in place; the last fifth of the images is held out.

    Raises:
        DataError: fewer than two images, so that none could judge.
    """
    if len(pixels) < 2:
        raise DataError(f"calibration got {len(pixels)} image, and needs at least 2.", "Give more, or --calibrate 0.")
    start = time.perf_counter()
    held_out = max(1, len(pixels) // 5)
    fit, held = pixels[:-held_out].split(BATCH), pixels[-held_out:].split(BATCH)
    device = next(student.parameters()).device

    def features(model: nn.Module, images: Tensor) -> Tensor:
        """Final tokens of all branches, one row for each image."""
        tokens = run(model, images.to(device), {}).tokens
        return torch.cat([t.float().flatten(1) for t in tokens], dim=1)

    with torch.no_grad():
        targets = [features(teacher, x) for x in held]

        def error() -> float:
            found = [unexplained(features(student, x), t) * len(x) for x, t in zip(held, targets, strict=True)]
            return float(torch.stack(found).sum() / held_out)

        before = current = error()
        fits: dict[str, SiteFit] = {}
        theirs = sites_of(teacher)
        for path, site in sites_of(student).items():
            layer = getattr(site, site.kind.output, None)
            if isinstance(layer, nn.Linear):
                moments = _moments(teacher, student, path, theirs[path], site, fit)
                fits[path] = _fit(layer, moments, options, current, error)
                current = fits[path].error
                reporter.say(f"calibrated {path}: held-out error of the features {current:.4f}")
    return CalibrationReport(len(pixels) - held_out, held_out, time.perf_counter() - start, before, current, fits)


@dataclass
class _Moments:
    """Sums over tokens of what a fit needs: inputs h, residuals r = y - layer(h), stream errors d."""

    count: int
    h: Tensor
    hh: Float[Tensor, "inputs inputs"]
    r: Float[Tensor, "2 outputs"]
    hr: Float[Tensor, "2 inputs outputs"]


def _fit(
    layer: nn.Linear, moments: _Moments, options: Calibration, current: float, error: Callable[[], float]
) -> SiteFit:
    """Try every ridge and correction; leave the best in the layer, or what was there."""
    weight, bias = layer.weight.clone(), None if layer.bias is None else layer.bias.clone()
    best, kept = SiteFit(None, 0.0, current), (weight, bias)
    mean = moments.h / moments.count
    gram = moments.hh / moments.count - torch.outer(mean, mean)
    scale = gram.diagonal().mean()
    for correction in options.corrections:
        residual = (moments.r[0] + correction * moments.r[1]) / moments.count
        cross = (moments.hr[0] + correction * moments.hr[1]) / moments.count - torch.outer(mean, residual)
        for ridge in options.ridges:
            step = torch.linalg.solve(gram + ridge * scale * torch.eye(len(gram), dtype=gram.dtype), cross).T
            layer.weight.copy_(weight + step.to(weight))
            if bias is not None:
                layer.bias.copy_(bias + (residual - step @ mean).to(bias))
            found = error()
            if found < best.error:
                best = SiteFit(ridge, correction, found)
                kept = layer.weight.clone(), None if bias is None else layer.bias.clone()
    layer.weight.copy_(kept[0])
    if kept[1] is not None:
        layer.bias.copy_(kept[1])
    return best


def _moments(
    teacher: nn.Module,
    student: nn.Module,
    path: str,
    theirs: LinearAttention,
    mine: LinearAttention,
    batches: Sequence[Tensor],
) -> _Moments:
    """Run both models as far as the site, batch by batch."""
    total: _Moments | None = None
    for pixels in batches:
        target = _until(teacher, path, theirs, pixels)
        own = _until(student, path, mine, pixels)
        h, r = own.entering.double().cpu(), (target.leaving - own.leaving).double().cpu()
        d = torch.zeros_like(r)
        if own.stream is not None and target.stream is not None and own.stream.numel() == r.numel():
            d = (target.stream - own.stream).reshape(r.shape).double().cpu()
        rd = torch.stack([r, d])
        found = _Moments(len(h), h.sum(0), h.T @ h, rd.sum(1), h.T @ rd)
        total = (
            found if total is None else _Moments(*(a + b for a, b in zip(_parts(total), _parts(found), strict=True)))
        )
    assert total is not None
    return total


def _parts(moments: _Moments) -> tuple[Any, ...]:
    return moments.count, moments.h, moments.hh, moments.r, moments.hr


@dataclass
class _Seen:
    """One forward up to a site's output projection, tokens of all images in one axis."""

    entering: Tensor
    leaving: Tensor
    stream: Tensor | None


def _until(model: nn.Module, path: str, site: LinearAttention, pixels: Tensor) -> _Seen:
    """What enters and leaves the output projection, and the residual stream of the block, in units of its output."""
    stream: list[Tensor] = []
    seen: list[_Seen] = []
    block_path = path.rpartition(".")[0]
    block = model.get_submodule(block_path)
    alone = sum(p.startswith(f"{block_path}.") for p in sites_of(model)) == 1
    gain = getattr(getattr(block, "ls1", None), "gamma", getattr(block, "gamma_1", None))

    def enter(_: nn.Module, args: Any) -> None:
        if alone and args and isinstance(args[0], Tensor):
            stream.append(args[0] if gain is None else args[0] / _away_from_zero(gain))

    def leave(_: nn.Module, args: Any, output: Tensor) -> None:
        x = stream[0] if stream else None
        seen.append(_Seen(args[0].flatten(0, -2), output.flatten(0, -2), x))
        raise Reached

    hooks = [block.register_forward_pre_hook(enter), getattr(site, site.kind.output).register_forward_hook(leave)]
    try:
        run_until_reached(model, pixels.to(next(model.parameters()).device))
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0]


def _away_from_zero(gain: Tensor) -> Tensor:
    """A layer scale as a divisor."""
    return torch.where(gain < 0, -1.0, 1.0) * gain.abs().clamp_min(1e-3)
