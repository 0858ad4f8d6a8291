"""Proof, not trust: what became of every weight, and how many softmax attentions are left.

*dropped* is what the plan gives up and nothing else, *new* lies under ``.op.``, *copied* is bitwise equal to the source
and *drawn* was not to be copied (bitwise equal to what was drawn, where nothing was trained); and one forward under a
counter of softmaxes over pairs of tokens finds exactly the sites that were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vit2linear.errors import SurgeryError
from vit2linear.operator import Operator
from vit2linear.plan import Plan
from vit2linear.probe import example_pixels
from vit2linear.recipe import KEEP, OPERATORS

OVER_CHANNELS = {"ChannelAttention", "ChannelAttentionV2", "XCA"}
"""Modules of timm whose softmax is one over channels."""


@dataclass(frozen=True)
class Audit:
    """Every key of source and student, by what became of it."""

    copied: tuple[str, ...]
    """Bitwise equal to the source."""
    trained: tuple[str, ...]
    """Copied from the source, and changed by distillation."""
    drawn: tuple[str, ...]
    """In the source, but drawn anew rather than copied, whether trained since or not."""
    new: tuple[str, ...]
    """The operators' own weights."""
    dropped: tuple[str, ...]
    """In the source and not in the student, as the plan says."""
    softmax_left: int
    """Sites at which a softmax over pairs of tokens ran in one forward of the student."""


def audit(
    source: Mapping[str, Tensor],
    student: nn.Module,
    plan: Plan,
    trained: bool,
    drawn: Mapping[str, Tensor] | None = None,
) -> Audit:
    """Account for every weight and every softmax.

    Args:
        source: the source's state dict.
        student: the converted model.
        plan: what was to happen.
        trained: whether weights may differ from those that the student started from.
        drawn: the weights that the student started from instead of the source's, by key.

    Raises:
        SurgeryError: the conversion is not what the plan said.
    """
    mine = student.state_dict()
    dropped = tuple(sorted(source.keys() - mine.keys()))
    new = tuple(sorted(mine.keys() - source.keys()))
    shared = [k for k in source if k in mine]
    drawn = drawn or {}
    start = {**source, **drawn}
    equal = {k for k in shared if torch.equal(start[k].cpu(), mine[k].cpu())}
    changed = sorted(set(shared) - equal)
    agreed = tuple(plan.drop_keys)
    missing = [k for k in dropped if not any(k == a or k.startswith(f"{a}.") for a in agreed)]
    if missing:
        raise SurgeryError(f"audit: weights of the source are missing: {_some(missing)}.")
    stray = [k for k in new if ".op." not in k]
    if stray:
        raise SurgeryError(f"audit: new weights outside the operators: {_some(stray)}.")
    if changed and not trained:
        raise SurgeryError(f"audit: nothing was trained, yet weights differ: {_some(changed)}.")
    kept = {s.site.path for s in plan.sites if s.op == KEEP or not OPERATORS.get(s.op).linear}
    ran = softmax_modules(student)
    lost = sorted(path for path in ran if not any(path == k or path.startswith(f"{k}.") for k in kept))
    if lost:
        raise SurgeryError(f"audit: softmax over pairs of tokens ran in {_some(lost)}, where the plan keeps none.")
    found = {k for k in kept if any(path == k or path.startswith(f"{k}.") for path in ran)}
    silent = sorted(s.site.path for s in plan.sites if s.op in (KEEP, "softmax") and s.site.path not in found)
    if silent:
        raise SurgeryError(f"audit: no softmax over pairs of tokens ran in {_some(silent)}, where the plan keeps it.")
    copied = tuple(sorted(equal - drawn.keys()))
    taught = tuple(k for k in changed if k not in drawn)
    return Audit(copied, taught, tuple(sorted(drawn.keys() & mine.keys())), new, dropped, len(found))


def softmax_modules(model: nn.Module) -> set[str]:
    """Paths of the modules with a softmax over pairs of tokens in one forward of a timm model on one black image."""
    return set(softmax_pairs(model, example_pixels(model)))


def softmax_pairs(model: nn.Module, pixels: Float[Tensor, "batch channels height width"]) -> dict[str, tuple[int, int]]:
    """Queries and keys of every softmax over pairs of tokens in one forward of a timm model, by its module's path.

    Not counted: softmaxes of one query (pooling, class attention), over channels, and in a site whose operator is
    linear over features or landmarks.
    """
    counter = _SoftmaxCounter()
    was_training = model.training
    hooks = [
        handle
        for path, module in model.named_modules()
        for handle in (
            module.register_forward_pre_hook(counter.entering(path, module)),
            module.register_forward_hook(counter.leave, always_call=True),
        )
    ]
    try:
        with torch.no_grad(), counter:
            model.eval()(pixels)
    finally:
        model.train(was_training)
        for handle in hooks:
            handle.remove()
    return counter.found


class _SoftmaxCounter(TorchFunctionMode):
    """Knows which modules are running, and notes the innermost one when a softmax over tokens runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, tuple[int, int]] = {}
        self._running: list[tuple[str, nn.Module]] = []

    def entering(self, path: str, module: nn.Module) -> Callable[..., None]:
        return lambda *_: self._running.append((path, module))

    def leave(self, *_: Any) -> None:
        self._running.pop()

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._note(args[0].shape[-2], args[1].shape[-2])
        elif func in (torch.softmax, Tensor.softmax, F.softmax) and args[0].ndim > 1:
            self._note(*args[0].shape[-2:])
        return func(*args, **kwargs)

    def _note(self, queries: int, keys: int) -> None:
        linear = any(isinstance(m, Operator) and m.linear for _, m in self._running)
        channels = any(type(m).__name__ in OVER_CHANNELS for _, m in self._running)
        if min(queries, keys) > 1 and not linear and not channels:
            self.found[self._running[-1][0]] = queries, keys


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
