"""Exported graphs: written, read back, run, and all their values told.

Shapes of values are those of a run: what is written into a graph may be symbols or absent.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, fx

from vit2linear.errors import UnsupportedModelError
from vit2linear.sources._description import first_line


@dataclass(frozen=True)
class Value:
    """One value that a graph computes."""

    module: str
    """Path of the innermost module that it was traced in; empty: the model's own forward."""
    shape: tuple[int, ...]
    """Of a fused attention: that of the map which it forms inside."""


class Graph(ABC):
    """A file with a graph, which is called with pixels and returns the model's output."""

    opset: int | None = None
    """Of ONNX."""

    @abstractmethod
    def __call__(self, pixels: Float[Tensor, "batch channels height width"]) -> Tensor:
        """The model's output."""

    @abstractmethod
    def values(self, pixels: Float[Tensor, "batch channels height width"]) -> list[Value]:
        """All values that are computed for these pixels."""


class ProgramGraph(Graph):
    """A program of ``torch.export``."""

    def __init__(self, file: Path) -> None:
        self._module = torch.export.load(file).module()

    @staticmethod
    def write(program: torch.export.ExportedProgram, file: Path, opset: int | None) -> None:
        """A file of torch's own."""
        torch.export.save(program, file)

    def __call__(self, pixels: Float[Tensor, "batch channels height width"]) -> Tensor:
        """As torch runs it."""
        output: Tensor = self._module(pixels)
        return output

    def values(self, pixels: Float[Tensor, "batch channels height width"]) -> list[Value]:
        """Step by step."""
        return _values_of_program(self._module, pixels)


class OnnxGraph(Graph):
    """An ONNX file, run by onnxruntime on the CPU with as many threads as torch has."""

    def __init__(self, file: Path) -> None:
        import onnx

        self._file = file
        try:
            self._run = _session(file)
        except Exception as error:  # the runtime's errors have no class in common
            raise UnsupportedModelError(
                f"onnxruntime cannot load the graph that torch's exporter wrote: {first_line(error)}.",
                "--format torch-export may work.",
            ) from error
        versions = {i.domain: i.version for i in onnx.load(file, load_external_data=False).opset_import}
        self.opset = versions[""]

    @staticmethod
    def write(program: torch.export.ExportedProgram, file: Path, opset: int | None) -> None:
        """By torch's exporter; weights of more than 2 GB go into a second file.

        Raises:
            UnsupportedModelError: something has no counterpart in ONNX.
        """
        try:
            made: Any = torch.onnx.export(
                program,
                input_names=["pixels"],
                output_names=["output"],
                opset_version=opset,
                verbose=False,
                external_data=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise UnsupportedModelError(
                f"the graph has no form in ONNX: {first_line(error)}.", "--format torch-export needs none."
            ) from error
        # Symbols are renamed inside expressions too: a height of 16*rows.
        dims = zip(made.model.graph.inputs[0].shape, ("batch", "", "rows", "columns"), strict=True)
        made.rename_axes({str(dim).rpartition("*")[2]: name for dim, name in dims if not isinstance(dim, int)})
        made.save(file)

    def __call__(self, pixels: Float[Tensor, "batch channels height width"]) -> Tensor:
        """As onnxruntime runs it."""
        return torch.from_numpy(self._run(pixels)[0])

    def values(self, pixels: Float[Tensor, "batch channels height width"]) -> list[Value]:
        """By a second graph, not optimised, that returns the shape of every value and nothing else."""
        import onnx

        model = onnx.load(self._file, load_external_data=False)
        nodes = list(model.graph.node)
        del model.graph.output[:]
        for i, node in enumerate(nodes):
            model.graph.node.append(onnx.helper.make_node("Shape", node.output[:1], [f"shape of {i}"]))
            model.graph.output.append(onnx.helper.make_tensor_value_info(f"shape of {i}", onnx.TensorProto.INT64, None))
        probe = self._file.with_name("shapes.onnx")  # beside it, where weights in a second file are found
        try:
            onnx.save(model, probe)
            shapes = [tuple(map(int, shape)) for shape in _session(probe, optimised=False)(pixels)]
        finally:
            probe.unlink(missing_ok=True)
        shape_of = {node.output[0]: shape for node, shape in zip(nodes, shapes, strict=True)}
        for node in nodes:
            if node.op_type == "Attention":
                shape_of[node.output[0]] = (*shape_of[node.output[0]][:-1], shape_of[node.input[1]][-2])
        return [Value(_module_of(node), shape_of[node.output[0]]) for node in nodes]


FORMATS: dict[str, tuple[type[ProgramGraph | OnnxGraph], str]] = {
    "onnx": (OnnxGraph, ".onnx"),
    "torch-export": (ProgramGraph, ".pt2"),
}
"""Name of a format to its graph and how its files end."""


def program_values(
    program: torch.export.ExportedProgram, pixels: Float[Tensor, "batch channels height width"]
) -> list[Value]:
    """As ``Graph.values``, of a program that was written nowhere."""
    return _values_of_program(program.module(), pixels)


def _values_of_program(module: Any, pixels: Tensor) -> list[Value]:
    found: list[Value] = []

    class Noting(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            result = super().run_node(n)
            if n.op == "call_function" and isinstance(result, Tensor):
                shape = tuple(result.shape)
                if n.target is torch.ops.aten.scaled_dot_product_attention.default:
                    shape = (*shape[:-1], self.env[n.args[1]].shape[-2])  # type: ignore[index]
                paths = [path for path, _ in n.meta.get("nn_module_stack", {}).values()]
                found.append(Value(paths[-1] if paths else "", shape))
            return result

    with torch.no_grad():
        Noting(module, garbage_collect_values=False).run(pixels)
    return found


def _session(file: Path, optimised: bool = True) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that wait by spinning would slow down torch in between.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimised:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return lambda pixels: session.run(None, {"pixels": pixels.numpy()})


def _module_of(node: Any) -> str:
    """The exporter notes the paths of the modules around a node, and last the name of what it came from."""
    for prop in node.metadata_props:
        if prop.key == "pkg.torch.onnx.name_scopes":
            return str(ast.literal_eval(prop.value)[-2])
    return ""
