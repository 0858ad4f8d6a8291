"""``vit2linear bench``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator

    from vit2linear.bench import Job, Measurement
    from vit2linear.sizes import Size
    from vit2linear.training_cost import Cost


def bench(
    model: Annotated[
        str | None, typer.Argument(help="Artifact: folder or Hub id; its architecture is measured.", show_default=False)
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Measure steps of training instead of forwards.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            help="timm architecture, with random weights; default: vit_base_patch16_224, for training "
            "vit_small_patch16_224."
        ),
    ] = None,
    op: Annotated[str, typer.Option(help="Operators, separated by commas.")] = "relu",
    local: Annotated[str, typer.Option(help="none, dwc3 or dwc5, beside each operator.")] = "none",
    keep_softmax: Annotated[
        str, typer.Option(metavar="K,...", help="Models with so many sites that keep the softmax, such as 0,2,4.")
    ] = "0",
    img_size: Annotated[
        str | None,
        typer.Option(help="Sizes in pixels, such as 224,512x768; default: 224,384,512,1024, for training 224."),
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Blocks to measure; default: all.")] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", "-b", min=1, help="Images in a forward; default: 1, for training 16."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; medians are reported.")] = 9,
    memory: Annotated[bool, typer.Option("--memory/--no-memory", help="Measure peak memory.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Write a picture, such as bench.png.")] = None,
    device: o.Device = None,
    offline: o.Offline = False,
    json: o.Json = False,
) -> None:
    """Measure softmax, linear and attention-free models, interleaved, against the image size.

    With --training: steps of the stages (without the optimiser's update) against the teacher's forward plus the
    student's attentions alone, forward and backward, and against plain distillation of the whole model.
    """
    with exit_codes():
        from vit2linear.bench import Job, keeping
        from vit2linear.devices import accelerator_for
        from vit2linear.errors import RecipeError
        from vit2linear.finished import bench_job
        from vit2linear.recipe import Recipe, override
        from vit2linear.sizes import parse_sizes

        sizes = parse_sizes(img_size or ("224" if training else "224,384,512,1024"))
        batch = batch_size or (16 if training else 1)
        if training and plot is not None:
            raise RecipeError("--plot draws speed against the image size.", "Leave it out with --training.")
        if model is not None:
            job = bench_job(model, batch)
        else:
            rules = {name: [{"op": name, "local": local}] for name in op.split(",")}
            variants = {name: override(Recipe(), convert=rule).convert for name, rule in rules.items()}
            name = base or ("vit_small_patch16_224" if training else "vit_base_patch16_224")
            job = Job(name, variants, {} if depth is None else {"depth": depth}, batch)
            job = keeping(job, o.numbers(keep_softmax, "--keep-softmax"))
        accelerator = accelerator_for(override(Recipe(), run__device=device or "auto"))
        if training:
            _training(job, sizes, accelerator, rounds, memory, json)
        else:
            _forwards(job, sizes, accelerator.device, rounds, memory, plot, json)


def _forwards(
    job: Job, sizes: list[Size], device: torch.device, rounds: int, memory: bool, plot: Path | None, json: bool
) -> None:
    import dataclasses

    from vit2linear.bench import crossover, measure
    from vit2linear.cli._output import err, out, print_json
    from vit2linear.plots import plot_bench, pyplot
    from vit2linear.sizes import show_size

    if plot is not None:
        pyplot()  # before the work, not after it
    found = []
    for size in sizes:
        err.print(f"{job.base} at {show_size(size)} px on {device}", markup=False)
        found += measure(job, size, device, rounds, memory)
    wins = {name: crossover(found, name) for name in job.variants}
    if plot is not None:
        plot_bench(found, f"{job.base}, batch {job.batch_size}, {device.type}", plot)
        err.print(f"Picture: {plot}", markup=False)
    if json:
        rows = [dataclasses.asdict(m) for m in found]
        print_json({"base": job.base, "device": str(device), "measurements": rows, "wins_from": wins})
        return
    out.print(_table(found))
    for name, win in wins.items():
        text = f"faster than softmax from {show_size(win)} px" if win else "not faster than softmax at the largest size"
        out.print(f"{name}: {text}", markup=False)


def _training(job: Job, sizes: list[Size], accelerator: Accelerator, rounds: int, memory: bool, json: bool) -> None:
    import dataclasses

    from vit2linear.cli._output import err, out, print_json, table
    from vit2linear.sizes import show_size
    from vit2linear.training_cost import training_cost

    found = []
    for size in sizes:
        for name in job.variants:
            title = f"{job.base} with {name} at {show_size(size)} px, steps of {job.batch_size}"
            err.print(f"{title} on {accelerator.device}", markup=False)
            costs = training_cost(job, name, size, accelerator, rounds, memory)
            found += costs
            if not json:
                rows = [
                    [c.step, c.against, _amount(c.amount, c), _amount(c.reference, c), f"{c.ratio:.3f}"] for c in costs
                ]
                out.print(table(title, ["a step of", "against", "step", "other", "ratio"], rows, left=2))
    if json:
        about = {"base": job.base, "device": str(accelerator.device), "batch_size": job.batch_size}
        print_json({**about, "costs": [dataclasses.asdict(cost) for cost in found]})


def _amount(value: float, cost: Cost) -> str:
    return f"{value:.3f} s" if cost.unit == "s" else f"{value:.0f} MiB"


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
