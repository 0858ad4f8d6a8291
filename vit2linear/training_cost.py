"""What steps of training cost, against the work that they cannot do without.

A step is what a stage does with one batch: forward passes, losses, backward passes, clearing the gradients. The
optimiser's update is left out everywhere. *Plain distillation* is a teacher forward without gradients, a student
forward, and the backward pass of everything from the squared error of the outputs: full-model distillation with the
cheapest loss there is, written here and not with the stages' code.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.bench import SOFTMAX, Job, added_mib, in_fresh_process, interleaved
from vit2linear.distill.forward import run
from vit2linear.distill.optimiser import parameter_groups
from vit2linear.distill.stages import TASKS, check_stages, objective_of
from vit2linear.recipe import DistillOptions
from vit2linear.sizes import Size

ATTENTION, FEATURE = "stage attention", "stage feature"
TEACHER, SITES, PLAIN = "teacher", "attentions", "plain distillation"
COMPARED: tuple[tuple[str, tuple[str, ...]], ...] = (
    (ATTENTION, (TEACHER, SITES)),
    (ATTENTION, (PLAIN,)),
    (FEATURE, (PLAIN,)),
)
"""Steps, and the works whose sum they are held against."""


@dataclass(frozen=True)
class Cost:
    """One step against other work."""

    op: str
    size: int
    """Height in pixels."""
    width: int
    """Pixels."""
    step: str
    """``stage attention`` or ``stage feature``."""
    against: str
    """``teacher + attentions`` (its forward without gradients; the student's attentions forward and backward, alone, on
    stored inputs) or ``plain distillation``."""
    unit: Literal["s", "MiB"]
    """Time of a step, or what it adds to the memory at its peak."""
    amount: float
    """Of the step; of times the median."""
    reference: float
    """Of the other work, likewise."""
    ratio: float
    """Step over other work, the median of the rounds' ratios; below 1 the step costs less."""


class Steps:
    """The works that are compared, on one pair of models; each leaves the gradients cleared."""

    def __init__(self, job: Job, name: str, size: Size, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        device = accelerator.device
        self.teacher = job.model(SOFTMAX, size).to(device).requires_grad_(False)
        self.student = job.model(name, size).to(device)
        self.pixels = torch.randn(job.batch_size, self.student.in_chans, *size, device=device)  # type: ignore[call-overload]
        options = check_stages(DistillOptions(), [], int(self.student.num_classes))  # type: ignore[arg-type]
        options = options.at_width(int(self.student.num_features))  # type: ignore[arg-type]
        self._trained: dict[str, list[nn.Parameter]] = {PLAIN: list(self.student.parameters())}
        self._tasks = {}
        for stage, step in (("attention", ATTENTION), ("feature", FEATURE)):
            groups = parameter_groups(self.student, options.stages[stage])
            self._trained[step] = [p for g in groups for p in g["params"]]
            self._tasks[step] = TASKS[stage](self.teacher, self.student, objective_of(options, stage))
            self._tasks[step].prepare(accelerator)
        self._trained[SITES] = self._trained[ATTENTION]

    def __getitem__(self, name: str) -> Callable[[Tensor], None]:
        """A work by its name, from pixels (batch, channels, height, width)."""
        if name == TEACHER:
            return self._teacher_forward
        if name == PLAIN:
            return self._training(PLAIN, self._plain)
        if name == SITES:
            return self._training(SITES, self._replay())
        return self._training(name, lambda pixels: self._tasks[name].backward(self.accelerator, pixels))

    def _training(self, name: str, backward: Callable[[Tensor], object]) -> Callable[[Tensor], None]:
        def step(pixels: Tensor) -> None:
            self.student.requires_grad_(False)
            for parameter in self._trained[name]:
                parameter.requires_grad_(True)
            backward(pixels)
            self.student.zero_grad()

        return step

    def _teacher_forward(self, pixels: Tensor) -> None:
        with torch.no_grad(), self.accelerator.autocast():
            self.teacher(pixels)

    def _plain(self, pixels: Tensor) -> None:
        with self.accelerator.autocast():
            with torch.no_grad():
                target = _output(self.teacher, pixels)
            loss = F.mse_loss(_output(self.student, pixels), target)
        loss.backward()

    def _replay(self) -> Callable[[Tensor], None]:
        """All sites of the student on what the teacher's sites get for ``self.pixels``, each with its backward."""
        stored: dict[str, tuple[Any, Any, Tensor]] = {}
        task = self._tasks[ATTENTION]

        def keep(path: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
                task.student_sites[path].grid_ref.grid = module.grid_ref.grid
                # Whatever goes into the backward pass costs the same: the teacher's answer will do.
                stored[path] = args, kwargs, module.kind.answer(args[0], output).clone()

            return hook

        hooks = [m.register_forward_hook(keep(path), with_kwargs=True) for path, m in task.teacher_sites.items()]
        self._teacher_forward(self.pixels)
        for hook in hooks:
            hook.remove()

        def replay(_: Tensor) -> None:
            for path, (args, kwargs, gradient) in stored.items():
                site = task.student_sites[path]
                with self.accelerator.autocast():
                    answer = site.kind.answer(args[0], site(*args, **kwargs))
                answer.backward(gradient.to(answer.dtype))

        return replay


def training_cost(
    job: Job, name: str, size: Size, accelerator: Accelerator, rounds: int = 9, memory: bool = True
) -> list[Cost]:
    """Steps of the stages under one variant of ``job`` at ``size`` pixels, against the works in ``COMPARED``.

    Times are of one process and one loop, after two rounds of warming up; the memory of each step is that of a fresh
    process (CPU) or of the device.

    Args:
        job: architecture, variants and batch size.
        name: of the variant that is the student.
        size: height and width in pixels.
        accelerator: where, and in what precision.
        rounds: interleaved, that count.
        memory: measure it too, for stage ``attention`` against plain distillation.
    """
    steps = Steps(job, name, size, accelerator)
    seconds = interleaved({w: steps[w] for w in (ATTENTION, TEACHER, SITES, FEATURE, PLAIN)}, steps.pixels, rounds)
    del steps
    found = []
    for step, works in COMPARED:
        other = [sum(parts) for parts in zip(*(seconds[w] for w in works), strict=True)]
        ratio = statistics.median(a / b for a, b in zip(seconds[step], other, strict=True))
        amounts = statistics.median(seconds[step]), statistics.median(other)
        found.append(Cost(name, *size, step, " + ".join(works), "s", *amounts, ratio))
    if memory:
        mine, other_mib = (step_mib(job, name, size, step, accelerator) for step in (ATTENTION, PLAIN))
        found.append(Cost(name, *size, ATTENTION, PLAIN, "MiB", mine, other_mib, mine / other_mib))
    return found


def step_mib(job: Job, name: str, size: Size, step: str, accelerator: Accelerator) -> float:
    """MiB that one step adds at its peak to imported libraries and loaded models, gradients included."""
    if accelerator.device.type == "cuda":
        return _peak_of_step(job, name, size, step, accelerator)
    return in_fresh_process(_peak_of_step, job, name, size, step)


def _peak_of_step(job: Job, name: str, size: Size, step: str, accelerator: Accelerator | None = None) -> float:
    steps = Steps(job, name, size, accelerator or Accelerator(cpu=True))
    work = steps[step]
    return added_mib(lambda: work(steps.pixels), steps.accelerator.device)


def _output(model: nn.Module, pixels: Tensor) -> Tensor:
    outputs = run(model, pixels, {})
    answer = outputs.pooled if outputs.logits is None else outputs.logits
    assert answer is not None
    return answer
