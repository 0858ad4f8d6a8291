"""Options that several commands share."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from vit2linear.errors import RecipeError

Data = Annotated[
    list[str] | None,
    typer.Option(
        help="Images: folders, .tar, .zip, .parquet, a pattern of them, or a Hub data set OWNER/NAME; repeat it to mix."
    ),
]
Split = Annotated[str | None, typer.Option("--split", help="Split of the images to learn from; default: train.")]
ValSplit = Annotated[
    str | None, typer.Option("--val-split", help="Split to judge by; default: validation or test, or 5% held out.")
]
ClassMap = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="JSON, TOML or text: which class of the model each class of the images is."),
]
Stream = Annotated[
    bool | None,
    typer.Option("--stream/--no-stream", help="Read a Hub data set while it is fetched, or fetch it first."),
]
IgnoreLabels = Annotated[
    bool, typer.Option("--ignore-labels", help="Do not match the images' classes with the model's.")
]
BatchSize = Annotated[int | None, typer.Option("--batch-size", "-b", help="Images in a batch, over all processes.")]
Workers = Annotated[int | None, typer.Option("--workers", "-j", help="Loader processes.")]
EvalSamples = Annotated[int | None, typer.Option("--num-samples", help="Evaluate at most so many images.")]
MaxBad = Annotated[
    str | None,
    typer.Option(
        "--max-bad", metavar="SHARE", help="Images that may be unreadable, such as 5% or 0.05; default 1%; 0: none."
    ),
]
Device = Annotated[str | None, typer.Option(help="auto, cpu, cuda or mps.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout and nothing else there.")]


def _go_offline(value: bool) -> bool:
    # huggingface_hub and datasets read it when they are imported, which commands do in their bodies.
    if value:
        os.environ["HF_HUB_OFFLINE"] = "1"
    return value


Offline = Annotated[
    bool,
    typer.Option(
        "--offline",
        callback=_go_offline,
        is_eager=True,
        help="Ask no network: what is cached and local folders only, as with HF_HUB_OFFLINE=1.",
    ),
]
Arch = Annotated[str | None, typer.Option(help="timm's name of the architecture, for weights without a config.")]
ImgSize = Annotated[
    str | None,
    typer.Option("--img-size", help="Input in pixels: 384, or HEIGHTxWIDTH such as 512x768.", metavar="SIZE"),
]


def one_or_many(paths: list[str] | None) -> str | list[str] | None:
    """``--data`` as in a recipe: a string where it was given once."""
    return paths[0] if paths and len(paths) == 1 else paths or None


def key_value(text: str) -> tuple[str, Any]:
    """``landmarks=9`` as a pair; the value is read as TOML, or taken as a string where it is none.

    Raises:
        RecipeError: there is no ``=``.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"--option: {text!r} is not KEY=VALUE.", "For example: --option landmarks=9.")
    try:
        return key.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value.strip()


def sites_to_keep(texts: Sequence[str]) -> tuple[int | None, list[str]]:
    """``["2", "blocks.0.attn,blocks.5.*"]`` as the number of sites to be chosen by measuring, and the globs.

    Raises:
        RecipeError: more than one number, or an empty name.
    """
    counts: list[int] = []
    globs: list[str] = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        try:
            counts.append(int(part))
        except ValueError:
            globs.append(part)
    if len(counts) > 1 or "" in globs:
        raise RecipeError(
            f"--keep-softmax: {','.join(texts)!r} is not a number of sites, nor a list of sites.",
            "For example: --keep-softmax 2, or --keep-softmax blocks.0.attn,blocks.11.attn.",
        )
    return (counts[0] if counts else None), globs


def share(text: str, option: str) -> float:
    """``1%`` or ``0.01`` as a share.

    Raises:
        RecipeError: something else, or not between 0 and 1.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if rest or not 0 <= value <= 1:
        raise RecipeError(f"{option}: {text!r} is no share of the images.", "Give 0% to 100%, or 0 to 1: 5% or 0.05.")
    return value


def numbers(text: str, option: str) -> list[int]:
    """``0,2,4`` as numbers.

    Raises:
        RecipeError: something else, or a negative number.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise RecipeError(f"{option}: {text!r} is not a list of numbers.", "For example: 0,2,4.")
    return [int(part) for part in parts]
