"""What a step does: the layer-parallel stage ``attention`` and the end-to-end stage ``feature``.

Both see only ``LinearAttention`` modules: the teacher is the source converted with the exact ``softmax`` operator at
the student's sites.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor, nn

from vit2linear.errors import DistillError
from vit2linear.losses import LOSSES, Objective, Outputs
from vit2linear.operator import Operator
from vit2linear.site import LinearAttention, sites_of


def run(model: nn.Module, pixels: Tensor, sites: Mapping[str, LinearAttention], maps: bool = False) -> Outputs:
    """One forward of a timm model with the outputs, and the routing maps, of ``sites`` kept."""
    outputs = Outputs()
    with _captured(sites, outputs), maps_captured(sites if maps else {}, outputs):
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


class Reached(Exception):  # noqa: N818, a signal and no error
    """Raised by a hook: what was wanted of a forward has been computed, and the rest of it is not needed."""


def run_until_reached(model: nn.Module, pixels: Tensor) -> None:
    """A forward without its head, for what hooks see of it; ends where one of them raises ``Reached``."""
    with suppress(Reached):
        last_features(model, pixels)


class Task(ABC):
    """A stage's step: gradients of one batch."""

    fields: ClassVar[frozenset[str]]
    """Of ``Outputs``: what the losses of this stage may read."""

    def __init__(self, teacher: nn.Module, student: nn.Module, objective: Objective) -> None:
        self.teacher = teacher
        self.student = student
        self.objective = objective
        self.student_sites = sites_of(student)
        self.teacher_sites = {path: m for path, m in sites_of(teacher).items() if path in self.student_sites}

    @abstractmethod
    def prepare(self, accelerator: Accelerator) -> None:
        """Get ready for several processes."""

    @abstractmethod
    def backward(self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Leave the gradients of this batch, averaged over processes, in the parameters; return the loss."""


class SiteTask(Task):
    """Stage ``attention``: every site matches the teacher's output on the teacher's own input.

    Inside the teacher's one forward, each student site runs with gradients and its loss is back-propagated at once, so
    only one site's graph is alive; after the last of them the teacher stops. Not wrapped in DDP, whose backward inside
    a forward would desynchronise: gradients are averaged here, in one flat buffer.
    """

    fields = frozenset({"sites", "maps"})

    def prepare(self, accelerator: Accelerator) -> None:
        """Start every process from the main process's weights."""
        if accelerator.num_processes > 1:
            for parameter in self.student.parameters():
                torch.distributed.broadcast(parameter.data, src=0)

    def backward(self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Teacher forward with the students' backward passes inside."""
        losses: list[Tensor] = []
        mine, theirs = Outputs(), Outputs()
        mapped = "maps" in self.objective.needs
        left = set(self.teacher_sites)

        def match(path: str) -> Any:
            def hook(module: LinearAttention, args: Any, kwargs: Any, output: Any) -> None:
                site = self.student_sites[path]
                # The student's backbone does not run, so its grid comes from the teacher's.
                site.grid_ref.grid = module.grid_ref.grid
                with torch.enable_grad():
                    mine.sites[path] = site.kind.answer(args[0], site(*args, **kwargs))
                    theirs.sites[path] = module.kind.answer(args[0], output)
                    loss = self.objective(mine, theirs)
                    if not torch.isfinite(loss):
                        raise DistillError(
                            f"the loss at site {path!r} is {loss.item()}.", "Lower distill.attention.lr."
                        )
                    accelerator.backward(loss / len(self.teacher_sites))
                losses.append(loss.detach())
                for seen in (mine.sites, mine.maps, theirs.sites, theirs.maps):
                    seen.clear()  # one site's graph at a time
                left.discard(path)
                if not left:
                    raise Reached

            return hook

        hooks = [m.register_forward_hook(match(p), with_kwargs=True) for p, m in self.teacher_sites.items()]
        try:
            with (
                torch.no_grad(),
                accelerator.autocast(),
                maps_captured(self.teacher_sites if mapped else {}, theirs),
                maps_captured(self.student_sites if mapped else {}, mine),
            ):
                run_until_reached(self.teacher, pixels)
        finally:
            for hook in hooks:
                hook.remove()
        if accelerator.num_processes > 1:
            _average_gradients(self.student, accelerator)
        return torch.stack(losses).mean()


class ModelTask(Task):
    """Stages ``feature`` and ``task``: the student on its own inputs, end to end."""

    fields = frozenset(field.name for field in dataclasses.fields(Outputs))

    def prepare(self, accelerator: Accelerator) -> None:
        """Wrap forward and loss, so that DDP sees an ordinary module."""
        self._step = accelerator.prepare(_StudentLoss(self.student, self.objective))

    def backward(self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """Teacher forward, student forward, backward."""
        loss = self.loss(accelerator, pixels, labels)
        if not torch.isfinite(loss):
            raise DistillError(f"the loss is {loss.item()}.", "Lower the stage's learning rates.")
        accelerator.backward(loss)
        return loss.detach()

    def loss(self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of a batch."""
        needs = self.objective.needs
        with accelerator.autocast():
            target = Outputs()
            if needs != LOSSES["labels"].needs:  # otherwise the teacher has no say
                with torch.no_grad():
                    target = run(
                        self.teacher, pixels, self.teacher_sites if needs & {"sites", "maps"} else {}, "maps" in needs
                    )
            target.labels = labels
            loss: Tensor = self._step(pixels, target)
        return loss


class _StudentLoss(nn.Module):
    def __init__(self, student: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.student = student
        self.objective = objective

    def forward(self, pixels: Tensor, target: Outputs) -> Tensor:
        sites = sites_of(self.student) if target.sites or target.maps else {}
        return self.objective(run(self.student, pixels, sites, bool(target.maps)), target)


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


@contextmanager
def maps_captured(sites: Mapping[str, LinearAttention], outputs: Outputs) -> Iterator[None]:
    """Keep the routing map of every site that runs meanwhile."""

    def keep(path: str) -> Any:
        def hook(op: Operator, args: Any, _: Any) -> None:
            q, k, _, ctx = args
            outputs.maps[path] = op.map(q, k, ctx)

        return hook

    hooks = [module.op.register_forward_hook(keep(path)) for path, module in sites.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _average_gradients(model: nn.Module, accelerator: Accelerator) -> None:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    flat = accelerator.reduce(torch.cat([g.reshape(-1) for g in gradients]), reduction="mean")
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
