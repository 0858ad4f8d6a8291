"""Pictures of a conversion as PNG: curves, errors, routing, attention over photographs, single images."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vit2linear.evidence import Evidence, Example, Looks
from vit2linear.plots import pyplot
from vit2linear.routing import SiteRouting

WIDTH = 8.0
"""Inches; at 100 dots each a page shows a picture as it is."""
DPI = 100
TEACHER, STUDENT = "#0072B2", "#D55E00"
"""Blue and vermilion of Okabe and Ito, which everybody can tell apart."""


def draw(stages: Sequence[Mapping[str, Any]], evidence: Evidence | None) -> dict[str, bytes]:
    """The pictures that there is something to show in, by name; see the functions below."""
    found: dict[str, bytes] = {}
    if stages:
        found["losses"] = losses(stages)
    if evidence is not None:
        if evidence.routing:
            found["routing"] = routing_heat(evidence.routing)
        if evidence.looks:
            found["attention"] = attention(evidence.looks)
        if evidence.worst:
            found["examples"] = examples(evidence.worst, evidence.best)
    return found


def losses(stages: Sequence[Mapping[str, Any]]) -> bytes:
    """The loss of every stage over its steps; each stage minimises something else."""
    plt = pyplot()
    figure, axes = plt.subplots(1, len(stages), figsize=(WIDTH, 2.8), squeeze=False)
    for axis, stage in zip(axes[0], stages, strict=True):
        axis.plot(*zip(*stage["losses"], strict=True), color=STUDENT, linewidth=1.5)
        axis.set_title(f"stage {stage['stage']}", fontsize=10)
        axis.set_xlabel("step")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("loss")
    return _png(figure)


def site_errors(history: Sequence[Mapping[str, Any]]) -> bytes:
    """The error of every site's output at every moment."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(WIDTH, 3.2))
    moments = [moment for moment in history if moment.get("site_errors")]
    colours = plt.get_cmap("cividis")(np.linspace(0.9, 0.0, len(moments)))
    for colour, moment in zip(colours, moments, strict=True):
        values = [*moment["site_errors"].values()]
        axis.plot(range(len(values)), values, "o-", color=colour, markersize=4, label=moment["moment"])
    names = [*moments[0]["site_errors"]]
    axis.set_xticks(*_thinned(names), rotation=45, ha="right", fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("unexplained energy")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    return _png(figure)


def routing_heat(routing: Mapping[str, SiteRouting]) -> bytes:
    """Row cosine between teacher's and student's maps, sites by heads."""
    plt = pyplot()
    most = max(len(site.heads) for site in routing.values())
    values = np.full((most, len(routing)), np.nan)
    for column, site in enumerate(routing.values()):
        values[: len(site.heads), column] = [head.cosine for head in site.heads]
    height = min(6.0, 1.6 + 0.22 * most)
    figure, axis = plt.subplots(figsize=(WIDTH, height))
    image = axis.imshow(values, aspect="auto", cmap="cividis", vmin=min(0.0, float(np.nanmin(values))), vmax=1)
    axis.set_xticks(*_thinned([*routing]), rotation=45, ha="right", fontsize=8)
    axis.set_yticks(*_thinned([str(i + 1) for i in range(most)]), fontsize=8)
    axis.set_ylabel("head")
    figure.colorbar(image, label="cosine of rows", pad=0.02)
    return _png(figure)


def attention(looks: Sequence[Looks]) -> bytes:
    """Where both models look: the photograph, then for each site and the rollout teacher above student."""
    plt = pyplot()
    titles = [*looks[0].teacher]
    rows, columns = 2 * len(looks), 1 + len(titles)
    side = WIDTH / columns
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, side * rows + 0.4), squeeze=False)
    for i, look in enumerate(looks):
        for j, (who, heats) in enumerate((("teacher", look.teacher), ("student", look.student))):
            row = axes[2 * i + j]
            row[0].imshow(look.picture)
            row[0].set_ylabel(who, fontsize=9)
            for axis, title in zip(row[1:], titles, strict=True):
                _over(axis, look.picture, heats[title])
                if i == j == 0:
                    axis.set_title(title, fontsize=9)
    for axis in axes.flat:
        axis.set_xticks([])
        axis.set_yticks([])
    return _png(figure, pad=0.4)


def examples(worst: Sequence[Example], best: Sequence[Example]) -> bytes:
    """The images on which the models differ most, above, and least, below, with what both say."""
    plt = pyplot()
    columns = max(len(worst), len(best))
    side = WIDTH / columns
    figure, axes = plt.subplots(2, columns, figsize=(WIDTH, 2 * side + 1.6), squeeze=False)
    for row, name, chosen in zip(axes, ("most different", "most alike"), (worst, best), strict=True):
        for axis in row:
            axis.axis("off")
        for axis, example in zip(row, chosen, strict=False):
            axis.imshow(example.picture)
            says = [f"teacher: {example.teacher}", f"student: {example.student}"] if example.teacher else []
            title = [f"{name}, cosine {example.cosine:.3f}", *says]
            axis.set_title("\n".join(_short(line) for line in title), fontsize=8, loc="left")
    return _png(figure)


def _over(axis: Any, picture: np.ndarray, heat: np.ndarray) -> None:
    """Heat over the photograph in grey; one outstanding patch must not make the others invisible."""
    height, width = picture.shape[:2]
    box = (0, width, height, 0)
    axis.imshow(picture.mean(-1), cmap="gray", vmin=0, vmax=255, extent=box)
    axis.imshow(heat, cmap="viridis", alpha=0.6, extent=box, vmin=0, vmax=max(np.percentile(heat, 98), 1e-12))


def _thinned(names: Sequence[str]) -> tuple[list[int], list[str]]:
    """Places and labels, as many as can be read."""
    every = -(-len(names) // 24)
    return [*range(0, len(names), every)], [*names[::every]]


def _short(text: str) -> str:
    return text if len(text) <= 30 else f"{text[:29]}…"


def _png(figure: Any, pad: float = 1.08) -> bytes:
    figure.tight_layout(pad=pad)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    pyplot().close(figure)
    return file.getvalue()
