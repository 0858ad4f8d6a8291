"""Proof, not trust: what became of every weight, and how many softmax attentions are left.

*dropped* must be empty, *new* lies under ``.op.``, *copied* is bitwise equal; and one forward under a counter of N x N
softmax self-attention finds exactly the sites that were kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from vit2linear.attention import LinearAttention, sites_of
from vit2linear.errors import SurgeryError
from vit2linear.recipe import KEEP
from vit2linear.surgery import Plan


@dataclass(frozen=True)
class Audit:
    """Every key of source and student, by what became of it."""

    copied: tuple[str, ...]
    """Bitwise equal to the source."""
    trained: tuple[str, ...]
    """In the source, and changed by distillation."""
    new: tuple[str, ...]
    """The operators' own weights."""
    dropped: tuple[str, ...]
    """In the source and not in the student."""
    softmax_left: int
    """N x N softmax self-attentions in one forward of the student."""


def audit(source: Mapping[str, Tensor], student: nn.Module, plan: Plan, trained: bool) -> Audit:
    """Account for every weight and every softmax.

    Args:
        source: the source's state dict.
        student: the converted model.
        plan: what was to happen.
        trained: whether weights may differ from the source at all.

    Raises:
        SurgeryError: the conversion is not what the plan said.
    """
    mine = student.state_dict()
    dropped = tuple(sorted(source.keys() - mine.keys()))
    new = tuple(sorted(mine.keys() - source.keys()))
    shared = [k for k in source if k in mine]
    equal = [k for k in shared if torch.equal(source[k].cpu(), mine[k].cpu())]
    changed = tuple(sorted(set(shared) - set(equal)))
    if dropped:
        raise SurgeryError(f"audit: weights of the source are missing: {_some(dropped)}.")
    stray = [k for k in new if ".op." not in k]
    if stray:
        raise SurgeryError(f"audit: new weights outside the operators: {_some(stray)}.")
    if changed and not trained:
        raise SurgeryError(f"audit: nothing was trained, yet weights differ: {_some(changed)}.")
    left = count_softmax(student)
    expected = sum(s.op in (KEEP, "softmax") for s in plan.sites)
    if left != expected:
        raise SurgeryError(f"audit: {left} N x N softmax attentions ran, but the plan keeps {expected}.")
    return Audit(tuple(sorted(equal)), changed, new, dropped, left)


def count_softmax(model: nn.Module) -> int:
    """N x N softmax self-attentions in one forward of a timm model on one black image."""
    parameter = next(model.parameters())
    size = model.pretrained_cfg["input_size"]  # type: ignore[index]
    traits = getattr(model, "_traits", {})
    height, width = traits.get("img_size") or size[-2:]
    channels = int(getattr(model, "in_chans", size[0]))
    pixels = torch.zeros(1, channels, height, width, device=parameter.device, dtype=parameter.dtype)
    counter = _SoftmaxCounter()
    was_training = model.training
    hooks = [
        handle
        for site in sites_of(model).values()
        for handle in (
            site.register_forward_pre_hook(counter.enter),
            site.register_forward_hook(counter.leave),
        )
    ]
    try:
        with torch.no_grad(), counter:
            model.eval()(pixels)
    finally:
        model.train(was_training)
        for handle in hooks:
            handle.remove()
    return counter.count


class _SoftmaxCounter(TorchFunctionMode):
    """Counts softmaxes over a square of tokens, and fused attentions with as many queries as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._site: LinearAttention | None = None
        self._tokens = 0

    def enter(self, module: LinearAttention, args: Any) -> None:
        self._site, self._tokens = module, args[0].shape[1]

    def leave(self, module: LinearAttention, args: Any, output: Any) -> None:
        self._site = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.count += args[0].shape[-2] == args[1].shape[-2]
        elif func in (torch.softmax, Tensor.softmax, F.softmax):
            rows, columns = args[0].shape[-2:] if args[0].ndim > 1 else (0, 1)
            # In a converted site a square softmax may be one over features or landmarks: only tokens count.
            elsewhere = self._site is not None and (columns != self._tokens or self._site.op.linear)
            self.count += rows == columns and not elsewhere
        return func(*args, **kwargs)


def _some(keys: Iterable[str]) -> str:
    names = list(keys)
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
