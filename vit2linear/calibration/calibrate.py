"""Calibration: a better start without any training, from closed forms.

All images go through both models in step, layer by layer, on the student's own inputs, so that later layers make good
what earlier ones got wrong. Two things are done at every block, each in closed form:

- Queries and keys get a scale and a threshold, which kernels such as relu need and softmax does not: keys are centred
  (softmax does not see that), and of a few scales and thresholds the one is taken from which the teacher's output is
  explained best (``heads``).
- Every linear layer that writes into the residual stream, the attention's output projection and the MLP's second
  layer, is fitted by ridge regression so that the stream returns to the teacher's (``ridge``). The ridge pulls towards
  the copied weights, not towards zero.

Each fit is chosen by images that took no part in it. All of them together are kept only if the final features of the
*model* come closer to the teacher's on those images, otherwise none is. (Judging fit by fit refuses the first ones:
layers that are not fitted yet are used to the copied weights' errors.)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.calibration.heads import HeadFit, fit_heads
from vit2linear.calibration.ridge import Step, Tokens, best_step
from vit2linear.calibration.steps import SteppedForward
from vit2linear.calibration.writers import Writer, writers_of
from vit2linear.distill.forward import last_features, run
from vit2linear.errors import DataError
from vit2linear.losses import Objective
from vit2linear.recipe import Calibration
from vit2linear.reporting import Reporter
from vit2linear.site import LinearAttention

BATCH = 32
"""Images of one forward."""
HELD_OUT = 64
"""At most so many images judge: they are few, and what they judge is one number."""
PREFIX_WEIGHT = 5.0
"""A class token or register counts as much as so many patches: there are few of them, and heads read them."""
CRITERION = Objective({"feature": 1.0})


@dataclass(frozen=True)
class LayerFit:
    """What was done at one layer."""

    ridge: float | None
    """In units of the inputs' variance; ``None``: the layer stayed as it was."""
    heads: HeadFit | None
    """Of an attention: scale and threshold of queries and keys; ``None``: those stayed."""
    unexplained: float
    """Share of what was missing at this layer that still is, on held-out tokens."""


@dataclass(frozen=True)
class CalibrationReport:
    """What the calibration did."""

    images: int
    held_out: int
    seconds: float
    error_before: float
    """The loss ``feature`` on the held-out images."""
    error_after: float
    """The same as before if the fits were refused."""
    layers: dict[str, LayerFit]
    """Empty if the fits were refused."""


def calibrate(
    teacher: nn.Module,
    student: nn.Module,
    pixels: Float[Tensor, "images channels height width"],
    options: Calibration,
    reporter: Reporter,
) -> CalibrationReport:
    """Fit ``student`` in place; the last fifth of the images, and at most ``HELD_OUT``, are held out.

    Raises:
        DataError: fewer than two images, so that none could judge.
    """
    if len(pixels) < 2:
        raise DataError(f"calibration got {len(pixels)} image, and needs at least 2.", "Give more, or --calibrate 0.")
    start = time.perf_counter()
    held_out = min(max(1, len(pixels) // 5), HELD_OUT)
    device = next(student.parameters()).device
    fit, held = pixels[:-held_out].split(BATCH), pixels[-held_out:].split(BATCH)
    with torch.no_grad():
        targets = [run(teacher, x.to(device), {}) for x in held]

        def error() -> float:
            found = [CRITERION(run(student, x.to(device), {}), t) * len(x) for x, t in zip(held, targets, strict=True)]
            return float(torch.stack(found).sum() / held_out)

        before, copied = error(), {n: p.clone() for n, p in student.named_parameters()}
        layers: dict[str, LayerFit] = {}
        with _Walk(teacher, student, [*fit, *held], device) as walk:
            for writer, batches in walk:
                done = _fit(writer, batches[: len(fit)], batches[len(fit) :], options.ridges)
                layers[writer.path] = done
                reporter.say(f"calibrated {writer.path}: {100 * (1 - done.unexplained):.0f}% of the error made good")
        after = error()
        if not after < before:
            reporter.say(f"calibration refused: held-out error of the features {before:.4f} -> {after:.4f}")
            after, layers = before, {}
            for name, parameter in student.named_parameters():
                parameter.copy_(copied[name])
    return CalibrationReport(len(pixels) - held_out, held_out, time.perf_counter() - start, before, after, layers)


@dataclass(frozen=True)
class _Batch:
    """One batch on its way into a writer."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wanted: Tensor
    """What the layer should give: the teacher's output, and what the stream lacks so far."""


def _fit(writer: Writer, fit: list[_Batch], held: list[_Batch], ridges: Sequence[float]) -> LayerFit:
    """Fit one writer in place."""

    def propose(fit: list[_Batch], held: list[_Batch]) -> Step:
        tokens = [_tokens(writer, b) for b in held]
        return best_step((_tokens(writer, b) for b in fit), tokens, ridges, writer.layer.bias is not None)

    heads = fit_heads(writer.module, fit, held, propose) if isinstance(writer.module, LinearAttention) else None
    step = propose(fit, held)
    if not step.error < step.error_without:
        return LayerFit(None, heads, 1.0)
    writer.layer.weight.add_(step.weight.to(writer.layer.weight))
    if writer.layer.bias is not None:
        writer.layer.bias.add_(step.bias.to(writer.layer.bias))
    return LayerFit(step.ridge, heads, step.error / step.error_without)


def _tokens(writer: Writer, batch: _Batch) -> Tokens:
    """What goes into the layer, and what its output lacks."""
    calls: list[tuple[Tensor, Tensor]] = []
    handle = writer.layer.register_forward_hook(lambda _, args, output: calls.append((args[0], output)))
    try:
        writer.module(*batch.args, **batch.kwargs)
    finally:
        handle.remove()
    inputs, output = (x.float() for x in calls[0])
    weight = torch.ones(inputs.shape[:-1], device=inputs.device)
    if inputs.ndim == 3:
        weight[:, : writer.prefix] = PREFIX_WEIGHT
    missing = batch.wanted.reshape(output.shape) - output
    return Tokens(inputs.flatten(0, -2), missing.flatten(0, -2), weight.flatten())


class _Walk:
    """Both models' forwards over all batches, stopped at every writer in turn."""

    def __init__(self, teacher: nn.Module, student: nn.Module, batches: list[Tensor], device: torch.device) -> None:
        self.hooks = ExitStack()
        self.writers = writers_of(student)
        for path, writer in writers_of(teacher).items():
            self._watch(writer)
            self._hook(writer.layer.register_forward_hook(_stopper(path)))
        for path, writer in self.writers.items():
            self._watch(writer)
            self._hook(writer.module.register_forward_pre_hook(_stopper(path), with_kwargs=True))
        self.forwards = [
            [SteppedForward(lambda m=m, x=x: last_features(m, x.to(device))) for x in batches]  # type: ignore[misc]
            for m in (teacher, student)
        ]

    def __enter__(self) -> _Walk:
        return self

    def __exit__(self, *_: object) -> None:
        for forward in itertools.chain(*self.forwards):
            forward.abandon()
        self.hooks.close()

    def __iter__(self) -> Iterator[tuple[Writer, list[_Batch]]]:
        theirs, mine = self.forwards
        while (stops := [f.advance() for f in mine])[0] is not None:
            writer = self.writers[stops[0][0]]
            batches = []
            for (_, args, kwargs), own, their in zip(stops, mine, theirs, strict=True):
                _, _, wanted = their.advance()
                batches.append(_Batch(args, kwargs, wanted.float() + _lacking(writer, own, their, wanted.shape)))
            yield writer, batches

    def _hook(self, handle: Any) -> None:
        self.hooks.callback(handle.remove)

    def _watch(self, writer: Writer) -> None:
        if writer.source is not None:
            self._hook(writer.source.register_forward_pre_hook(_keep_stream))


def _stopper(path: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: tuple[Any, ...], more: Any) -> None:
        forward = SteppedForward.current()
        if forward is not None:
            forward.stop((path, args, more))

    return hook


def _keep_stream(_: nn.Module, args: tuple[Any, ...]) -> None:
    forward = SteppedForward.current()
    if forward is not None and args and isinstance(args[0], Tensor):
        forward.notes["stream"] = args[0]


def _lacking(writer: Writer, mine: SteppedForward, theirs: SteppedForward, shape: torch.Size) -> Tensor | float:
    """What the student's stream lacks on arrival, in units of the layer's output; nothing if its tokens differ."""
    if writer.source is None or "stream" not in mine.notes or "stream" not in theirs.notes:
        return 0.0
    difference: Tensor = (theirs.notes["stream"] - mine.notes["stream"]).float()
    if difference.shape != shape:  # a map, or windows in another order
        return 0.0
    if writer.gain is None:
        return difference
    gain = writer.gain.float()
    return difference / torch.where(gain < 0, -1.0, 1.0) / gain.abs().clamp_min(1e-3)
