"""Expected memory and arithmetic of the stages, before a weight is read: one step of each, run on the meta device.

The formula, for one process and in float32::

    memory = weights + optimiser + step
    weights   = 4 bytes x (parameters of the source + parameters of the student)
    optimiser = 8 bytes x trained parameters, and 4 bytes x parameters of the student for averaged weights
    step      = the most that lives at any moment of a step: gradients, activations and what computing them needs
    time      = steps x flops of a step / flops that the device does in a second

The step is counted and not guessed: the stage's own code runs with the right number of images on tensors that have
shapes only. Autocast needs less. On top come libraries, images and the loader's processes; on the CPU also the source
itself, and memory that the allocator does not give back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from vit2linear import model
from vit2linear.distill.economies import blocks_recomputed
from vit2linear.distill.optimiser import parameter_groups
from vit2linear.distill.stages import TASKS, objective_of, split_steps
from vit2linear.distill.tasks import ModelTask
from vit2linear.plan import Plan
from vit2linear.prepare import Prepared
from vit2linear.probe import example_pixels
from vit2linear.recipe import DistillOptions
from vit2linear.surgery import apply_plan


@dataclass(frozen=True)
class Expected:
    """One stage on one process."""

    stage: str
    steps: int
    weights: int
    """Bytes of both models."""
    optimiser: int
    """Bytes of AdamW's two moments, and of averaged weights."""
    step: int
    """Bytes that a step adds at its peak: gradients, activations."""
    flops: int
    """Floating-point operations of a step, forward and backward, of both models."""

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return self.weights + self.optimiser + self.step

    @property
    def words(self) -> str:
        """One line."""
        return (
            f"stage {self.stage}: {self.memory / 2**20:,.0f} MiB in float32 (weights {self.weights / 2**20:,.0f}, "
            f"optimiser {self.optimiser / 2**20:,.0f}, step {self.step / 2**20:,.0f}), "
            f"{self.steps} steps of {self.flops / 1e12:.3g} TFLOP"
        )


def expected(prepared: Prepared, processes: int = 1) -> tuple[Expected, ...]:
    """Every stage that has steps, on each of so many processes; no weight is read.

    Args:
        prepared: recipe and plan.
        processes: share the images of a step.
    """
    recipe, skeleton = prepared.recipe, model.skeleton(prepared.spec)
    return tuple(
        expected_stage(skeleton, prepared.plan, name, steps, recipe.distill, processes, recipe.run.grad_checkpointing)
        for name, steps in split_steps(recipe.distill, recipe.distill.steps or 0).items()
        if steps
    )


def expected_stage(
    skeleton: nn.Module,
    plan: Plan,
    name: str,
    steps: int,
    options: DistillOptions,
    processes: int = 1,
    grad_checkpointing: bool = False,
) -> Expected:
    """One stage of a model on the meta device, which is not changed.

    Args:
        skeleton: the source on the meta device.
        plan: of the conversion.
        name: of the stage.
        steps: optimiser steps.
        options: learning rates filled in (``at_width``), batch size and parts of a step.
        processes: share the images of a step.
        grad_checkpointing: whether blocks are computed again in the backward pass.
    """
    teacher = apply_plan(skeleton, plan.with_operator("softmax")).eval().requires_grad_(False)
    student = apply_plan(skeleton, plan).eval().requires_grad_(False)
    trained = [p for g in parameter_groups(student, options.stages[name]) for p in g["params"]]
    for parameter in trained:
        parameter.requires_grad_(True)
    task = TASKS[name](teacher, student, objective_of(options, name))
    parts = options.grad_accum_steps
    images = -(-options.batch_size // processes // parts)
    pixels = example_pixels(skeleton).expand(images, -1, -1, -1).contiguous()
    labels = torch.zeros(images, dtype=torch.long, device="meta")
    tensors = [*teacher.parameters(), *teacher.buffers(), *student.parameters(), *student.buffers()]
    with (
        blocks_recomputed(student) if grad_checkpointing else nullcontext(),
        torch.enable_grad(),
        _FusedAttention(),
        _Tally(tensors) as tally,
    ):
        for _ in range(min(parts, 2)):  # from the second part on there are gradients already
            task.accumulate(_OnMeta(), pixels, labels, 1.0)
    averages = options.ema > 0 and isinstance(task, ModelTask)
    gradients = _bytes(trained)
    return Expected(
        name,
        steps,
        _bytes(tensors),
        2 * gradients + (_bytes(student.state_dict().values()) if averages else 0),
        max(tally.peak, 2 * gradients if processes > 1 else 0),  # they are averaged in one flat buffer
        tally.flops * parts // min(parts, 2),
    )


class _OnMeta(Accelerator):  # type: ignore[misc]
    """What a task asks of accelerate, where there is no device."""

    def __init__(self) -> None:
        pass

    def autocast(self, autocast_handler: Any = None) -> Any:
        return nullcontext()

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        loss.backward()


class _FusedAttention(TorchFunctionMode):
    """Softmax attention as devices compute it, without a matrix over pairs of tokens; on meta, torch would make one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not kwargs.keys() - {
            "attn_mask",
            "dropout_p",
            "is_causal",
            "scale",
        }:
            mask, shapes = kwargs.get("attn_mask"), [t.shape for t in args]
            alike = all(len(shape) == 4 and shape[-1] == shapes[0][-1] for shape in shapes)
            if alike and (mask is None or not mask.requires_grad):
                return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]
        return func(*args, **kwargs)


class _Tally(TorchDispatchMode):
    """Counts what is computed meanwhile: the most bytes that are alive at a time, and floating-point operations.

    ``FlopCounterMode`` beside it would keep alive what is computed again in the backward pass.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes = {t.untyped_storage()._cdata: 0 for t in known}
        self._now = self.peak = self.flops = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        self.peak = max(self.peak, self._now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += storage.nbytes()
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def to_json(found: Iterable[Expected]) -> list[dict[str, Any]]:
    """Plain values, the sum included."""
    return [{**asdict(e), "memory": e.memory} for e in found]
