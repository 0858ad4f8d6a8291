"""Replace the attention of a model as a plan says, and record how to build the result again."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import nn

from vit2linear.context import GridReader, GridRef
from vit2linear.errors import SurgeryError
from vit2linear.plan import SITES, Plan, kind_of, make_operator, make_plan, shared_by_none
from vit2linear.recipe import OPERATORS, Rule
from vit2linear.site import LinearAttention, SiteKind, set_submodule


def apply(model: nn.Module, operators: dict[str, dict[str, Any]]) -> nn.Module:
    """Replace the sites in place, as ``Plan.operators`` says, and record how to build the result again.

    New parameters are made on the device and in the dtype of the module that they join.

    Raises:
        SurgeryError: a path is no site of this model.
    """
    modules = dict(model.named_modules())
    shared = shared_by_none(model, operators)
    refs: dict[tuple[str, GridReader, int], GridRef] = {}
    for path, entry in operators.items():
        module = modules.get(path)
        name = kind_of(model, module) if module is not None else None
        if module is None or name is None:
            raise SurgeryError(f"{path!r} is not a softmax attention module of this {type(model).__name__}.")
        kind: SiteKind = SITES.get(name)().at(model, path)
        for setting, value in kind.settings.items():
            setattr(model, setting, value)
        prefix, source = kind.num_prefix(model, path), kind.grid_source(model, path)
        ref = GridRef(prefix) if source is None else refs.setdefault((*source, prefix), GridRef(prefix, source[1]))
        reference = next(module.parameters())
        with torch.device(reference.device):
            op = make_operator(entry, kind.geometry(module)).to(reference.dtype)
        site = LinearAttention(module, kind, op, ref, entry.get("drop", ()), entry.get("global_windows", False))
        set_submodule(model, path, site)
    for (path, _, _), ref in refs.items():
        model.get_submodule(path).register_forward_hook(ref)
    for path in shared:
        set_submodule(model, path, None)
    return model


def linearize(
    model: nn.Module,
    op: str = "relu",
    *,
    options: dict[str, Any] | None = None,
    local: Literal["none", "dwc3", "dwc5"] = "none",
    center_keys: bool = False,
    drop: Collection[str] | Literal["all"] = (),
    global_windows: bool = False,
) -> nn.Module:
    """A converted copy of any timm model: surgery alone, no training, no files.

    Args:
        model: a timm Vision Transformer; it is not changed.
        op: operator for every site; ``softmax`` gives a model with the same outputs.
        options: the operator's own options.
        local, center_keys, global_windows: for any operator; see ``Rule``.
        drop: what of the source's attention may be given up, such as ``{"relative-position-bias"}``, or ``"all"``.

    Returns:
        A new model, saved and loaded by timm's own functions wherever ``vit2linear`` is imported.

    Raises:
        UnknownNameError, RecipeError, SurgeryError
    """
    OPERATORS.check(op)
    drops = (drop,) if isinstance(drop, str) else tuple(sorted(drop))
    rule = Rule(
        op=op,
        options=options or {},
        local=local,
        center_keys=center_keys,
        drop=drops,
        global_windows=global_windows,
    )
    return apply_plan(model, make_plan(model, [rule]))


def apply_plan(model: nn.Module, plan: Plan) -> nn.Module:
    """A converted copy of ``model``, which knows (as timm's exporter asks) how it is built again."""
    student = apply(copy.deepcopy(model), plan.operators)
    cfg = dict(getattr(model, "pretrained_cfg", None) or {})
    args = dict(getattr(model, "_model_args", {}))
    args.setdefault("base", cfg.get("architecture"))
    student._model_args = {**args, "operators": plan.operators}  # type: ignore[assignment]
    student.pretrained_cfg = {**cfg, "architecture": "vit2linear"}  # type: ignore[assignment]
    return student
