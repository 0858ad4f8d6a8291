"""A converted model as a graph for other runtimes: ONNX, or a program of ``torch.export``.

The graph is checked before its file takes its place: the same outputs as torch at two batch sizes (and two image sizes,
where it takes any), and no map over pairs of tokens but where the softmax was kept.
"""

from __future__ import annotations

import importlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit2linear.artifact import Artifact, open_artifact
from vit2linear.bench import interleaved
from vit2linear.durable import file_written_aside
from vit2linear.errors import ArtifactError, RecipeError, UnknownNameError, UnsupportedModelError
from vit2linear.graphs import FORMATS, Graph
from vit2linear.maps import search
from vit2linear.model import input_size, takes, takes_size
from vit2linear.sizes import Size, show_size
from vit2linear.sources._description import first_line
from vit2linear.tracing import ONE_SIZE, neighbour, patch_of, random_pixels, trace

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSETS = range(18, 24)
"""What torch's exporter writes itself; for others it would need onnx's converter, which knows fewer nodes."""
TOLERANCE = 1e-4
"""Largest difference from torch, of outputs up to 1; of larger ones as a share of the largest."""
BATCHES = (1, 3)
"""Images in the checks; the graph is traced with two."""


@dataclass(frozen=True)
class Check:
    """One comparison with torch."""

    batch: int
    size: Size
    difference: float
    """Largest, of any entry of the output."""


@dataclass(frozen=True)
class Export:
    """What was written, and what was found of it."""

    file: str
    format: str
    opset: int | None
    """Of ONNX."""
    bytes: int
    """Of all files: weights of more than 2 GB have one of their own."""
    size: Size
    """Height and width in pixels."""
    multiple: Size | None
    """Other sizes are taken as well, in multiples of this; ``None``: no others."""
    checks: tuple[Check, ...]
    values: int
    """Values of the graph that were searched for a map over pairs of tokens."""
    maps: tuple[str, ...]
    """Modules in which there is one: those that keep the softmax, or whose operator is not linear."""
    unclear: tuple[str, ...]
    """Modules in which tokens and channels are as many, so that shapes cannot tell."""
    milliseconds: float
    """Median of one image in the exported graph, on the CPU with torch's number of threads."""
    torch_milliseconds: float
    """The same in torch, eagerly."""
    ratio: float
    """Time over torch's, median of interleaved rounds; below 1 is faster."""


def export(
    ref: str | Artifact | None = None,
    format: str = "onnx",  # noqa: A002  as the command names it
    *,
    size: Size | None = None,
    dynamic: bool = False,
    output: Path | None = None,
    opset: int | None = None,
    overwrite: bool = False,
    rounds: int = 9,
) -> Export:
    """Write a converted model as a graph that takes any number of images, in float32, and check it on the CPU.

    Args:
        ref: artifact, folder or Hub id; default: the newest artifact under the current folder.
        format: ``onnx`` or ``torch-export``.
        size: height and width in pixels; default: those of the conversion.
        dynamic: take images of other sizes too, two patches or more in height and width.
        output: the file; default: the artifact's name in the current folder.
        opset: of ONNX; default: the exporter's.
        overwrite: replace the file if it is there.
        rounds: interleaved rounds of measuring the time.

    Raises:
        RecipeError: unknown format or opset, or a package that is not installed.
        ArtifactError: the file exists or cannot be written, or there is no such artifact.
        UnsupportedModelError: the model does not take the size, cannot be exported, or its graph failed a check.
    """
    _check_request(format, opset)
    graph_type, suffix = FORMATS[format]
    artifact = ref if isinstance(ref, Artifact) else open_artifact(ref)
    name = artifact.folder.resolve().name if artifact.folder else artifact.name.partition("@")[0].rpartition("/")[2]
    file = output or Path(name + suffix)
    if file.exists() and (file.is_dir() or not overwrite):
        raise ArtifactError(f"the output {str(file)!r} exists.", "Use --overwrite for a file, or another --output.")
    model = _built(artifact, size, dynamic)
    height, width = size or input_size(model)[1:]
    patch = patch_of(model, (height, width)) if dynamic else None
    sizes = [(height, width)] if patch is None else [(height, width), neighbour((height, width), patch)]
    program = trace(model, (height, width), patch)
    try:
        with file_written_aside(file) as aside:
            graph_type.write(program, aside, opset)
            written = sum(path.stat().st_size for path in aside.parent.iterdir())
            graph = graph_type(aside)
            checks = tuple(_compare(model, graph, batch, each) for each in sizes for batch in BATCHES)
            found = search(graph, model, sizes, lambda other: _built(artifact, other, dynamic=False))
            works: dict[str, Any] = {"torch": model, "graph": graph}
            with torch.inference_mode():
                seconds = interleaved(works, random_pixels(model, 1, (height, width)), rounds)
    except OSError as error:
        raise ArtifactError(f"{str(file)!r} cannot be written: {error}.", "Choose another --output.") from error
    return Export(
        file=str(file),
        format=format,
        opset=graph.opset,
        bytes=written,
        size=(height, width),
        multiple=patch,
        checks=checks,
        values=found.values,
        maps=found.maps,
        unclear=found.unclear,
        milliseconds=statistics.median(seconds["graph"]) * 1000,
        torch_milliseconds=statistics.median(seconds["torch"]) * 1000,
        ratio=statistics.median(a / b for a, b in zip(seconds["graph"], seconds["torch"], strict=True)),
    )


def _check_request(format: str, opset: int | None) -> None:  # noqa: A002
    if format not in FORMATS:
        raise UnknownNameError("format", format, FORMATS)
    if format != "onnx":
        if opset is not None:
            raise RecipeError(f"--opset is for ONNX, and the format is {format}.")
        return
    if opset is not None and opset not in OPSETS:
        raise RecipeError(f"--opset: {opset} is not between {OPSETS[0]} and {OPSETS[-1]}.")
    missing = [name for name in PACKAGES if not _importable(name)]
    if missing:
        raise RecipeError(f"ONNX needs {', '.join(missing)}.", "Run pip install 'vit2linear[export]'.")


def _importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        return False
    return True


def _built(artifact: Artifact, size: Size | None, dynamic: bool) -> nn.Module:
    """The model at that size, for other sizes as well if ``dynamic``; proven on one image.

    Raises:
        UnsupportedModelError
    """
    base = artifact.model_args["base"]
    args: dict[str, Any] = {"img_size": size} if size is not None and takes_size(base) else {}
    if dynamic:
        if not takes(base, "dynamic_img_size"):
            raise UnsupportedModelError(f"{base} cannot be built for any size, as --dynamic needs.", ONE_SIZE)
        args["dynamic_img_size"] = True
    try:
        model = artifact.model(**args).float()
        own = size or input_size(model)[1:]
        if dynamic:
            patch_of(model, own)
        with torch.no_grad():
            output = model(random_pixels(model, 1, own))
    except (AssertionError, RuntimeError, ValueError, ArtifactError) as error:
        if size is None:
            raise
        raise UnsupportedModelError(
            f"{base} does not take images of {show_size(size)} px: {first_line(error)}.",
            "Choose a size that its patches and windows divide.",
        ) from error
    if not isinstance(output, Tensor):
        raise UnsupportedModelError(f"{base} returns a {type(output).__name__}, and only one tensor can be compared.")
    return model


def _compare(model: nn.Module, graph: Graph, batch: int, size: Size) -> Check:
    pixels = random_pixels(model, batch, size)
    with torch.no_grad():
        wanted, found = model(pixels), graph(pixels)
    difference = float((wanted - found).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(wanted.abs().max())):
        raise UnsupportedModelError(
            f"the exported graph differs from torch by {difference:.2g} for {batch} images of {show_size(size)} px; "
            "nothing was kept.",
            "Please report it, with the model's config.json.",
        )
    return Check(batch, size, difference)
