"""Every code block of the documentation runs, and generated pages are fresh."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import write_images
from tests.hub_user import User
from tests.loopback_hub import OWNER
from vit2linear.recipe import parse_recipe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What sets up the environment that the tests run in already; `make` and CI run it on a clean clone.
SETUP = ("git clone", "cd ", "make ", "pip install", "python scripts/")


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text("utf-8"))


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh() -> None:
    made = generator()
    pages = {"cli.md": made.cli_page(), "operators.md": made.operators_page(), "recipes.md": made.recipes_page()}
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text("utf-8") == text, "run python scripts/make_docs.py"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "cli.md"], ids=lambda p: p.name)
def test_blocks_run(page: Path, user: User) -> None:
    """Commands as typed but for steps and benchmarked sizes, at a Hub on loopback; then the Python blocks."""
    write_images(user.folder / "IMAGES", 6, seed=3)
    script = "\n".join(text for language, text in blocks(page) if language == "python")
    (user.folder / "my_ops.py").write_text(script)  # extending.md says to save its operator so
    for language, text in blocks(page):
        assert language in ("bash", "python", "toml", "text", "console"), f"{page.name}: a block of {language!r}"
        if language == "toml":
            parse_recipe(text)
        if language == "bash":
            for line in text.splitlines():
                command = line.split("#")[0].strip()
                if command and not command.startswith(SETUP):
                    command = re.sub(r"--distill-steps \d+", "", command)
                    command = re.sub(r"--img-size \d{3}[\d,]* --rounds \d+", "--img-size 64 --rounds 1", command)
                    if "vit2linear convert" in command:
                        command += " --distill-steps 2 --overwrite"
                    user.run(command.replace("recipes/", f"{ROOT}/recipes/"), PYTHONPATH=str(user.folder))
    if script:
        user.execute([sys.executable, "-W", "error::UserWarning", "-c", script.replace("YOUR-NAME", OWNER)])


def test_tests_that_are_named_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "reliability.md").read_text("utf-8"))
    assert len(named) > 30
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text("utf-8"), f"{file}::{name}"


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
