"""Known errors become one sentence and an exit code; anything else is a bug and shows its traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from vit2linear.errors import Vit2LinearError


@contextmanager
def exit_codes() -> Iterator[None]:
    """Wrap a command's body. ``VIT2LINEAR_TRACEBACK=1`` shows where a known error was raised."""
    try:
        yield
    except Vit2LinearError as error:
        if os.environ.get("VIT2LINEAR_TRACEBACK"):
            raise
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None
