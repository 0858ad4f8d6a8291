"""``vit2linear inspect``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.inspection import Inspection


def inspect(
    source: Annotated[
        str, typer.Argument(help="demo, a Hub id, a folder or file, a timm name, hf-hub:ID or local-dir:PATH.")
    ],
    op: Annotated[str, typer.Option(help="Operator that would replace the softmax.")] = "relu",
    arch: o.Arch = None,
    img_size: o.ImgSize = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
    offline: o.Offline = False,
    json: o.Json = False,
) -> None:
    """Show what a source is, its attention sites and what converting them would do; no weight is read."""
    with exit_codes():
        from vit2linear.recipe import OPERATORS
        from vit2linear.sizes import parse_size

        OPERATORS.check(op)
        size = parse_size(img_size) if img_size is not None else None

        import dataclasses

        from vit2linear import inspection
        from vit2linear.cli._output import err, out, print_json

        found = inspection.inspect(source, op, revision=revision, arch=arch, size=size)
        if json:
            print_json(dataclasses.asdict(found))
            return
        for table in _tables(found):
            out.print(table)
        for name, words in found.losses.items():
            err.print(f"{op} cannot carry {name} ({words}): accept it with --drop {name}", markup=False)
        for name, reason in found.left_alone.items():
            err.print(f"{name} stays as it is: {reason}", markup=False)
        for note in found.notes:
            err.print(note, markup=False)
        if found.refused is not None:
            err.print(f"{op} is refused: {found.refused}", markup=False)
        else:
            err.print(f"Next: vit2linear convert {source} --op {op}{_flags(found)} --dry-run", markup=False)


def _flags(found: Inspection) -> str:
    return "".join(f" --drop {name}" for name in found.losses)


def _tables(found: Inspection) -> list[object]:
    from vit2linear.cli._output import sites_table, table
    from vit2linear.licence import words

    after = "" if found.flops is None else f" -> {found.flops / 1e9:.2f} ({found.flops / found.flops_before:.2f}x)"
    rows = [
        ["layout", found.layout],
        ["architecture", found.architecture],
        ["commit", found.commit or ""],
        ["licence", words(found.licence)],
        ["parameters", f"{found.parameters:,}"],
        ["classes", str(found.num_classes) if found.num_classes else "none, a backbone"],
        ["input", "x".join(map(str, found.input_size))],
        ["GFLOPs of an image", f"{found.flops_before / 1e9:.2f}{after}"],
    ]
    return [table("", ["source", found.source], rows, left=2), sites_table("Sites", found.sites)]
