"""``vit2linear ops`` and ``vit2linear ops show NAME``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes


def ops(
    action: Annotated[str | None, typer.Argument(help="'show', for one operator.", show_default=False)] = None,
    name: Annotated[
        str | None, typer.Argument(help="Operator, or module:Class of one of yours.", show_default=False)
    ] = None,
    json: o.Json = False,
) -> None:
    """List the operators (family, parameters, cost, map, paper), or show one: ops show NAME."""
    with exit_codes():
        from vit2linear.catalogue import facts
        from vit2linear.cli._output import print_json
        from vit2linear.errors import RecipeError
        from vit2linear.recipe import OPERATORS

        if action not in (None, "show") or (action == "show") != (name is not None):
            raise RecipeError("ops takes nothing, or 'show' and a name.", "For example: vit2linear ops show relu.")
        if name is not None:
            found = facts(name)
            if json:
                print_json(found)
            else:
                _show(found)
            return
        listed = [facts(operator) for operator in OPERATORS.names()]
        if json:
            print_json({"ops": listed})
        else:
            _list(listed)


def _list(listed: list[dict[str, Any]]) -> None:
    from vit2linear.cli._output import out, table

    columns = ["operator", "family", "new parameters", "cost of a head", "map", "paper"]
    keys = ("name", "family", "parameters", "cost", "map", "reference")
    out.print(table("Operators", columns, [[str(f[k]) for k in keys] for f in listed], left=6))


def _show(found: dict[str, Any]) -> None:
    from vit2linear.cli._output import out, table

    out.print(f"{found['name']} ({found['family']}): {found['summary']}", markup=False)
    for title, key in (("Paper", "reference"), ("New parameters", "parameters"), ("Cost", "cost"), ("Map", "map")):
        out.print(f"{title}: {found[key]}", markup=False)
    if found["notes"]:
        out.print(found["notes"], markup=False)
    rows = [[x["name"], x["type"], x["default"], x["help"]] for x in found["options"]]
    if rows:
        out.print(table("Options", ["option", "type", "default", "meaning"], rows, left=4))
