"""Converted models as graphs, each one run by the runtime that it is for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from tests import families
from tests.conftest import Run
from tests.test_operators import IDS, VARIANTS
from vit2linear import linearize
from vit2linear.artifact import CONFIG, REPORT
from vit2linear.context import AttentionContext
from vit2linear.errors import ArtifactError, RecipeError, UnknownNameError, UnsupportedModelError
from vit2linear.export import TOLERANCE, Export, export
from vit2linear.graphs import OnnxGraph, modules_with_maps
from vit2linear.model import takes_size
from vit2linear.ops.base import KernelOperator
from vit2linear.ops.relu import ReLUAttention
from vit2linear.plan import make_plan
from vit2linear.recipe import OPERATORS, Rule
from vit2linear.surgery import apply_plan

DOCS = Path(__file__).parents[1] / "docs" / "export.md"
FAST = ("relu", "mala", "efficient")
FIXED = {"agent", "mhla", "nystrom", "soft"}
"""Operators whose graphs are of one size."""


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Without the checks of annotations: sizes are symbols while a graph for any size is traced, and no ``int``."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def tiny(**args: Any) -> nn.Module:
    """32 px, 17 tokens; its weights are larger than at init, so that routing matters."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}
    return families.build("vit_tiny_patch16_224", **{**sizes, **args})


def artifact(model: nn.Module, folder: Path) -> Path:
    """A converted model in a folder, as ``convert`` writes it but for what export does not read."""
    for name, parameter in model.named_parameters():
        if ".op." in name:  # what starts inert would hide mistakes
            parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    save_for_hf(model, str(folder), safe_serialization=True)
    report = {"source": {"name": "tiny"}, "data": {"path": "nowhere", "held_out": None, "ignore_labels": False}}
    (folder / REPORT).write_text(json.dumps(report))
    return folder


def relu(model: nn.Module, folder: Path) -> Path:
    return artifact(apply_plan(model, make_plan(model, [Rule(drop=("all",))])).eval(), folder)


def check(made: Export, folder: Path, sizes: int) -> None:
    """What is reported holds for the file that lies there, run here."""
    args = {"img_size": made.size, **({"dynamic_img_size": True} if sizes > 1 else {})}
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **args).eval()
    assert {(c.batch, c.size) for c in made.checks} == {(b, c.size) for b in (1, 3) for c in made.checks}
    assert len({c.size for c in made.checks}) == sizes and made.bytes == Path(made.file).stat().st_size
    assert made.milliseconds > 0 and made.torch_milliseconds > 0 and made.ratio > 0 and made.values > 20
    height, width = made.size
    for size in [(height, width), (height - 8, width + 8)][:sizes]:
        pixels = torch.randn(2, 3, *size)
        if made.format == "onnx":
            onnx.checker.check_model(made.file)
            session = onnxruntime.InferenceSession(made.file, providers=["CPUExecutionProvider"])
            (found,) = session.run(["output"], {"pixels": pixels.numpy()})
        else:
            found = torch.export.load(made.file).module()(pixels).detach().numpy()
        with torch.no_grad():
            wanted = model(pixels).numpy()
        assert np.abs(wanted).max() > 0.1 and np.abs(found - wanted).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(n, o, id=i, marks=() if n in FAST and not o else pytest.mark.slow)
        for (n, o), i in zip(VARIANTS, IDS, strict=True)
    ],
)
def test_every_operator_in_onnx(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    folder = artifact(linearize(tiny(depth=1), name, options=options, local="dwc3").eval(), tmp_path / "tiny")
    made = export(str(folder), output=tmp_path / "tiny.onnx", rounds=1)
    check(made, folder, 1)
    assert made.softmax == (() if OPERATORS.get(name).linear else ("blocks.0.attn",)) and made.opset == 20


@pytest.mark.parametrize(
    "name", [n if n in ("relu", "agent") else pytest.param(n, marks=pytest.mark.slow) for n in OPERATORS.names()]
)
@pytest.mark.usefixtures("unchecked")
def test_every_operator_for_images_of_any_size_or_refused_as_documented(name: str, tmp_path: Path) -> None:
    folder = artifact(linearize(tiny(), name).eval(), tmp_path / "tiny")
    file = tmp_path / "tiny.onnx"
    if name in FIXED:
        with pytest.raises(
            UnsupportedModelError, match=rf"operator {name} cannot be exported with --dynamic.*--img-size"
        ):
            export(str(folder), dynamic=True, output=file)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "nothing is left"
    else:
        made = export(str(folder), dynamic=True, output=file, rounds=1)
        check(made, folder, 2)
        dims = onnx.load(file).graph.input[0].type.tensor_type.shape.dim
        assert made.multiple == (8, 8)
        assert [d.dim_param or d.dim_value for d in dims] == ["batch", 3, "8*rows", "8*columns"]
    words = f"All operators but {', '.join(f'`{n}`' for n in sorted(FIXED))} take `--dynamic`"
    assert words in " ".join(DOCS.read_text("utf-8").split())


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.usefixtures("unchecked")
def test_torch_export(dynamic: bool, tmp_path: Path) -> None:
    folder = artifact(linearize(tiny(), "inline").eval(), tmp_path / "tiny")
    made = export(str(folder), "torch-export", size=(40, 32), dynamic=dynamic, output=tmp_path / "x.pt2", rounds=1)
    check(made, folder, 1 + dynamic)
    assert made.size == (40, 32) and made.opset is None and not made.softmax


@pytest.mark.parametrize("opset", [18, 23])
def test_maps_are_where_the_softmax_was_kept_and_nowhere_else(opset: int, tmp_path: Path) -> None:
    """Softmax is a product and a node of its own up to opset 22, one fused node from 23."""
    model = tiny(depth=3)
    student = apply_plan(model, make_plan(model, [Rule(sites="blocks.[02].attn", op="elu")])).eval()
    folder = artifact(student, tmp_path / "tiny")
    made = export(str(folder), opset=opset, output=tmp_path / "tiny.onnx", rounds=1)
    check(made, folder, 1)
    assert made.softmax == ("blocks.1.attn",) and made.opset == opset
    nodes = {node.op_type for node in onnx.load(made.file).graph.node}
    assert ("Attention" in nodes) == (opset == 23) and ("Softmax" in nodes) == (opset == 18)
    values = OnnxGraph(Path(made.file)).values(torch.randn(3, 3, 32, 32))
    pairs = {f"blocks.{i}.attn": (17, 17) for i in range(3)}
    assert modules_with_maps(values, pairs) <= {"blocks.1.attn", "blocks.1.attn.op"} and len(values) == made.values


@pytest.mark.parametrize("kind", ["onnx", "torch-export"])
def test_a_map_that_slipped_in_is_found(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def through_the_map(self: KernelOperator, q: Tensor, k: Tensor, v: Tensor, ctx: AttentionContext) -> Tensor:
        return self.map(q, k, ctx) @ v

    monkeypatch.setattr(ReLUAttention, "forward", through_the_map)
    folder = relu(tiny(), tmp_path / "tiny")
    with pytest.raises(UnsupportedModelError, match=r"map over pairs of tokens in blocks\.0\.attn\.op, blocks\.1"):
        export(str(folder), kind, output=tmp_path / "x", rounds=1)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"], "nothing is left"


def test_as_many_tokens_as_channels_are_no_map(tmp_path: Path) -> None:
    """16 patches without a class token, heads of 16 channels: everything in the operator is 16 x 16."""
    folder = relu(tiny(depth=1, class_token=False, global_pool="avg"), tmp_path / "tiny")
    made = export(str(folder), "torch-export", output=tmp_path / "x.pt2", rounds=1)
    assert not made.softmax


def test_a_graph_that_differs_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = ReLUAttention.row_rule

    def wrong_in_graphs(self: ReLUAttention, z: Tensor) -> Any:
        return exact(self, z * 1.01 if torch.compiler.is_exporting() else z)

    monkeypatch.setattr(ReLUAttention, "row_rule", wrong_in_graphs)
    folder = relu(tiny(), tmp_path / "tiny")
    (tmp_path / "x.pt2").write_text("mine")
    with pytest.raises(UnsupportedModelError, match=r"differs from torch by 0\.\d+ for 1 images of 32 px"):
        export(str(folder), "torch-export", output=tmp_path / "x.pt2", overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tiny", "x.pt2"]
    assert (tmp_path / "x.pt2").read_text() == "mine", "what was there is still there"


@pytest.mark.parametrize(
    ("module", "who"),
    [
        ("eva", "a Eva"),
        pytest.param("swin_transformer", "a SwinTransformer", marks=pytest.mark.slow),
        ("hiera", "hiera_tiny_224 cannot be built for any size"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_sources_of_one_size_are_named(module: str, who: str, tmp_path: Path) -> None:
    name, args = families.cases(module)[0]  # EVA's first is a DINOv3
    folder = relu(families.build(name, **args), tmp_path / "tiny")
    with pytest.raises(UnsupportedModelError, match=rf"{who}.*--dynamic.*--img-size"):
        export(str(folder), dynamic=True, output=tmp_path / "x.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("module", families.MODULES)
def test_every_family_in_onnx_or_refused(module: str, tmp_path: Path) -> None:
    name, args = families.cases(module)[0]
    folder = relu(families.build(name, **args), tmp_path / "tiny")
    made = export(str(folder), output=tmp_path / "tiny.onnx", rounds=1)
    assert not made.softmax


def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, file = relu(tiny(), tmp_path / "tiny"), tmp_path / "x.onnx"
    file.write_text("mine")
    with pytest.raises(ArtifactError, match=r"x\.onnx' exists.*--overwrite"):
        export(str(folder), output=file)
    with pytest.raises(ArtifactError, match="exists"):
        export(str(folder), output=tmp_path, overwrite=True)
    with pytest.raises(UnknownNameError, match=r"unknown format 'onx'.*Did you mean 'onnx'"):
        export(str(folder), "onx")
    with pytest.raises(RecipeError, match="12 is not between 18 and 23"):
        export(str(folder), opset=12)
    with pytest.raises(RecipeError, match="--opset is for ONNX"):
        export(str(folder), "torch-export", opset=20)
    with pytest.raises(UnsupportedModelError, match=r"36 px are not in whole patches of 8 px.*multiple"):
        export(str(folder), "torch-export", size=(36, 36), dynamic=True)
    name, args = families.cases("hiera")[0]
    hiera = relu(families.build(name, **args), tmp_path / "hiera")
    with pytest.raises(UnsupportedModelError, match=r"hiera_tiny_224 does not take images of 33x32 px: .*"):
        export(str(hiera), "torch-export", size=(33, 32))
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(RecipeError, match=r"ONNX needs onnxruntime\..*pip install 'vit2linear\[export\]'"):
        export(str(folder))
    assert file.read_text() == "mine"


def test_command(cli: Run, tmp_path: Path) -> None:
    relu(tiny(), tmp_path / "tiny")
    said = cli("export", "--format", "torch-export").stdout
    assert "tiny.pt2: " in said and "images of 32 px" in said and "difference from torch: " in said and "none" in said
    cli("export", "tiny", "--format", "torch-export", code=7)
    made = json.loads(cli("export", "tiny", "--format", "torch-export", "--overwrite", "--json").stdout)
    assert made["file"] == "tiny.pt2" and made["ratio"] > 0 and made["size"] == [32, 32]
    assert json.loads((tmp_path / "tiny" / CONFIG).read_text())["architecture"] == "vit2linear"
    assert cli("export", "tiny", "--img-size", "big", code=2).stderr


def test_subclasses_that_inherit_their_size_are_resized() -> None:
    assert takes_size("deit_tiny_distilled_patch16_224") and not takes_size("pvt_v2_b0")
