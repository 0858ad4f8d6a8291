"""Exported graphs: written, run, and searched for maps over pairs of tokens.

The search looks at the shapes of all values in one run: those that are written into a graph may be symbols or absent.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn

from vit2linear.audit import softmax_pairs
from vit2linear.errors import UnsupportedModelError
from vit2linear.site import sites_of

Pairs = Mapping[str, tuple[int, int]]
"""Numbers of queries and keys, by the path of the module that routes them."""


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
        self._run = _session(file)
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
                f"the graph has no form in ONNX: {str(error).strip().splitlines()[0]}",
                "--format torch-export needs none.",
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


def token_pairs(model: nn.Module, pixels: Float[Tensor, "batch channels height width"]) -> tuple[Pairs, Pairs]:
    """Queries and keys of every routing in one forward of ``model``; and of those alone that are softmax over pairs."""
    found: dict[str, tuple[int, int]] = {}

    def noting(path: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            found[path] = args[0].shape[-2], args[1].shape[-2]

        return hook

    hooks = [site.op.register_forward_pre_hook(noting(f"{path}.op")) for path, site in sites_of(model).items()]
    try:
        softmax = softmax_pairs(model, pixels)
    finally:
        for hook in hooks:
            hook.remove()
    return {**found, **softmax}, softmax


def modules_with_maps(values: Iterable[Value], pairs: Pairs) -> set[str]:
    """Paths of the modules in which a value has one dimension of queries and another one of keys.

    Away from the modules in ``pairs``, it has to end in the two.
    """
    found = set()
    for value in values:
        shape = value.shape
        own = {pair for path, pair in pairs.items() if related(value.module, [path])}
        ends = {shape[-2:]} if len(shape) > 2 else set()
        inside = {(a, b) for i, a in enumerate(shape) for j, b in enumerate(shape) if i != j}
        if (inside & own) if own else (ends & set(pairs.values())):
            found.add(value.module)
    return found


def related(path: str, others: Collection[str]) -> bool:
    """Whether ``path`` is one of ``others``, lies in one or has one inside."""
    return bool(path) and any(f"{path}.".startswith(f"{o}.") or f"{o}.".startswith(f"{path}.") for o in others)


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
