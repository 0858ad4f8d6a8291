"""Sources, recipes and artifacts from strangers, broken or meant to harm: one clear error, at once, nothing written."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.honest import Files, descriptions
from tests.hostile import files, mangled, mutated, outcome, repeatable
from vit2linear import convert, evaluate, load
from vit2linear.errors import ArtifactError, RecipeError, UnsupportedModelError
from vit2linear.prepare import Prepared, prepare
from vit2linear.recipe import Recipe, override, parse_recipe, read_recipe, to_toml

pytestmark = pytest.mark.filterwarnings("ignore")  # of libraries, about nonsense that they take


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, class_folders: Path) -> Iterator[Path]:
    """The current folder of a run, with a source, images and an artifact in it; nothing may be written there."""
    root, home = tmp_path_factory.mktemp("hostile"), Path.cwd()
    shutil.copytree(checkpoint, root / "tiny")
    shutil.copytree(class_folders, root / "images")
    os.chdir(root)
    convert(
        override(
            Recipe(),
            source__model="tiny",
            distill__steps=0,
            distill__calibration__images=0,
            data__path="images",
            data__workers=0,
            output__dir="made",
        )
    )
    yield root
    os.chdir(home)


@pytest.fixture(scope="module")
def honest(place: Path) -> dict[str, Files]:
    return descriptions()


def write_files(folder: Path, contents: Files, **raw: bytes) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content))
    for name, text in raw.items():
        (folder / name.replace("__", ".")).write_bytes(text)


@pytest.mark.slow
def test_honest_descriptions_are_planned(place: Path, honest: dict[str, Files], tmp_path: Path) -> None:
    for name, contents in honest.items():
        write_files(tmp_path / "model", contents)
        made = prepare(override(Recipe(), source__model=str(tmp_path / "model"), convert=[{"drop": ["all"]}]))
        assert made.plan.replaced, name


def fuzz_configs(place: Path, honest: dict[str, Files], folder: Path, examples: int) -> None:
    plans = 0

    @repeatable(examples)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        nonlocal plans
        contents = honest[data.draw(st.sampled_from(sorted(honest)))]
        which = data.draw(st.sampled_from(sorted(contents)))
        write_files(folder, contents, **{which.replace(".", "__"): data.draw(files(contents[which]))})
        recipe = override(Recipe(), source__model=str(folder), convert=[{"drop": ["all"]}])
        plans += isinstance(outcome(lambda: prepare(recipe), place), Prepared)

    one()
    assert examples / 20 < plans < examples / 2, "mutations are neither all harmless nor all fatal"


def test_configs(place: Path, honest: dict[str, Files], tmp_path: Path) -> None:
    fuzz_configs(place, honest, tmp_path / "model", 40)


@pytest.mark.slow
def test_five_hundred_configs(place: Path, honest: dict[str, Files], tmp_path: Path) -> None:
    fuzz_configs(place, honest, tmp_path / "model", 500)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("vit", {"hidden_size": 10**9, "intermediate_size": 10**9}),
        ("vit", {"num_hidden_layers": 10**9}),
        pytest.param("vit", {"num_hidden_layers": 900_000}, marks=pytest.mark.slow),
        ("vit", {"num_labels": 10**12, "id2label": None}),
        ("vit", {"image_size": 10**6}),
        ("vit", {"num_channels": 0}),
        ("vit", {"num_attention_heads": 0}),
        ("dinov2_with_registers", {"num_register_tokens": 10**9}),
        pytest.param("swin", {"depths": [900_000, 1, 1]}, marks=pytest.mark.slow),
        ("hiera", {"depths": [10**9, 1, 1, 1]}),
        ("timm-vit_tiny_patch16_224", {"model_args": {"depth": 10**9}}),
        ("timm-vit_tiny_patch16_224", {"model_args": {"checkpoint_path": "/etc/passwd"}}),
        ("timm-vit_tiny_patch16_224", {"model_args": {"patch_size": 1, "img_size": 10**5}}),
        ("timm-vit_tiny_patch16_224", {"num_classes": 10**12}),
    ],
    ids=str,
)
def test_absurd_sizes(place: Path, honest: dict[str, Files], tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    write_files(tmp_path / "model", {"config.json": honest[name]["config.json"] | values})
    recipe = override(Recipe(), source__model=str(tmp_path / "model"), convert=[{"drop": ["all"]}])
    assert isinstance(outcome(lambda: prepare(recipe), place), UnsupportedModelError)


RECIPE: dict[str, Any] = tomllib.loads(to_toml(override(Recipe(), source__model="tiny", data__path="images"))) | {
    "convert": [
        {"op": "performer", "sites": "blocks.[01].attn", "options": {"features": 16}, "local": "dwc3", "drop": ["all"]},
        {"op": "nystrom", "sites": "blocks.2.*", "center_keys": True},
        {"op": "relu", "sites": "*"},
    ]
}


def recipes() -> st.SearchStrategy[bytes]:
    """A recipe, changed like the JSON files; TOML has no null."""

    def without_null(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_null(item) for key, item in value.items() if item is not None}
        return [without_null(item) for item in value if item is not None] if isinstance(value, list) else value

    def as_toml(value: Any) -> bytes:
        return tomli_w.dumps(without_null(value)).encode("utf-8", "surrogatepass")

    changed = mutated(RECIPE).map(as_toml)
    return st.one_of(changed, changed, changed, mangled(as_toml(RECIPE)))


def fuzz_recipes(place: Path, folder: Path, examples: int) -> None:
    plans = 0

    @repeatable(examples)
    @given(recipes())
    def one(text: bytes) -> None:
        nonlocal plans
        (folder / "recipe.toml").write_bytes(text)
        plans += isinstance(outcome(lambda: prepare(read_recipe(folder / "recipe.toml")), place), Prepared)

    one()
    assert examples / 20 < plans < examples / 2


def test_recipes(place: Path, tmp_path: Path) -> None:
    fuzz_recipes(place, tmp_path, 40)


@pytest.mark.slow
def test_five_hundred_recipes(place: Path, tmp_path: Path) -> None:
    fuzz_recipes(place, tmp_path, 500)


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff[run]\nseed = 3\n",
        "[run]\r\nseed = 3\r\n",
        "\ufeff# by hand\r\n[run]\r\nseed = 3\r\n",
    ],
)
def test_recipes_of_other_editors(tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.toml").write_bytes(text.encode())
    assert read_recipe(tmp_path / "recipe.toml").run.seed == 3
    assert parse_recipe(text).run.seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run]\nseed = 1\nseed = 2", "not valid TOML: Cannot overwrite a value"),
        ("[run]\nseed = 1\n[run]\ndevice = 'cpu'", r"not valid TOML: .*line 3"),
        ("[run]\rseed = 1", "not valid TOML"),
        (f"[run]\nseed = {'9' * 5000}", "not valid TOML"),
        (f"[run]\nseed = 0x{'f' * 5000}", "run.seed: an integer beyond 64 bits"),
        (
            "[distill]\nclip = nan\nwarmup = inf",
            "distill.clip: nan is not a finite.*distill.warmup: inf is not a finite",
        ),
        (f"a = {'[' * 5000}", "nested without end"),
        (f"[[convert]]\noptions = {{a = {'[' * 100}{']' * 100}}}", "more than 64 levels"),
    ],
)
def test_recipes_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse_recipe(text).check()


@pytest.mark.parametrize(("op", "option"), [("performer", "features"), ("nystrom", "landmarks"), ("luna", "channels")])
def test_absurd_options(place: Path, op: str, option: str) -> None:
    recipe = override(Recipe(), source__model="tiny", convert=[{"op": op, "options": {option: 10**12}}])
    with pytest.raises(RecipeError, match=f"{op!r}: {option} is 1000000000000, must be above 0 and at most 4,096"):
        prepare(recipe)


def fuzz_artifacts(place: Path, folder: Path, examples: int) -> dict[bool, int]:
    """How many artifacts could be loaded (false) and were refused (true)."""
    made = place / "made"
    texts = {name: (made / name).read_bytes() for name in ("config.json", "report.json", "model.safetensors")}
    broken: dict[str, st.SearchStrategy[bytes]] = {
        "config.json": files(json.loads(texts["config.json"])),
        "report.json": files(json.loads(texts["report.json"])),
        "model.safetensors": mangled(texts["model.safetensors"]),
    }
    shutil.copytree(made, folder)
    found = {True: 0, False: 0}

    @repeatable(examples)
    @given(st.data())
    def one(data: st.DataObject) -> None:
        for name, text in texts.items():
            (folder / name).write_bytes(text)
        name = data.draw(st.sampled_from(("config.json", "config.json", "report.json", "model.safetensors")))
        (folder / name).write_bytes(data.draw(broken[name]))
        loaded = outcome(lambda: load(str(folder)), place)
        assert isinstance(loaded, ArtifactError | torch.nn.Module)
        found[isinstance(loaded, ArtifactError)] += 1
        if name == "report.json" and not isinstance(loaded, ArtifactError):
            outcome(lambda: evaluate(str(folder), workers=0, limit=1), place)

    one()
    return found


def test_artifacts(place: Path, tmp_path: Path) -> None:
    assert fuzz_artifacts(place, tmp_path / "made", 20)[True]


@pytest.mark.slow
def test_five_hundred_artifacts(place: Path, tmp_path: Path) -> None:
    found = fuzz_artifacts(place, tmp_path / "made", 500)
    assert min(found.values()) > 25, "mutations are neither all harmless nor all fatal"
