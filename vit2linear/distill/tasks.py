"""What a step does: the layer-parallel stage ``attention`` and the end-to-end stage ``feature``.

Both see only ``LinearAttention`` modules: the teacher is the source converted with the exact ``softmax`` operator at
the student's sites.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vit2linear.distill.forward import Reached, maps_captured, run, run_until_reached
from vit2linear.errors import NotFiniteError
from vit2linear.losses import Objective, Outputs
from vit2linear.site import LinearAttention, sites_of


class Task(ABC):
    """A stage's step: gradients of one batch."""

    fields: ClassVar[frozenset[str]]
    """Of ``Outputs``: what the losses of this stage may read."""
    remedy: ClassVar[str]
    """What to do about losses that are not finite."""

    def __init__(self, teacher: nn.Module, student: nn.Module, objective: Objective) -> None:
        self.teacher = teacher
        self.student = student
        self.objective = objective
        self.student_sites = sites_of(student)
        self.teacher_sites = {path: m for path, m in sites_of(teacher).items() if path in self.student_sites}

    def prepare(self, accelerator: Accelerator) -> None:
        """Start every process from the main process's weights."""
        if accelerator.num_processes > 1:
            for tensor in (*self.student.parameters(), *self.student.buffers()):
                torch.distributed.broadcast(tensor.data, src=0)

    def backward(
        self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None, parts: int = 1
    ) -> Tensor:
        """Leave the gradients of this batch in the parameters and return the loss, both averaged over processes.

        Args:
            accelerator: devices, processes, precision.
            pixels: this process's images of the step.
            labels: the model's classes, where losses read them.
            parts: the images go through in so many parts, one after the other, and their gradients add up.

        Raises:
            NotFiniteError: a loss, on every process even if it was met on one.
        """
        split = zip(pixels.chunk(parts), [None] * parts if labels is None else labels.chunk(parts), strict=False)
        found = [self.accumulate(accelerator, *part, len(part[0]) / len(pixels)) for part in split]
        names = [*found[0]]
        losses = average(
            self.student, torch.stack([torch.stack([part[n] for part in found]).sum(0) for n in names]), accelerator
        )
        for name, loss in zip(names, losses.tolist(), strict=True):
            if not math.isfinite(loss):
                where = f" at site {name!r}" if name else ""
                raise NotFiniteError(f"the loss{where} is {loss}.", self.remedy)
        return losses.mean()

    @abstractmethod
    def accumulate(
        self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None, share: float
    ) -> dict[str, Tensor]:
        """Add ``share`` of the gradients of these images to the parameters.

        Returns:
            ``share`` of every loss: by site, or one without a name.
        """


class SiteTask(Task):
    """Stage ``attention``: every site matches the teacher's output on the teacher's own input.

    Inside the teacher's one forward, each student site runs with gradients and its loss is back-propagated at once, so
    only one site's graph is alive; after the last of them the teacher stops.
    """

    fields = frozenset({"sites", "maps"})
    remedy = "Lower distill.attention.lr."

    def accumulate(
        self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None, share: float
    ) -> dict[str, Tensor]:
        """Teacher forward with the students' backward passes inside."""
        losses: dict[str, Tensor] = {}
        mine, theirs = Outputs(), Outputs()
        mapped = "maps" in self.objective.needs

        def match(path: str) -> Any:
            def hook(module: LinearAttention, args: Any, kwargs: Any, output: Any) -> None:
                site = self.student_sites[path]
                # The student's backbone does not run, so its grid comes from the teacher's.
                site.grid_ref.grid = module.grid_ref.grid
                with torch.enable_grad():
                    mine.sites[path] = site.kind.answer(args[0], site(*args, **kwargs))
                    theirs.sites[path] = module.kind.answer(args[0], output)
                    loss = share * self.objective(mine, theirs)
                    accelerator.backward(loss / len(self.teacher_sites))
                losses[path] = loss.detach()
                for seen in (mine.sites, mine.maps, theirs.sites, theirs.maps):
                    seen.clear()  # one site's graph at a time
                if len(losses) == len(self.teacher_sites):
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
        return losses


class ModelTask(Task):
    """Stages ``feature`` and ``task``: the student on its own inputs, end to end."""

    fields = frozenset(field.name for field in dataclasses.fields(Outputs))
    remedy = "Lower the stage's learning rates."

    def accumulate(
        self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None, share: float
    ) -> dict[str, Tensor]:
        """Teacher forward, student forward, backward."""
        loss = share * self.loss(accelerator, pixels, labels)
        accelerator.backward(loss)
        return {"": loss.detach()}

    def loss(self, accelerator: Accelerator, pixels: Tensor, labels: Tensor | None = None) -> Tensor:
        """The loss of a batch, on this process alone."""
        needs = self.objective.needs
        mapped, captured = "maps" in needs, bool(needs & {"sites", "maps"})
        with accelerator.autocast():
            target = Outputs()
            if self.objective.weights.keys() != {"labels"}:  # otherwise the teacher has no say
                with torch.no_grad():
                    target = run(self.teacher, pixels, self.teacher_sites if captured else {}, mapped)
            target.labels = labels
            return self.objective(run(self.student, pixels, self.student_sites if captured else {}, mapped), target)


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
