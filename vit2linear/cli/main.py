"""The ``vit2linear`` command; each subcommand's work is imported when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from vit2linear import __version__
from vit2linear.cli.bench import bench
from vit2linear.cli.convert import convert
from vit2linear.cli.evaluate import evaluate
from vit2linear.cli.export import export
from vit2linear.cli.inspect import inspect
from vit2linear.cli.ops import ops
from vit2linear.cli.push import push

EXIT_CODES = """Exit codes: 0 done, 1 unexpected error, 2 wrong options or recipe, 3 source not reachable, 4 model not \
supported, 5 images, 6 training, 7 output folder or artifact, 8 push, 130 interrupted."""

app = typer.Typer(
    help="Turn a pretrained Softmax Vision Transformer into a linear-attention one.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(value: bool) -> bool:
    if value:
        typer.echo(__version__)
        raise typer.Exit
    return value


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


app.command()(convert)
app.command("eval")(evaluate)
app.command()(push)
app.command()(export)
app.command()(inspect)
app.command()(bench)
app.command()(ops)


def main() -> None:
    """Console script."""
    app()
