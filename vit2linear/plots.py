"""Pictures: of a conversion, for its card, and of a benchmark.

Figures are drawn on a canvas of their own, without a screen and without matplotlib's global state. Colours are Okabe
and Ito's, which people with any colour vision tell apart.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit2linear.bench import BOUND, SOFTMAX, Measurement
from vit2linear.sizes import show_size
from vit2linear.speed import Speed, speed_of_record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SPEED, SITES = "speed.png", "sites.png"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_WIDTH = 8.0  # inches of a card's picture, 100 pixels each where the card is 800 wide
_LABELS = 16  # at most so many sites are named on the axis


def pictures(record: Mapping[str, Any]) -> dict[str, bytes]:
    """The pictures of a conversion, file name to PNG, from its ``report.json``.

    Speed needs two sizes at least, and errors a site.
    """
    drawn = {}
    if record.get("speed") and len(record["speed"]["points"]) > 1:
        drawn[SPEED] = _png(_speed(speed_of_record(record["speed"])))
    if record["evaluation"]["site_errors"]:
        drawn[SITES] = _png(_sites(record["history"], {p["site"]["path"]: p["op"] for p in record["plan"]}))
    return drawn


def plot_bench(found: list[Measurement], title: str, path: Path) -> None:
    """Speed against softmax, and memory, over the image size."""
    with_memory = all(m.peak_mib is not None for m in found)
    figure = blank(11.0 if with_memory else 6.0, 4.2)
    axes = figure.subplots(1, 2 if with_memory else 1, squeeze=False)
    sizes = sorted({(_side((m.size, m.width)), show_size((m.size, m.width)), m.tokens) for m in found})
    for axis, key, label in zip(
        axes[0], ("against_softmax", "peak_mib"), ("speed over softmax", "peak memory of a forward, MiB"), strict=False
    ):
        for i, name in enumerate(dict.fromkeys(m.name for m in found)):
            points = sorted((_side((m.size, m.width)), getattr(m, key)) for m in found if m.name == name)
            colour, line = {SOFTMAX: ("black", "-"), BOUND: ("0.5", "--")}.get(name, (COLOURS[i % len(COLOURS)], "-"))
            shown = "bound (no attention core)" if name == BOUND else name
            axis.plot(*zip(*points, strict=True), color=colour, linestyle=line, marker="o", markersize=4, label=shown)
        _over_sizes(axis, sizes, label)
    axes[0][0].axhline(1, color="0.6", linewidth=0.8)
    if with_memory:
        axes[0][1].set_yscale("log")
    axes[0][0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def blank(width: float, height: float) -> Figure:
    """An empty figure, in inches, that keeps its parts apart."""
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _speed(speed: Speed) -> Figure:
    """Images a second of both models, and their ratio, over the image size."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure = blank(_WIDTH, 3.4)
    rates, ratio = figure.subplots(1, 2)
    x = [_side(p.size) for p in speed.points]
    for values, name, colour, marker in (
        ([p.softmax for p in speed.points], "softmax original", "black", "s"),
        ([p.student for p in speed.points], "this model", COLOURS[0], "o"),
    ):
        rates.plot(x, values, color=colour, marker=marker, label=name)
    rates.set_yscale("log")
    rates.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    rates.yaxis.set_major_formatter("{x:g}")
    rates.yaxis.set_minor_locator(NullLocator())
    rates.legend(frameon=False)
    off = [[p.speedup - p.spread[0] for p in speed.points], [p.spread[1] - p.speedup for p in speed.points]]
    ratio.errorbar(x, [p.speedup for p in speed.points], off, color=COLOURS[0], marker="o", capsize=3)
    ratio.axhline(1, color="black", linewidth=1, linestyle="--")
    for p in speed.points:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.8}
        place = (_side(p.size), max(p.speedup, p.spread[1]))
        ratio.annotate(f"{p.speedup:.2f}x", place, (0, 6), textcoords="offset points", ha="center", bbox=box)
    sizes = [(_side(p.size), show_size(p.size), p.tokens) for p in speed.points]
    _over_sizes(rates, sizes, "images / s")
    _over_sizes(ratio, sizes, "speed over softmax")
    for axis in (rates, ratio):
        axis.margins(0.15)
    ratio.set_ylim(bottom=0)
    return figure


def _sites(history: Sequence[Mapping[str, Any]], operators: Mapping[str, str]) -> Figure:
    """The error of every converted site's output, before anything was fitted and at the end."""
    figure = blank(_WIDTH, 3.4)
    axis = figure.subplots()
    first, last = history[0].get("site_errors", {}), history[-1]["site_errors"]
    paths = list(last)
    if first and len(history) > 1:
        axis.plot(
            range(len(paths)), [first[p] for p in paths], color="0.55", marker="x", linestyle=":", label="at the start"
        )
    used = list(dict.fromkeys(operators[path] for path in paths))
    axis.plot(range(len(paths)), [last[p] for p in paths], color="0.8", zorder=1)
    for i, op in enumerate(used):
        places = [n for n, path in enumerate(paths) if operators[path] == op]
        axis.plot(
            places,
            [last[paths[n]] for n in places],
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle="",
            label=f"{op}, at the end" if first and len(history) > 1 else op,
        )
    axis.set_ylim(bottom=0)
    axis.set_ylabel("error of the output\n(1: as bad as zero)")
    axis.set_xlabel("converted attention modules, from input to output")
    step = -(-len(paths) // _LABELS)
    axis.set_xticks(range(0, len(paths), step), _short(paths)[::step])
    axis.legend(frameon=False)
    _open(axis)
    return figure


def _over_sizes(axis: Axes, sizes: Sequence[tuple[float, str, int]], label: str) -> None:
    """Sizes along the axis, logarithmic, each with its tokens."""
    axis.set_xscale("log", base=2)
    axis.set_xticks([x for x, _, _ in sizes], [f"{size} px\n{tokens:,} tokens" for _, size, tokens in sizes])
    axis.xaxis.minorticks_off()
    axis.set_ylabel(label)
    _open(axis)


def _open(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)


def _short(paths: Sequence[str]) -> list[str]:
    """Paths without what they have in common: ``blocks.3.attn`` among its like is ``3``."""
    parts = [path.split(".") for path in paths]
    if len({len(p) for p in parts}) != 1:
        return list(paths)
    differing = [n for n in range(len(parts[0])) if len({p[n] for p in parts}) > 1] or [0]
    return [".".join(p[n] for n in differing) for p in parts]


def _side(size: tuple[int, int]) -> float:
    """Of the square with as many pixels."""
    return float((size[0] * size[1]) ** 0.5)


def _png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()
