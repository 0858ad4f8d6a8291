"""Write the generated pages, docs/cli.md and docs/recipes.md, from the facts that the code holds.

Run ``python scripts/make_docs.py``; a test fails while a page is stale.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from pathlib import Path

import typer.cli
import typer.main

from vit2linear import recipe
from vit2linear.cli.main import app

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = [
    ("source", recipe.SourceOptions),
    ("[convert]", recipe.Rule),
    ("distill", recipe.DistillOptions),
    ("distill.attention", recipe.Stage),
    ("distill.feature", recipe.Stage),
    ("data", recipe.DataOptions),
    ("output", recipe.OutputOptions),
    ("run", recipe.RunOptions),
]
RECIPES_HEAD = """# Recipes

A recipe is a TOML file with everything that a conversion depends on. Flags win over the recipe, the recipe over the
defaults. Unknown keys and wrong values are errors, all reported at once. The effective recipe is written beside the
weights as `recipe.toml` and gives the same weights again.

Rules under `[[convert]]` are tried in order and the first that matches a site wins; sites that no rule matches keep
their softmax, and a rule that matches no site is an error. The folder `recipes/` holds examples.
"""


def cli_page() -> str:
    """docs/cli.md."""
    command = typer.main.get_command(app)
    context = typer.Context(command)
    page = typer.cli.get_docs_for_click(obj=command, ctx=context, name="vit2linear", title="Commands")
    return page.strip() + "\n"


def recipes_page() -> str:
    """docs/recipes.md."""
    parts = [RECIPES_HEAD]
    for section, kind in SECTIONS:
        parts.append(f"## `[{section}]`\n\n| key | type | default | meaning |\n|---|---|---|---|")
        values = _defaults(section, kind)
        texts = _attribute_docstrings(kind)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if dataclasses.is_dataclass(hints[field.name]):
                continue  # has a section of its own
            cells = [
                f"`{field.name}`",
                _type(hints[field.name]),
                _default(values[field.name]),
                texts.get(field.name, ""),
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts).strip() + "\n"


def main() -> None:
    """Write both pages."""
    (DOCS / "cli.md").write_text(cli_page(), "utf-8")
    (DOCS / "recipes.md").write_text(recipes_page(), "utf-8")


def _defaults(section: str, kind: type) -> dict[str, object]:
    default = recipe.Recipe()
    if section.startswith("["):
        return dict(vars(kind()))
    node: object = default
    for part in section.split("."):
        node = getattr(node, part)
    return dict(vars(node))


def _attribute_docstrings(kind: type) -> dict[str, str]:
    """The string literal below each annotated field."""
    (node,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for first, second in zip(node.body, node.body[1:], strict=False):
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant):
            assert isinstance(first.target, ast.Name)
            texts[first.target.id] = " ".join(str(second.value.value).split())
    return texts


def _type(hint: object) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return " or ".join(f"`{a}`" for a in typing.get_args(hint))
    names = {int: "integer", float: "number", str: "string"}
    for kind, name in names.items():
        if hint is kind or hint == kind | None:
            return name
    return "table"


def _default(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}`"
    return f"`{value}`"


if __name__ == "__main__":
    main()
