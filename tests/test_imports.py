from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import vit2linear

PACKAGE = Path(vit2linear.__file__).parent
# Later layers may import earlier ones, and their own; ops, sites and sources never import each other.
LAYERS = [
    {"errors"},
    {"strict", "jsonfile", "sizes", "registry", "reporting", "hub", "upload", "entry", "durable", "interrupt"},
    {"recipe"},
    {"context", "heads"},
    {"modifiers"},
    {"operator"},
    {"site"},
    {"ops", "sites", "sources", "losses"},
    {"resolve", "outline", "licence"},
    {"plan"},
    {"surgery", "model", "probe", "mimetic"},
    {"initial", "images", "classes", "class_map", "views", "bad_images", "samples", "data", "audit", "devices"},
    {"trackers"},
    {"distill"},
    {"calibration", "headless", "significance", "routing"},
    {"catalogue", "compare", "evaluation", "bench", "training_cost", "hybrid"},
    {"speed", "stored", "evidence"},
    {"artifact", "card", "plots", "pictures", "page", "journal", "checkpoint", "tracing", "graphs"},
    {"run_folder"},
    {"prepare"},
    {"moments"},
    {"opening", "record"},
    {"pipeline", "finished", "inspection", "publish", "export", "expected", "trial"},
    {"cli", "__main__", "__init__"},
]
RANK = {name: i for i, layer in enumerate(LAYERS) for name in layer}


def modules_imported_at(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vit2linear":
            parts = (node.module or "").split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("vit2linear.")}
    return names & set(RANK)


def test_every_module_has_a_layer() -> None:
    found = {
        p.stem if p.is_file() else p.name
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").is_file()
    }
    assert found == set(RANK)


def test_arrows_point_one_way() -> None:
    for path in PACKAGE.rglob("*.py"):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for other in modules_imported_at(path) - {own}:
            separate = {own, other} <= {"ops", "sites", "sources", "losses"}
            # The entry point reaches the model that it builds only when it is called.
            allowed = (own, other) == ("entry", "model")
            assert allowed or (RANK[other] <= RANK[own] and not separate), f"{path.name} imports {other}"


@pytest.mark.parametrize("code", ["import vit2linear", "import vit2linear.cli.main"])
def test_imports_are_light(code: str) -> None:
    check = "import sys; bad = {'torch', 'timm', 'datasets', 'accelerate'} & set(sys.modules); assert not bad, bad"
    subprocess.run([sys.executable, "-c", f"{code}; {check}"], check=True)


@pytest.mark.parametrize("command", [[], ["convert"], ["eval"], ["push"], ["export"]])
def test_help_is_light(command: list[str]) -> None:
    code = (
        "import sys\nfrom vit2linear.cli.main import app\n"
        f"try: app({[*command, '--help']!r})\nexcept SystemExit as e: assert e.code == 0, e.code\n"
        "assert not {'torch', 'timm', 'huggingface_hub'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "Usage" in done.stdout


@pytest.mark.parametrize(
    "order",
    [
        "import vit2linear, timm",
        "import timm, vit2linear",
        "import importlib.util; importlib.util.find_spec('timm'); import vit2linear, timm",
        "import vit2linear, importlib.util; importlib.util.find_spec('timm'); import timm",
        "import vit2linear.model, timm",
        "import vit2linear; from timm.models import vision_transformer; import timm",
    ],
)
def test_architecture_is_registered_in_any_order(order: str) -> None:
    subprocess.run([sys.executable, "-c", f"{order}; assert timm.is_model('vit2linear')"], check=True)


def test_public_names() -> None:
    for name in vit2linear.__all__:
        assert getattr(vit2linear, name) is not None
    assert callable(vit2linear.evaluate) and callable(vit2linear.convert)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        vit2linear.nothing  # noqa: B018
