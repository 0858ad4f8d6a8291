"""The timm modules that are covered: one file each, named like the module; found by listing this folder.

Each file has ``small(name)``, arguments that make a quick sibling of any architecture of the module (same classes, few
blocks, narrow), ``NAMES``, architectures that together show every variant of its attention, and may have ``VARIANTS``,
further pairs of a name and arguments.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import timm
import torch
from torch import nn

MODULES = sorted(m.name for m in pkgutil.iter_modules(__path__))


def cases(module: str) -> list[tuple[str, dict[str, Any]]]:
    """Name and arguments of every small model of a timm module."""
    family = importlib.import_module(f"{__name__}.{module}")
    return [(name, family.small(name)) for name in family.NAMES] + getattr(family, "VARIANTS", [])


def build(name: str, **args: Any) -> nn.Module:
    """A timm model with larger logits than at init, so that routing matters."""
    torch.manual_seed(0)
    model = timm.create_model(name, **args).eval()
    for parameter in model.parameters():
        data = parameter.data.mul_(1.5)
        if data.abs().max() < 0.05:  # what starts at nothing (biases, tables, layer scales) would hide mistakes
            data.normal_(std=0.2)
        elif data.ndim == 2:  # an initial 0.02 would be hardly any logits in models as narrow as these
            data.mul_(max(1.0, data.shape[1] ** -0.5 / float(data.square().mean().sqrt())))
    return model
