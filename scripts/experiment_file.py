"""An experiment file: a recipe, and the cells of a table that change something of it.

::

    title = "The ladder"
    text = "What it shows."          # optional; goes above the table
    seeds = [0, 1, 2]                # default [0]
    select = "data/fashion-mnist"    # images to learn from, and others to choose by: the recipe's data.path
    test = "data/fashion-mnist-test" # images to report, which choose nothing
    metrics = ["top1", "speedup"]    # default ["top1"]
    plot = true                      # also draw the score against the steps, one line for each row

    [base.source]                    # the recipe that all cells share
    model = "demo"

    [[column]]                       # optional: each cell is run once for each of them
    name = "relu"                    # column = "...": label; default: the name
    convert = [{ op = "relu" }]

    [[cell]]
    name = "local"                   # unique
    row = "both stages, local"       # label; default: the name
    columns = ["relu"]               # optional: only for these; without [[column]]: column = "relu", a label
    convert.0.local = "dwc3"         # changes: keys of a recipe, rules of [[convert]] by their number
    distill.attention.share = 0.5

A cell's changes win over its column's, and those over the base. Environment variables in the paths of the source and
the images (``$NAME``) are expanded when a cell runs, and never written into a result.
"""

from __future__ import annotations

import dataclasses
import os
import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vit2linear.errors import RecipeError
from vit2linear.recipe import Recipe, Rule, override
from vit2linear.strict import build

METRICS = ("top1", "knn", "probe", "agreement", "feature_cosine", "speedup")


@dataclass(frozen=True)
class Cell:
    """One entry of the table."""

    name: str
    row: str
    column: str
    recipe: Recipe

    def seeded(self, seed: int) -> Recipe:
        """Its recipe at one seed."""
        return override(self.recipe, run__seed=seed)


@dataclass(frozen=True)
class Experiment:
    """A table to be."""

    name: str
    """Of the file, without its ending: names the folder of results."""
    title: str
    text: str
    seeds: tuple[int, ...]
    test: str | None
    metrics: tuple[str, ...]
    plot: bool
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class _Text:
    """The file as it is written."""

    title: str = ""
    text: str = ""
    seeds: tuple[int, ...] = (0,)
    select: str | None = None
    test: str | None = None
    metrics: tuple[str, ...] = ("top1",)
    plot: bool = False
    base: dict[str, Any] = field(default_factory=dict)
    column: tuple[dict[str, Any], ...] = ()
    cell: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class _Label:
    """What a ``[[cell]]`` or ``[[column]]`` says besides its changes."""

    name: str = ""
    row: str | None = None
    column: str = ""
    columns: tuple[str, ...] | None = None


def read_experiment(path: Path) -> Experiment:
    """The experiment in a TOML file.

    Raises:
        RecipeError: not readable, unknown keys, wrong values, names that are not unique.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"cannot read the experiment {str(path)!r}: {error}.") from error
    text = build(_Text, table, _Text(), str(path))
    if unknown := set(text.metrics) - set(METRICS):
        raise RecipeError(f"{path}: metrics: {', '.join(sorted(unknown))}: unknown.", f"Known: {', '.join(METRICS)}.")
    base = changed(override(Recipe(), data__path=text.select), text.base, f"{path}: base")
    columns, titles = {}, {}
    for i, entry in enumerate(text.column):
        label, changes = _split(entry, f"{path}: column.{i}")
        columns[label.name] = changed(base, changes, f"{path}: column {label.name!r}")
        titles[label.name] = label.column or label.name
    cells: list[Cell] = []
    for i, entry in enumerate(text.cell):
        label, changes = _split(entry, f"{path}: cell.{i}")
        where, row = f"{path}: cell {label.name!r}", label.row or label.name
        if not columns:
            cells.append(Cell(label.name, row, label.column, changed(base, changes, where).check()))
        for column in label.columns or columns:
            if column not in columns:
                raise RecipeError(f"{where}: there is no column {column!r}.", f"Columns: {', '.join(columns)}.")
            recipe = changed(columns[column], changes, where).check()
            cells.append(Cell(f"{label.name}-{column}", row, titles[column], recipe))
    for what, counts in (
        ("name", Counter(c.name for c in cells)),
        ("row and column", Counter((c.row, c.column) for c in cells)),
    ):
        if twice := [str(key) for key, count in counts.items() if count > 1]:
            raise RecipeError(f"{path}: several cells have the same {what}: {', '.join(twice)}.")
    return Experiment(
        path.stem, text.title or path.stem, text.text.strip(), text.seeds, text.test, text.metrics, text.plot, (*cells,)
    )


def changed(recipe: Recipe, changes: dict[str, Any], where: str) -> Recipe:
    """``recipe`` with a plain table of changes; ``convert`` may be a list of rules, or changes by rule number."""
    rules = changes.get("convert")
    if isinstance(rules, dict):
        known = [str(i) for i in range(len(recipe.convert))]
        if unknown := set(rules) - set(known):
            raise RecipeError(f"{where}: convert: there is no rule {', '.join(sorted(unknown))}.")
        merged = [build(Rule, rules.get(i, {}), recipe.convert[int(i)], f"{where}: convert.{i}") for i in known]
        changes = {**changes, "convert": merged}
    return build(Recipe, changes, recipe, where)


def expanded(path: str | None) -> str | None:
    """A path with its environment variables filled in.

    Raises:
        RecipeError: a variable is not set.
    """
    found = None if path is None else os.path.expandvars(path)
    if found is not None and "$" in found:
        raise RecipeError(f"{path!r} names an environment variable that is not set.")
    return found


def expand(recipe: Recipe) -> Recipe:
    """The recipe with the environment variables of its paths filled in."""
    paths = [expanded(path) for path in paths_of(recipe)]
    return override(
        recipe, source__model=expanded(recipe.source.model), data__path=paths[0] if len(paths) == 1 else paths or None
    )


def paths_of(recipe: Recipe) -> tuple[str, ...]:
    """The image sets that a recipe mixes, as it names them."""
    path = recipe.data.path
    return (path,) if isinstance(path, str) else path or ()


def _split(entry: dict[str, Any], where: str) -> tuple[_Label, dict[str, Any]]:
    """A cell's or column's label, and its changes."""
    names = {f.name for f in dataclasses.fields(_Label)}
    label = build(_Label, {k: v for k, v in entry.items() if k in names}, _Label(), where)
    if not label.name or not set(label.name) <= set("abcdefghijklmnopqrstuvwxyz0123456789-_.+"):
        raise RecipeError(f"{where}: name: {label.name!r} must be small letters, digits, '-', '_', '.' and '+'.")
    return label, {k: v for k, v in entry.items() if k not in names}
