"""What the code knows about its operators, as plain facts: for the command line, the documentation and tests."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from typing import Any

import torch

from vit2linear.context import HeadGeometry
from vit2linear.operator import Operator
from vit2linear.recipe import OPERATORS

_EXAMPLE = HeadGeometry(width=768, num_heads=12, head_dim=64, scale=0.125)
"""ViT-B, for which parameters are counted."""


def facts(name: str) -> dict[str, Any]:
    """Everything to be said about the operator ``name``, JSON-ready."""
    kind: type[Operator] = OPERATORS.get(name)
    return {
        "name": kind.name,
        "family": kind.family,
        "summary": kind.summary,
        "reference": kind.reference,
        "notes": kind.notes,
        "cost": kind.cost,
        "linear": kind.linear,
        "map": _map(kind),
        "carries": sorted(kind.carries),
        "parameters": _parameters(kind),
        "options": option_facts(kind.Options),
    }


def option_facts(options: type) -> list[dict[str, str]]:
    """Name, type, default and help of every field of a dataclass; the help is the string below the field."""
    hints = typing.get_type_hints(options)
    texts = attribute_docstrings(options)
    return [
        {"name": f.name, "type": type_name(hints[f.name]), "default": repr(f.default), "help": texts.get(f.name, "")}
        for f in dataclasses.fields(options)
    ]


def attribute_docstrings(kind: type) -> dict[str, str]:
    """The string literal below each annotated field of a class."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    texts = {}
    for first, second in zip(node.body, node.body[1:], strict=False):
        if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant):
            assert isinstance(first.target, ast.Name)
            texts[first.target.id] = " ".join(str(second.value.value).split())
    return texts


def type_name(hint: Any) -> str:
    """A type as users of a TOML file call it."""
    origin, args = typing.get_origin(hint), [a for a in typing.get_args(hint) if a is not type(None)]
    if origin is typing.Literal:
        return " or ".join(repr(a) for a in args)
    if origin is tuple:
        return f"array of {type_name(args[0])}s"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(a) for a in args)
    return {bool: "boolean", int: "integer", float: "number", str: "string"}.get(hint, "table")


def _map(kind: type[Operator]) -> str:
    if not kind.has_map:
        return "none"
    return "yes" if kind.streams == 1 else f"{kind.streams} a head"


def _parameters(kind: type[Operator]) -> str:
    """New parameters of one ViT-B attention module, with default options."""
    with torch.device("meta"):
        op = kind(_EXAMPLE, kind.Options())
    return f"{sum(p.numel() for p in op.parameters()):,}"
