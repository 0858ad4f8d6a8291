"""What a prepared conversion works with: devices, images, teacher and student."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from vit2linear.devices import accelerator_for
from vit2linear.distill.economies import check_compiles
from vit2linear.errors import DataError, RecipeError
from vit2linear.evaluation import ImageRequest, Judge, open_judge
from vit2linear.images import ImageOptions
from vit2linear.initial import drawn_weights
from vit2linear.prepare import Prepared
from vit2linear.recipe import Recipe
from vit2linear.reporting import Reporter
from vit2linear.surgery import apply_plan


def checked_accelerator(recipe: Recipe) -> Accelerator:
    """Devices, processes and precision.

    Raises:
        RecipeError: they cannot do what is asked.
    """
    accelerator, batch = accelerator_for(recipe), recipe.distill.batch_size
    if batch % accelerator.num_processes:
        shares = f"{accelerator.num_processes} processes cannot share evenly"
        raise RecipeError(f"distill.batch_size is {batch}, which {shares}.")
    if recipe.run.compile:
        check_compiles(accelerator.device)
    return accelerator


def judge_of(prepared: Prepared, device: torch.device, ignore_labels: bool, reporter: Reporter) -> Judge:
    """The images, opened.

    Raises:
        DataError: a stage learns labels that they do not have.
    """
    recipe, data = prepared.recipe, prepared.recipe.data
    options = ImageOptions(data.split, data.val_split, ignore_labels, data.streaming, recipe.run.seed)
    judge = open_judge(
        ImageRequest(data.path or (), options, prepared.class_map),
        prepared.data_config,
        prepared.num_classes,
        prepared.spec.pretrained_cfg.get("label_names"),
        batch_size=recipe.distill.batch_size,
        workers=data.workers,
        limit=data.eval_samples,
        device=device,
        max_bad=data.max_bad,
        reporter=reporter,
    )
    learns = [name for name, stage in recipe.distill.stages.items() if stage.share and "labels" in stage.losses]
    if recipe.distill.steps and learns and judge.class_map is None:
        raise DataError(
            f"{judge.sets.validation.name} has no classes of the model, which the loss 'labels' of stage {learns[0]!r} "
            "learns.",
            "Give labelled images of the model's classes, name them with --class-map, or leave the loss out.",
        )
    return judge


def models_of(
    source: nn.Module, prepared: Prepared, device: torch.device
) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    """Teacher, student before training, and what of the student is drawn anew; the source is not changed."""
    recipe, plan = prepared.recipe, prepared.plan
    teacher = apply_plan(source, plan.with_operator("softmax")).to(device).eval()
    student = apply_plan(source, plan).to(device).eval()
    drawn = drawn_weights(source, prepared.spec, plan, recipe.source, recipe.run.seed)
    student.load_state_dict(drawn, strict=False)
    return teacher, student, drawn
