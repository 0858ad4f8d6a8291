"""Pictures, with matplotlib (``pip install 'vit2linear[plot]'``)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vit2linear.bench import BOUND, SOFTMAX, Measurement
from vit2linear.errors import RecipeError
from vit2linear.sizes import show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pyplot() -> Any:
    """matplotlib's pyplot on a canvas without a screen.

    Raises:
        RecipeError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise RecipeError("plots need matplotlib.", "Run pip install 'vit2linear[plot]'.") from error
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


def _lines(axis: Axes, found: list[Measurement], key: str, label: str) -> None:
    for name in dict.fromkeys(m.name for m in found):
        points = sorted(((m.size * m.width) ** 0.5, getattr(m, key)) for m in found if m.name == name)
        style = {SOFTMAX: ("black", "-"), BOUND: ("0.5", "--")}.get(name, (None, "-"))
        title = "bound (no attention core)" if name == BOUND else name
        axis.plot(*zip(*points, strict=True), color=style[0], linestyle=style[1], marker="o", markersize=4, label=title)
    sizes = sorted({((m.size * m.width) ** 0.5, show_size((m.size, m.width)), m.tokens) for m in found})
    axis.set_xscale("log", base=2)
    axis.set_xticks([x for x, _, _ in sizes], [f"{size} px\n{tokens:,} tokens" for _, size, tokens in sizes])
    axis.set_ylabel(label)
    axis.spines[["top", "right"]].set_visible(False)
