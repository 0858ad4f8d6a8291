"""``vit2linear export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.export import Export


def export(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Artifact: folder or Hub id; default: the newest under the current folder.", show_default=False
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="onnx or torch-export.")] = "onnx",  # noqa: A002  the option's name
    img_size: o.ImgSize = None,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Take images of other sizes too, in whole patches.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="File; default: the artifact's name, with .onnx or .pt2.", show_default=False
        ),
    ] = None,
    opset: Annotated[int | None, typer.Option(help="ONNX opset, 18 to 23; default: the exporter's.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    json: o.Json = False,
) -> None:
    """Write the model as a graph for other runtimes, any number of images at a time, and check it against torch."""
    with exit_codes():
        from vit2linear.sizes import parse_size

        size = parse_size(img_size) if img_size is not None else None

        import dataclasses

        from vit2linear.cli._output import out, print_json
        from vit2linear.export import export as write

        made = write(model, format, size=size, dynamic=dynamic, output=output, opset=opset, overwrite=overwrite)
        if json:
            print_json(dataclasses.asdict(made))
            return
        for line in _lines(made):
            out.print(line, markup=False)


def _lines(made: Export) -> list[str]:
    from vit2linear.sizes import show_size

    sizes = sorted({check.size for check in made.checks})
    batches = sorted({check.batch for check in made.checks})
    largest = max(check.difference for check in made.checks)
    others = f" and other multiples of {show_size(made.multiple)}" if made.multiple else ""
    opset = f", opset {made.opset}" if made.opset else ""
    where = f"only at {', '.join(made.maps)}" if made.maps else "none"
    where += f"; not to be told from channels at {', '.join(made.unclear)}" if made.unclear else ""
    return [
        f"{made.file}: {made.bytes / 2**20:.1f} MiB{opset}, any number of images of {show_size(made.size)} px{others}",
        f"largest difference from torch: {largest:.2g} (batches of {' and '.join(map(str, batches))}, "
        f"{' and '.join(map(show_size, sizes))} px)",
        f"maps over pairs of tokens among {made.values} values: {where}",
        f"one image: {made.milliseconds:.2f} ms, in torch {made.torch_milliseconds:.2f} ms, ratio {made.ratio:.2f}",
    ]
