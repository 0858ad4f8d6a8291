"""One N x N form for each operator, in a file of its name, written from the paper's formula.

Nothing here imports the package: a file gets numbers and gives numbers. ``routing(case)`` returns the map, (batch,
heads times streams, tokens, tokens); ``finish(case, heads)``, where there is one, what is done to the heads after it.
An operator that is not linear in v gives ``heads(case)`` instead.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import Tensor


@dataclass
class Case:
    """One call of an operator, in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    """(batch, heads, tokens, head_dim) each."""
    x: Tensor
    """(batch, tokens, heads * head_dim): the block input."""
    valid: Tensor
    """(batch, tokens): 1 where a token is real, 0 where it is padding."""
    grid: tuple[int, int]
    prefix: int
    scale: float
    params: dict[str, Tensor] = field(default_factory=dict)
    """The operator's state dict."""
    options: dict[str, Any] = field(default_factory=dict)


def form_of(name: str) -> ModuleType:
    """The module with the naive form of operator ``name``."""
    return importlib.import_module(f"tests.naive.{name}")
