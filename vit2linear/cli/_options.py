"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Data = Annotated[
    str | None,
    typer.Option(help="Images: class folders, a flat folder, tables, or a Hub data set OWNER/NAME."),
]
IgnoreLabels = Annotated[
    bool, typer.Option("--ignore-labels", help="Do not match the images' classes with the model's.")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", "-b", help="Images in a batch, over all processes.")]
Workers = Annotated[int | None, typer.Option("--workers", "-j", help="Loader processes.")]
EvalSamples = Annotated[int | None, typer.Option("--num-samples", help="Evaluate at most so many images.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]
