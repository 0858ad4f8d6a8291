"""``vit2linear bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.bench import Measurement


def bench(
    model: Annotated[
        str | None, typer.Argument(help="Artifact: folder or Hub id; its architecture is measured.", show_default=False)
    ] = None,
    base: Annotated[str, typer.Option(help="timm architecture, with random weights.")] = "vit_base_patch16_224",
    op: Annotated[str, typer.Option(help="Operators, separated by commas.")] = "relu",
    local: Annotated[str, typer.Option(help="none, dwc3 or dwc5, beside each operator.")] = "none",
    img_size: Annotated[str, typer.Option(help="Image sizes in pixels, such as 224,512x768.")] = "224,384,512,1024",
    depth: Annotated[int | None, typer.Option(min=1, help="Blocks to measure; default: all.")] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images in a forward.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")] = 9,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, such as bench.png.")] = None,
    device: o.Device = None,
    json: o.Json = False,
) -> None:
    """Measure softmax, linear and attention-free models, interleaved, against the image size."""
    with exit_codes():
        import dataclasses

        from vit2linear.bench import Job, crossover, measure
        from vit2linear.cli._output import err, out, print_json
        from vit2linear.devices import device_of
        from vit2linear.finished import bench_job
        from vit2linear.plots import plot_bench, pyplot
        from vit2linear.recipe import Recipe, override
        from vit2linear.sizes import parse_sizes, show_size

        sizes = parse_sizes(img_size)
        if model is not None:
            job = bench_job(model, batch_size)
        else:
            rules = {name: [{"op": name, "local": local}] for name in op.split(",")}
            variants = {name: override(Recipe(), convert=rule).convert for name, rule in rules.items()}
            job = Job(base, variants, {} if depth is None else {"depth": depth}, batch_size)
        place = device_of(device or "auto")
        if plot is not None:
            pyplot()  # before the work, not after it
        found = []
        for size in sizes:
            err.print(f"{job.base} at {show_size(size)} px on {place}", markup=False)
            found += measure(job, size, place, rounds, memory)
        wins = {name: crossover(found, name) for name in job.variants}
        if plot is not None:
            plot_bench(found, f"{job.base}, batch {batch_size}, {place.type}", plot)
            err.print(f"Picture: {plot}", markup=False)
        if json:
            rows = [dataclasses.asdict(m) for m in found]
            print_json({"base": job.base, "device": str(place), "measurements": rows, "wins_from": wins})
            return
        out.print(_table(found))
        for name, win in wins.items():
            text = (
                f"faster than softmax from {show_size(win)} px"
                if win
                else "not faster than softmax at the largest size"
            )
            out.print(f"{name}: {text}", markup=False)


def _table(found: list[Measurement]) -> object:
    from vit2linear.cli._output import table
    from vit2linear.sizes import show_size

    rows = [
        [
            m.name,
            show_size((m.size, m.width)),
            f"{m.tokens:,}",
            f"{m.images_per_second:.2f}",
            f"{m.against_softmax:.2f}x",
            f"{m.against_bound:.3f}",
            f"{m.gigaflops:.1f}",
            "" if m.peak_mib is None else f"{m.peak_mib:.0f}",
        ]
        for m in found
    ]
    columns = ["", "px", "tokens", "images/s", "vs softmax", "of bound", "GFLOPs", "MiB"]
    return table("Medians of interleaved rounds", columns, rows)
