"""Speed, memory and arithmetic of softmax and linear attention against the image size.

Everything at one size runs in one interleaved loop, so that a noisy machine disturbs all models alike; what is reported
are medians and their ratios. The *bound* is the same model with the attention core skipped (projections, MLPs and norms
remain): no operator can be faster.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit2linear.context import AttentionContext
from vit2linear.errors import RecipeError
from vit2linear.operator import Operator
from vit2linear.recipe import Rule
from vit2linear.site import sites_of
from vit2linear.surgery import apply_plan, linearize, make_plan

SOFTMAX, BOUND = "softmax", "bound"


@dataclass(frozen=True)
class Job:
    """What is measured at every size: a timm architecture with random weights, under one or several operators."""

    base: str
    variants: dict[str, tuple[Rule, ...]]
    """Name to rules, as in a recipe."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the architecture, such as ``depth``."""
    batch_size: int = 1

    def model(self, name: str, size: int) -> nn.Module:
        """The architecture at ``size`` pixels as ``softmax``, ``bound`` or a variant, in eval mode."""
        source = timm.create_model("vit2linear", base=self.base, operators={}, **{**self.args, "img_size": size}).eval()
        if name == BOUND:
            return without_routing(source)
        rules = (Rule(op=SOFTMAX),) if name == SOFTMAX else self.variants[name]
        return apply_plan(source, make_plan(source, rules)).eval()


@dataclass(frozen=True)
class Measurement:
    """One model at one size."""

    size: int
    """Pixels."""
    tokens: int
    name: str
    """An operator, ``softmax`` or ``bound``."""
    images_per_second: float
    """Median."""
    against_softmax: float
    """Speed over the softmax model's, median of the rounds' ratios; above 1 is faster."""
    against_bound: float
    """Speed over the bound's; 1 is the best that an operator can do."""
    gigaflops: float
    """Of one image; a fused attention counts like its two matrix products."""
    peak_mib: float | None
    """Peak memory that one forward adds, in a fresh process (CPU) or on the device."""


class NoRouting(Operator):
    """The bound: heads = v."""

    name = BOUND
    family = "exact"
    summary = "heads = v"
    reference = ""
    carries = frozenset({"key_mask", "bias"})

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """The values, as they are."""
        return v


def parse_sizes(text: str) -> list[int]:
    """``224,512`` as numbers.

    Raises:
        RecipeError: anything else.
    """
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise RecipeError(f"--img-size: {text!r} is no list of sizes in pixels.", "Write, for example, 224,512.")
    return sizes


def without_routing(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that computes everything but the attention cores."""
    copy = linearize(model, SOFTMAX).eval()
    for site in sites_of(copy).values():
        site.op = NoRouting(site.op.geometry, None)
    return copy


def measure(job: Job, size: int, device: torch.device, rounds: int = 9, memory: bool = True) -> list[Measurement]:
    """All models of ``job`` at ``size`` pixels, interleaved over ``rounds`` after two rounds of warming up."""
    names = [SOFTMAX, *job.variants, BOUND]
    models = {name: job.model(name, size).to(device) for name in names}
    channels = models[SOFTMAX].in_chans
    pixels = torch.randn(job.batch_size, channels, size, size, device=device)  # type: ignore[call-overload]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name, model in models.items():
                took = _seconds(model, pixels)
                if turn >= 2:
                    seconds[name].append(took)
    tokens = models[SOFTMAX].patch_embed.num_patches + models[SOFTMAX].num_prefix_tokens  # type: ignore[union-attr, operator]
    del models

    def ratio(name: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    return [
        Measurement(
            size,
            int(tokens),
            name,
            job.batch_size / statistics.median(seconds[name]),
            ratio(name, SOFTMAX),
            ratio(name, BOUND),
            flops(job, name, size) / 1e9,
            peak_mib(job, name, size, device) if memory else None,
        )
        for name in names
    ]


def crossover(found: list[Measurement], name: str) -> int | None:
    """The smallest measured size from which ``name`` is faster than softmax at it and at every larger one."""
    sizes = sorted((m.size, m.against_softmax) for m in found if m.name == name)
    winning = None
    for size, speed in reversed(sizes):
        if speed <= 1:
            break
        winning = size
    return winning


def flops(job: Job, name: str, size: int) -> int:
    """Floating-point operations of one image, counted on the meta device."""
    with torch.device("meta"):
        model = job.model(name, size)
        pixels = torch.randn(1, model.in_chans, size, size)  # type: ignore[call-overload]
        with FlopCounterMode(display=False) as counter, torch.enable_grad():  # as in probe.count_flops
            model(pixels)
    return int(counter.get_total_flops())


def peak_mib(job: Job, name: str, size: int, device: torch.device) -> float:
    """Memory that one forward adds at its peak: of the device, or of a fresh process on the CPU."""
    if device.type == "cuda":
        model = job.model(name, size).to(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _forward(job, model, size, device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_peak_of_this_process, job, name, size).result()


def _peak_of_this_process(job: Job, name: str, size: int) -> float:
    model = job.model(name, size)
    # Building the model may have taken more than the forward will: Linux can start its peak over.
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
        before = _kib(status, "VmRSS")
        _forward(job, model, size, torch.device("cpu"))
        return (_kib(status, "VmHWM") - before) / 2**10
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _forward(job, model, size, torch.device("cpu"))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20  # bytes on macOS


def _kib(status: Path, key: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])


def _forward(job: Job, model: nn.Module, size: int, device: torch.device) -> None:
    with torch.inference_mode():
        model(torch.zeros(job.batch_size, int(model.in_chans), size, size, device=device))  # type: ignore[arg-type]


def _seconds(model: nn.Module, pixels: Tensor) -> float:
    start = time.perf_counter()
    model(pixels)
    if pixels.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
