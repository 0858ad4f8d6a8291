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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import timm
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vit2linear.context import AttentionContext
from vit2linear.errors import RecipeError
from vit2linear.model import takes_size
from vit2linear.operator import Operator
from vit2linear.plan import find_sites, make_plan
from vit2linear.recipe import KEEP, Rule
from vit2linear.site import sites_of
from vit2linear.sizes import Size
from vit2linear.surgery import apply_plan, linearize

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

    def model(self, name: str, size: Size) -> nn.Module:
        """The architecture at ``size`` pixels as ``softmax``, ``bound`` or a variant, in eval mode."""
        args = {**self.args, **({"img_size": size} if takes_size(self.base) else {})}
        source = timm.create_model("vit2linear", base=self.base, operators={}, **args).eval()
        if name == BOUND:
            return without_routing(source)
        rules = (Rule(op=SOFTMAX),) if name == SOFTMAX else self.variants[name]
        return apply_plan(source, make_plan(source, rules)).eval()


def keeping(job: Job, counts: Sequence[int]) -> Job:
    """Every variant once for each of ``counts``: with so many sites that keep the softmax, the first ones.

    Which ones they are makes no difference to the speed of a plain ViT, whose sites are all alike.

    Raises:
        RecipeError: more sites than there are.
    """
    with torch.device("meta"):
        source = timm.create_model("vit2linear", base=job.base, operators={}, **job.args)
    paths = [site.path for site in find_sites(source)]
    if max(counts) >= len(paths):
        raise RecipeError(f"{max(counts)} sites are to keep the softmax, and {job.base} has {len(paths)}.")
    variants = {
        f"{name}, {count} kept" if count else name: (*(Rule(op=KEEP, sites=p) for p in paths[:count]), *rules)
        for name, rules in job.variants.items()
        for count in counts
    }
    return replace(job, variants=variants)


@dataclass(frozen=True)
class Measurement:
    """One model at one size."""

    size: int
    """Height in pixels."""
    width: int
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
    carries = frozenset({"key_mask", "bias", "head_mix", "pooling"})

    def forward(
        self,
        q: Float[Tensor, "batch heads queries head_dim"],
        k: Float[Tensor, "batch heads keys head_dim"],
        v: Float[Tensor, "batch heads keys value_dim"],
        ctx: AttentionContext,
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """The values, as they are; their mean, where the queries are other tokens."""
        return v if q.shape[-2] == v.shape[-2] else v.mean(-2, keepdim=True).expand(*q.shape[:-1], -1)


def without_routing(model: nn.Module) -> nn.Module:
    """A copy of ``model`` that computes everything but the attention cores."""
    copy = linearize(model, SOFTMAX).eval()
    for site in sites_of(copy).values():
        site.op = NoRouting(site.op.geometry, None)
    return copy


def measure(job: Job, size: Size, device: torch.device, rounds: int = 9, memory: bool = True) -> list[Measurement]:
    """All models of ``job`` at ``size`` pixels, interleaved over ``rounds`` after two rounds of warming up."""
    names = [SOFTMAX, *job.variants, BOUND]
    models = {name: job.model(name, size).to(device) for name in names}
    channels = models[SOFTMAX].in_chans
    pixels = torch.randn(job.batch_size, channels, *size, device=device)  # type: ignore[call-overload]
    with torch.inference_mode():
        seconds = interleaved(models, pixels, rounds)
    del models
    tokens = most_tokens(job, size)

    def ratio(name: str, other: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[other], strict=True))

    return [
        Measurement(
            *size,
            tokens,
            name,
            job.batch_size / statistics.median(seconds[name]),
            ratio(name, SOFTMAX),
            ratio(name, BOUND),
            flops(job, name, size) / 1e9,
            peak_mib(job, name, size, device) if memory else None,
        )
        for name in names
    ]


def crossover(found: list[Measurement], name: str) -> Size | None:
    """The smallest measured size from which ``name`` is faster than softmax at it and at every larger one."""
    winning = None
    for m in sorted((m for m in found if m.name == name), key=lambda m: m.size * m.width, reverse=True):
        if m.against_softmax <= 1:
            break
        winning = m.size, m.width
    return winning


def most_tokens(job: Job, size: Size) -> int:
    """Keys of the site that has most of them, in one image or window."""
    with torch.device("meta"):
        model = job.model(SOFTMAX, size)
    with torch.no_grad():
        return most_keys(model, torch.empty(1, int(model.in_chans), *size, device="meta"))  # type: ignore[arg-type]


def most_keys(model: nn.Module, pixels: Float[Tensor, "images channels height width"]) -> int:
    """Keys of the site of ``model`` that has most of them, seen in a forward of ``pixels``."""
    seen = [0]
    hooks = [
        site.op.register_forward_pre_hook(lambda _, args: seen.append(args[1].shape[-2]))
        for site in sites_of(model).values()
    ]
    model(pixels)
    for hook in hooks:
        hook.remove()
    return max(seen)


def flops(job: Job, name: str, size: Size) -> int:
    """Floating-point operations of one image, counted on the meta device."""
    with torch.device("meta"):
        model = job.model(name, size)
        pixels = torch.randn(1, model.in_chans, *size)  # type: ignore[call-overload]
        with FlopCounterMode(display=False) as counter, torch.enable_grad():  # as in probe.count_flops
            model(pixels)
    return int(counter.get_total_flops())


def peak_mib(job: Job, name: str, size: Size, device: torch.device) -> float:
    """Memory that one forward adds at its peak: of the device, or of a fresh process on the CPU."""
    if device.type == "cuda":
        return _peak_of_forward(job, name, size, device)
    return in_fresh_process(_peak_of_forward, job, name, size, torch.device("cpu"))


def in_fresh_process(measure: Callable[..., float], *args: Any) -> float:
    """What ``measure(*args)`` finds in a process that has done nothing before; both must be picklable."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *args).result()


def added_mib(work: Callable[[], object], device: torch.device) -> float:
    """MiB that ``work`` adds at its peak: to the device, or to this process (CPU), which should be a fresh one."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    # What came before (building models) may have taken more than the work will: Linux can start its peak over.
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")
        resident = _kib(status, "VmRSS")
        work()
        return (_kib(status, "VmHWM") - resident) / 2**10
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    work()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident) / 2**20  # bytes on macOS


def interleaved(
    works: Mapping[str, Callable[[Tensor], object]], pixels: Tensor, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Seconds of every work in every round, one after the other, after rounds of warming up that do not count."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(warmup + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work(pixels)
            if pixels.is_cuda:
                torch.cuda.synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _peak_of_forward(job: Job, name: str, size: Size, device: torch.device) -> float:
    model = job.model(name, size).to(device)
    pixels = torch.zeros(job.batch_size, int(model.in_chans), *size, device=device)  # type: ignore[arg-type]
    with torch.inference_mode():
        return added_mib(lambda: model(pixels), device)


def _kib(status: Path, key: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1])
