"""``convert``: the only file that knows the order of the steps.

prepare (the dry run stops here), probe the images - load, choose the sites that keep the
softmax, surgery, calibrate, stage ``attention``, stage ``feature``, audit, evaluate, write, reload and compare, rename.
"""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch import nn

import vit2linear
from vit2linear import artifact, card, hybrid, model
from vit2linear.artifact import Artifact
from vit2linear.audit import audit
from vit2linear.calibration.calibrate import CalibrationReport, calibrate
from vit2linear.data import train_batches
from vit2linear.devices import accelerator_for
from vit2linear.distill.loop import StageReport, run_stage, split_steps
from vit2linear.errors import DataError, RecipeError
from vit2linear.evaluation import Judge, open_judge
from vit2linear.initial import drawn_weights, start_words
from vit2linear.prepare import Prepared, prepare
from vit2linear.probe import plan_to_json
from vit2linear.recipe import Recipe, to_toml
from vit2linear.reporting import Reporter
from vit2linear.surgery import apply_plan
from vit2linear.views import train_view

CHECK_IMAGES = 512
"""Training images that decide between last and averaged weights."""
MONITOR_IMAGES = 2000
"""Between stages at most so many images are evaluated."""


def convert(
    recipe: Recipe, *, overwrite: bool = False, ignore_labels: bool = False, reporter: Reporter | None = None
) -> Artifact:
    """Convert a pretrained Softmax ViT and write an artifact.

    Args:
        recipe: the whole request; see ``Recipe``.
        overwrite: replace an artifact in the output folder, at the last moment.
        ignore_labels: do not match the images' classes with the model's.
        reporter: told about progress; default: the ``vit2linear`` logger.

    Returns:
        The artifact, with its report.

    Raises:
        Vit2LinearError: see ``vit2linear.errors``. Nothing half-written is left behind, whatever happens.
    """
    prepared = prepare(recipe, overwrite)
    recipe, plan, steps = prepared.recipe, prepared.plan, prepared.recipe.distill.steps or 0
    accelerator = accelerator_for(recipe)
    if recipe.distill.batch_size % accelerator.num_processes:
        shares = f"{accelerator.num_processes} processes cannot share evenly"
        raise RecipeError(f"distill.batch_size is {recipe.distill.batch_size}, which {shares}.")
    if reporter is None or not accelerator.is_main_process:
        reporter = Reporter()
    for note in prepared.notes:
        reporter.say(note)
    judge = _judge(prepared, accelerator.device, ignore_labels)
    learns = [name for name, stage in recipe.distill.stages.items() if stage.share and "labels" in stage.losses]
    if steps and learns and judge.class_map is None:
        raise DataError(
            f"{recipe.data.path} has no classes of the model, which the loss 'labels' of stage {learns[0]!r} learns.",
            "Give labelled images of the model's classes, or leave the loss out.",
        )
    set_seed(recipe.run.seed)
    loaded = model.load(prepared.ref, prepared.spec)
    kept: hybrid.KeepReport | None = None
    if recipe.keep_softmax:
        recipe, kept = hybrid.keep_costliest(loaded.module, recipe, plan, judge, reporter)
        prepared = prepared.replanned(recipe)
        plan = prepared.plan
    source = loaded.module.state_dict()
    teacher = apply_plan(loaded.module, plan.with_operator("softmax")).to(accelerator.device).eval()
    student = apply_plan(loaded.module, plan).to(accelerator.device).eval()
    drawn = drawn_weights(loaded.module, prepared.spec, plan, recipe.source, recipe.run.seed)
    student.load_state_dict(drawn, strict=False)
    todo = split_steps(recipe.distill, steps)
    moments = _moments(recipe, todo)
    calibrated: dict[str, CalibrationReport] = {}
    stages: list[StageReport] = []
    history: list[dict[str, Any]] = []
    for moment in moments:
        stage = moment.removeprefix("after stage ")
        if moment.startswith("after calibration"):
            pixels, _ = judge.sample(recipe.distill.calibration.images or 0)
            calibrated[moment] = calibrate(teacher, student, pixels, recipe.distill.calibration, reporter)
        elif stage in todo:
            stages.append(_stage(stage, todo[stage], teacher, student, prepared, judge, accelerator, reporter))
        if accelerator.is_main_process:
            report = judge(teacher, student, None if moment == moments[-1] else MONITOR_IMAGES)
            reporter.say(f"{moment}: {report.summary}")
            history.append({"moment": moment, "images": report.images, "student": dataclasses.asdict(report.student)})
    for found in gather_object([judge.bad.found]):
        judge.bad.found.update(found)
    if not accelerator.is_main_process:
        return Artifact(f"local-dir:{prepared.output}", {}, prepared.output)
    audited = audit(source, student, plan, trained=bool(stages or calibrated), drawn=drawn)
    licence = card.license_of(prepared.ref, prepared.spec.pretrained_cfg, recipe.output.license)
    if licence.get("license_name") == "unknown":
        reporter.say("The source states no licence, so the card says 'unknown'; state it with --license.")
    if judge.bad.summary:
        reporter.say(judge.bad.summary)
    bad = {"count": len(judge.bad.found), "images": judge.bad.found}
    start = start_words(recipe.source, not prepared.num_classes)
    record = {
        "format": 1,
        "vit2linear": vit2linear.__version__,
        "versions": {p: version(p) for p in ("torch", "timm", "accelerate")} | {"python": platform.python_version()},
        "source": {
            **prepared.ref.record(),
            "architecture": prepared.spec.architecture,
            "dtype": loaded.spec.dtype,
            **licence,
        },
        "data": {"path": recipe.data.path, "held_out": judge.sets.held_out, "ignore_labels": ignore_labels, "bad": bad},
        "plan": plan_to_json(plan, prepared.probe),
        "start": {"init": recipe.source.init, "head": recipe.source.head, "words": start},
        "keep_softmax": dataclasses.asdict(kept) if kept is not None else None,
        "audit": dataclasses.asdict(audited),
        "calibration": {moment: dataclasses.asdict(c) for moment, c in calibrated.items()},
        "stages": [dataclasses.asdict(s) for s in stages],
        "history": history,
        "evaluation": dataclasses.asdict(report),
    }
    # Where this run wrote its output is nobody else's business, and the recipe is to run again elsewhere.
    portable = dataclasses.replace(recipe, output=dataclasses.replace(recipe.output, dir=None))
    fitted = [c.images for c in calibrated.values()]
    text = card.render(prepared.output.name, prepared.ref, licence, plan, stages, report, start, fitted)
    return artifact.write(prepared.output, student, prepared.data_config, to_toml(portable), record, text)


def _moments(recipe: Recipe, steps: dict[str, int]) -> list[str]:
    """When the student is evaluated: at the start and after everything that changes it."""
    calibration = recipe.distill.calibration
    moments = ["before training"]
    for stage, count in steps.items():
        if calibration.images and stage in calibration.before:
            again = f" before stage {stage}" if "after calibration" in moments else ""
            moments.append(f"after calibration{again}")
        moments += [f"after stage {stage}"] if count else []
    return moments


def _stage(
    name: str,
    steps: int,
    teacher: nn.Module,
    student: nn.Module,
    prepared: Prepared,
    judge: Judge,
    accelerator: Accelerator,
    reporter: Reporter,
) -> StageReport:
    options, run = prepared.recipe.distill, prepared.recipe.run
    batches = train_batches(
        judge.sets.train,
        train_view(prepared.data_config, options.augment),
        options.batch_size,
        steps,
        # Each stage sees its own order of the images.
        run.seed + len(name),
        prepared.recipe.data.workers,
        accelerator.process_index,
        accelerator.num_processes,
        bad=judge.bad,
    )
    labelled = ((pixels, judge.as_model_classes(classes)) for pixels, classes in batches)
    check = judge.sample(CHECK_IMAGES) if options.ema else None
    return run_stage(name, teacher, student, labelled, steps, options, accelerator, reporter, check)


def _judge(prepared: Prepared, device: torch.device, ignore_labels: bool) -> Judge:
    recipe, cfg = prepared.recipe, prepared.spec.pretrained_cfg
    return open_judge(
        str(recipe.data.path),
        prepared.data_config,
        prepared.num_classes,
        cfg.get("label_names"),
        ignore_labels=ignore_labels,
        batch_size=recipe.distill.batch_size,
        workers=recipe.data.workers,
        limit=recipe.data.eval_samples,
        device=device,
        seed=recipe.run.seed,
        max_bad=recipe.data.max_bad,
    )
