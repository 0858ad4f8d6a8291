from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vit2linear.errors import RecipeError
from vit2linear.recipe import Recipe, override, parse_recipe, read_recipe, to_toml


def test_round_trip() -> None:
    recipe = override(Recipe(), source__model="demo", distill__steps=7, distill__feature__lr=1e-4)
    assert parse_recipe(to_toml(recipe)) == recipe


def test_flags_win_over_the_file_over_the_defaults() -> None:
    recipe = parse_recipe('[source]\nmodel = "a/b"\n[distill]\nsteps = 5\nbatch_size = 8')
    recipe = override(recipe, distill__steps=9, source__model=None)
    assert (recipe.source.model, recipe.distill.steps, recipe.distill.batch_size) == ("a/b", 9, 8)
    assert recipe.run.seed == Recipe().run.seed


def test_every_problem_is_reported_at_once() -> None:
    text = """
    [source]
    modle = "demo"
    [distill]
    steps = "many"
    augment = "wild"
    [distill.feature]
    lr = true
    [[convert]]
    operator = "relu"
    """
    with pytest.raises(RecipeError) as error:
        parse_recipe(text)
    message = str(error.value)
    for part in (
        "source.modle: unknown key; did you mean 'model'?",
        "distill.steps: 'many' is not an integer",
        "distill.augment: 'wild' is not one of 'flip', 'mild', 'none'",
        "distill.feature.lr: True is not a number",
        "convert.0.operator: unknown key",
    ):
        assert part in message


def test_ranges_and_names_are_checked() -> None:
    recipe = parse_recipe('[distill]\nsteps = -1\n[distill.feature]\nshare = 2\n[[convert]]\nop = "rellu"')
    with pytest.raises(RecipeError) as error:
        recipe.check()
    message = str(error.value)
    assert "source.model" in message and "distill.steps: -1" in message and "distill.feature.share: 2" in message
    assert "Did you mean 'relu'" in message


@pytest.mark.parametrize("text", ["[source", "a = ", "= 3"])
def test_not_toml(text: str) -> None:
    with pytest.raises(RecipeError, match="not valid TOML"):
        parse_recipe(text)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot read"):
        read_recipe(tmp_path / "absent.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot read"):
        read_recipe(tmp_path / "binary.toml")


def test_recipe_needs_no_torch() -> None:
    code = "import sys, vit2linear; vit2linear.Recipe(); from vit2linear.recipe import parse_recipe\n"
    code += "parse_recipe('[run]\\nseed = 3'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_learning_rates_follow_the_width() -> None:
    options = override(Recipe(), distill__feature__lr=1e-4).distill.at_width(768)
    assert (options.attention.lr, options.attention.lr_rest, options.attention.lr_new) == (5e-4, 0.0, 5e-3)
    assert (options.feature.lr, options.feature.lr_rest, options.feature.lr_new) == (1e-4, 1e-4, 1e-3)
