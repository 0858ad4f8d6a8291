"""Pictures of speed against the image size."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit2linear.bench import BOUND, SOFTMAX, Measurement
from vit2linear.sizes import Size, show_size
from vit2linear.speed import Speed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STUDENT = "#0072B2"  # blue of Okabe and Ito, which everybody can tell from black


def pyplot() -> Any:
    """matplotlib's pyplot on a canvas without a screen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def plot_bench(found: list[Measurement], title: str, path: Path) -> None:
    """Speed against softmax, and memory, over the image size."""
    plt = pyplot()
    with_memory = all(m.peak_mib is not None for m in found)
    figure, axes = plt.subplots(1, 2 if with_memory else 1, figsize=(11 if with_memory else 6, 4.2), squeeze=False)
    _lines(axes[0][0], found, "against_softmax", "speed over softmax")
    axes[0][0].axhline(1, color="0.6", linewidth=0.8)
    if with_memory:
        _lines(axes[0][1], found, "peak_mib", "peak memory of a forward, MiB")
        axes[0][1].set_yscale("log")
    axes[0][0].legend(frameon=False)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_speed(speed: Speed) -> bytes:
    """Images a second of both models, and their ratio with its quartiles, over the image size; a PNG."""
    plt = pyplot()
    figure, (rates, ratio) = plt.subplots(1, 2, figsize=(8, 3.4))
    x = [_side(p.size) for p in speed.points]
    rates.plot(x, [p.softmax for p in speed.points], color="black", marker="s", label="softmax original")
    rates.plot(x, [p.student for p in speed.points], color=_STUDENT, marker="o", label="this model")
    rates.set_yscale("log")
    rates.yaxis.set_major_locator(plt.LogLocator(subs=(1, 2, 5)))
    rates.yaxis.set_major_formatter("{x:g}")
    rates.yaxis.set_minor_locator(plt.NullLocator())
    rates.legend(frameon=False)
    off = [[p.speedup - p.spread[0] for p in speed.points], [p.spread[1] - p.speedup for p in speed.points]]
    ratio.errorbar(x, [p.speedup for p in speed.points], off, color=_STUDENT, marker="o", capsize=3)
    ratio.axhline(1, color="black", linewidth=1, linestyle="--")
    for p in speed.points:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        place = (_side(p.size), p.spread[1])
        ratio.annotate(f"{p.speedup:.2f}x", place, (0, 6), textcoords="offset points", ha="center", bbox=box)
    sizes = [(p.size, p.tokens) for p in speed.points]
    for axis, label in ((rates, "images / s"), (ratio, "speed over softmax")):
        axis.margins(0.15)
        _over_sizes(axis, sizes, label)
    ratio.set_ylim(bottom=0)
    figure.tight_layout()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150, metadata={"Software": None})
    plt.close(figure)
    return file.getvalue()


def _lines(axis: Axes, found: list[Measurement], key: str, label: str) -> None:
    for name in dict.fromkeys(m.name for m in found):
        points = sorted((_side((m.size, m.width)), getattr(m, key)) for m in found if m.name == name)
        style = {SOFTMAX: ("black", "-"), BOUND: ("0.5", "--")}.get(name, (None, "-"))
        title = "bound (no attention core)" if name == BOUND else name
        axis.plot(*zip(*points, strict=True), color=style[0], linestyle=style[1], marker="o", markersize=4, label=title)
    _over_sizes(axis, sorted({((m.size, m.width), m.tokens) for m in found}), label)


def _over_sizes(axis: Axes, sizes: Sequence[tuple[Size, int]], label: str) -> None:
    """Sizes along the axis, logarithmic, each with its tokens."""
    axis.set_xscale("log", base=2)
    axis.set_xticks([_side(s) for s, _ in sizes], [f"{show_size(s)} px\n{tokens:,} tokens" for s, tokens in sizes])
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)


def _side(size: Size) -> float:
    """Of the square with as many pixels."""
    return float((size[0] * size[1]) ** 0.5)
