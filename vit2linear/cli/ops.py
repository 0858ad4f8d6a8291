"""``vit2linear ops`` and ``vit2linear ops show NAME``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

app = typer.Typer(help="List the operators, or show one.", invoke_without_command=True)


@app.callback()
def ops(ctx: typer.Context, json: o.Json = False) -> None:
    """List the operators: family, parameters, cost, routing map, paper."""
    if ctx.invoked_subcommand is not None:
        return
    with exit_codes():
        from vit2linear.catalogue import facts
        from vit2linear.cli._output import out, print_json, table
        from vit2linear.recipe import OPERATORS

        found = [facts(name) for name in OPERATORS.names()]
        if json:
            print_json({"ops": found})
            return
        columns = ["operator", "family", "new parameters", "cost of a head", "map", "paper"]
        rows = [[f["name"], f["family"], f["parameters"], f["cost"], f["map"], f["reference"]] for f in found]
        out.print(table("Operators", columns, rows, left=6))


@app.command()
def show(
    name: Annotated[str, typer.Argument(help="Operator, or module:Class of one of yours.")],
    json: o.Json = False,
) -> None:
    """Formula, options and notes of one operator."""
    with exit_codes():
        from vit2linear.catalogue import facts
        from vit2linear.cli._output import out, print_json, table

        found: dict[str, Any] = facts(name)
        if json:
            print_json(found)
            return
        out.print(f"{found['name']} ({found['family']}): {found['summary']}", markup=False)
        for title, key in (("Paper", "reference"), ("New parameters", "parameters"), ("Cost", "cost"), ("Map", "map")):
            out.print(f"{title}: {found[key]}", markup=False)
        if found["notes"]:
            out.print(found["notes"], markup=False)
        rows = [[x["name"], x["type"], x["default"], x["help"]] for x in found["options"]]
        if rows:
            out.print(table("Options", ["option", "type", "default", "meaning"], rows, left=4))
