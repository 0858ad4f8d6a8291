"""What a step does: the layer-parallel stage ``attention`` and the end-to-end stage ``feature``.

Both see only ``LinearAttention`` modules: the teacher is the source converted with the exact ``softmax`` operator at
the student's sites.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.errors import DistillError
from vit2linear.losses import Outputs, total_loss
from vit2linear.site import LinearAttention, sites_of


def run(model: nn.Module, pixels: Tensor, sites: Mapping[str, LinearAttention]) -> Outputs:
    """One forward of a timm model with the outputs of ``sites`` kept."""
    outputs = Outputs()
    with _captured(sites, outputs):
        features = last_features(model, pixels)
    outputs.tokens = _tokens(model, features)
    outputs.pooled = pooled_feature(model, features)
    if model.num_classes:
        outputs.logits = model.forward_head(features)  # type: ignore[operator]
    return outputs


def has_head(model: nn.Module) -> bool:
    """Whether ``forward_head`` works: timm's encoders for language models have neither it nor ``get_classifier``."""
    return hasattr(model, "get_classifier")


def last_features(model: nn.Module, pixels: Tensor) -> Any:
    """What the head reads; of an encoder without one, what it gives out."""
    return model.forward_features(pixels) if has_head(model) else model(pixels)  # type: ignore[operator]


def pooled_feature(model: nn.Module, features: Any) -> Tensor:
    """What the last layer of the head reads; of an encoder without one, the mean token."""
    if not has_head(model):
        return _tokens(model, features)[0].mean(1)
    feature: Tensor = model.forward_head(features, pre_logits=True)  # type: ignore[operator]
    return feature


def _tokens(model: nn.Module, features: Any) -> tuple[Float[Tensor, "batch _ _"], ...]:
    """The last features, one tensor of tokens for each branch of the model: mostly one."""
    branches = features if isinstance(features, list | tuple) else (features,)
    return tuple(_as_tokens(t, getattr(model, "output_fmt", "NCHW")) for t in branches)


def _as_tokens(features: Tensor, layout: str) -> Float[Tensor, "batch tokens channels"]:
    """Features as tokens, where timm leaves them as a map in the layout that the model names."""
    if features.ndim == 2:
        return features[:, None]
    if features.ndim == 3:
        return features
    return features.flatten(1, 2) if layout == "NHWC" else features.flatten(2).transpose(1, 2)


class Task(ABC):
    """A stage's step: gradients of one batch."""

    def __init__(self, teacher: nn.Module, student: nn.Module, losses: Mapping[str, float]) -> None:
        self.teacher = teacher
        self.student = student
        self.losses = losses
        self.student_sites = sites_of(student)
        self.teacher_sites = {path: m for path, m in sites_of(teacher).items() if path in self.student_sites}

    def prepare(self, accelerator: Accelerator) -> None:
        """Start every process from the main process's weights."""
        if accelerator.num_processes > 1:
            for tensor in (*self.student.parameters(), *self.student.buffers()):
                torch.distributed.broadcast(tensor.data, src=0)

    @abstractmethod
    def backward(self, accelerator: Accelerator, pixels: Tensor) -> Tensor:
        """Leave the gradients of this batch in the parameters and return the loss, both averaged over processes.

        Raises:
            DistillError: a loss that is not finite, on every process even if it was met on one.
        """


class SiteTask(Task):
    """Stage ``attention``: every site matches the teacher's output on the teacher's own input.

    Inside the teacher's one forward, each student site runs with gradients and its loss is back-propagated at once, so
    only one site's graph is alive.
    """

    def backward(self, accelerator: Accelerator, pixels: Tensor) -> Tensor:
        """Teacher forward with the students' backward passes inside."""
        losses: dict[str, Tensor] = {}

        def match(path: str) -> Any:
            def hook(module: LinearAttention, args: Any, kwargs: Any, output: Any) -> None:
                site = self.student_sites[path]
                # The student's backbone does not run, so its grid comes from the teacher's.
                site.grid_ref.grid = module.grid_ref.grid
                with torch.enable_grad():
                    mine = Outputs(sites={path: site.kind.answer(args[0], site(*args, **kwargs))})
                    target = Outputs(sites={path: module.kind.answer(args[0], output)})
                    loss = total_loss(self.losses, mine, target)
                    accelerator.backward(loss / len(self.teacher_sites))
                losses[path] = loss.detach()

            return hook

        hooks = [m.register_forward_hook(match(p), with_kwargs=True) for p, m in self.teacher_sites.items()]
        try:
            with torch.no_grad(), accelerator.autocast():
                self.teacher.forward_features(pixels)  # type: ignore[operator]
        finally:
            for hook in hooks:
                hook.remove()
        found = average(self.student, torch.stack([*losses.values()]), accelerator)
        for path, loss in zip(losses, found.tolist(), strict=True):
            if not math.isfinite(loss):
                raise DistillError(f"the loss at site {path!r} is {loss}.", "Lower distill.attention.lr.")
        return found.mean()


class ModelTask(Task):
    """Stage ``feature``: the student on its own inputs, end to end."""

    def backward(self, accelerator: Accelerator, pixels: Tensor) -> Tensor:
        """Teacher forward, student forward, backward."""
        with accelerator.autocast():
            with torch.no_grad():
                target = run(self.teacher, pixels, self.teacher_sites)
            loss = total_loss(self.losses, run(self.student, pixels, self.student_sites), target)
        accelerator.backward(loss)
        found = average(self.student, loss.detach(), accelerator)
        if not torch.isfinite(found):
            raise DistillError(f"the loss is {found.item()}.", "Lower the learning rates of distill.feature.")
        return found


@contextmanager
def _captured(sites: Mapping[str, LinearAttention], outputs: Outputs) -> Iterator[None]:
    def keep(path: str) -> Any:
        def hook(module: LinearAttention, args: Any, output: Any) -> None:
            outputs.sites[path] = module.kind.answer(args[0], output)

        return hook

    hooks = [module.register_forward_hook(keep(path)) for path, module in sites.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def average(model: nn.Module, losses: Tensor, accelerator: Accelerator) -> Tensor:
    """Average gradients in place, and losses, over processes: one all-reduce of one flat buffer.

    Not left to DDP, which can take neither a backward inside a forward, as in stage ``attention``, nor a parameter that
    got no gradient. Such a one ends here as in one process with all the images: it counts as zero where another process
    has a gradient, and stays without where none has.

    Args:
        model: the same parameters require gradients on every process.
        losses: any shape, detached.

    Returns:
        The mean losses, the same on every process.
    """
    if accelerator.num_processes == 1:
        return losses
    trained = [p for p in model.parameters() if p.requires_grad]
    reached = losses.new_tensor([p.grad is not None for p in trained])
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
    parts = [losses, reached, *gradients]
    flat = torch.cat([t.flatten() for t in parts])
    torch.distributed.all_reduce(flat)
    flat /= accelerator.num_processes
    found, anywhere, *means = flat.split([t.numel() for t in parts])
    for parameter, gradient, mean, used in zip(trained, gradients, means, anywhere.tolist(), strict=True):
        parameter.grad = gradient.copy_(mean.view_as(gradient)) if used else None
    mean_losses: Tensor = found.view_as(losses)
    return mean_losses
