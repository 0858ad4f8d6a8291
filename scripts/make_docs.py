"""Write the generated pages, docs/cli.md, docs/operators.md and docs/recipes.md, from the facts that the code holds.

Run ``python scripts/make_docs.py``; a test fails while a page is stale.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import typer.cli
import typer.main

from vit2linear import recipe
from vit2linear.catalogue import attribute_docstrings, facts, type_name
from vit2linear.cli.main import app
from vit2linear.distill.stages import TASKS
from vit2linear.losses import LOSSES

DOCS = Path(__file__).parents[1] / "docs"
SECTIONS = [
    ("", recipe.Recipe),
    ("source", recipe.SourceOptions),
    ("[convert]", recipe.Rule),
    ("distill", recipe.DistillOptions),
    ("distill.calibration", recipe.Calibration),
    ("distill.attention", recipe.Stage),
    ("distill.feature", recipe.Stage),
    ("distill.task", recipe.Stage),
    ("data", recipe.DataOptions),
    ("output", recipe.OutputOptions),
    ("run", recipe.RunOptions),
]
OPERATORS_HEAD = """# Operators

What can stand in place of the softmax. New parameters are those of one ViT-B attention module with default options;
costs are multiplications of one head for N tokens of width d. `map` says whether the heads are a matrix of tokens by
tokens times v. A kernel operator is evaluated in linear order, or in quadratic order where that costs less (few
tokens); `vit2linear convert --dry-run` names the order for every site, and `vit2linear bench` measures it.

Every operator takes the modifiers `--local dwc3` or `--local dwc5` (a depthwise convolution of the values on the patch
grid, added to the patch rows, zero-initialised so that it is inert at first) and `--center-keys` (subtracts the mean
key, which softmax does not see). Options go into a recipe: `options = { ... }` under `[[convert]]`.
"""
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
        title = f"`[{section}]`" if section else "Before the first section"
        parts.append(f"## {title}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        values = _defaults(section, kind)
        texts = attribute_docstrings(kind)
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if dataclasses.is_dataclass(hints[field.name]) or field.name == "convert":
                continue  # has a section of its own
            cells = [
                f"`{field.name}`",
                _type(hints[field.name]),
                _default(values[field.name]),
                texts.get(field.name, ""),
            ]
            parts.append(f"| {' | '.join(cells)} |")
        parts.append("")
    parts.append("## Losses\n\n| loss | stages | meaning |\n|---|---|---|")
    for name, loss in LOSSES.items():
        stages = [f"`{stage}`" for stage, task in TASKS.items() if loss.needs <= task.fields]
        parts.append(f"| `{name}` | {', '.join(stages)} | {' '.join((loss.function.__doc__ or '').split())} |")
    return "\n".join(parts).strip() + "\n"


def operators_page() -> str:
    """docs/operators.md."""
    found = [facts(name) for name in recipe.OPERATORS.names()]
    parts = [
        OPERATORS_HEAD,
        "| operator | family | new parameters | cost of a head | map | paper |\n|---|---|---|---|---|---|",
    ]
    for f in found:
        cells = [
            f"[`{f['name']}`](#{f['name']})",
            *(f[k] for k in ("family", "parameters", "cost", "map", "reference")),
        ]
        parts.append(f"| {' | '.join(cells)} |")
    for f in found:
        text = f"\n## {f['name']}\n\n`{f['summary']}`\n\n{f['reference']}. {f['notes']}".rstrip()
        parts.append(text)
        if f["options"]:
            parts.append("\n| option | type | default | meaning |\n|---|---|---|---|")
            rows = ([f"`{x['name']}`", x["type"], f"`{x['default']}`", x["help"]] for x in f["options"])
            parts += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(parts).strip() + "\n"


def main() -> None:
    """Write the pages."""
    (DOCS / "operators.md").write_text(operators_page(), "utf-8")
    (DOCS / "cli.md").write_text(cli_page(), "utf-8")
    (DOCS / "recipes.md").write_text(recipes_page(), "utf-8")


def _defaults(section: str, kind: type) -> dict[str, object]:
    default = recipe.Recipe()
    if section.startswith("["):
        return dict(vars(kind()))
    node: object = default
    for part in filter(None, section.split(".")):
        node = getattr(node, part)
    return dict(vars(node))


def _type(hint: object) -> str:
    return type_name(hint).replace("'", "`")


def _default(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, dict):
        return "`{" + ", ".join(f"{k} = {v}" for k, v in value.items()) + "}`"
    return f"`{list(value) if isinstance(value, tuple) else value}`"


if __name__ == "__main__":
    main()
