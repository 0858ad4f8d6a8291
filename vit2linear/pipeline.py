"""``convert``: the only file that knows the order of the steps.

prepare (the dry run stops here), lock the output, probe the images - load, choose the sites that keep the softmax,
surgery - then moment by moment: calibrate or train a stage, checkpoint, evaluate - audit, write, reload and compare,
rename. A resumed run goes the same way and leaves out what its checkpoint has.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

from accelerate.utils import gather_object, set_seed

from vit2linear import artifact, hybrid, licence, model
from vit2linear.artifact import Artifact
from vit2linear.audit import audit
from vit2linear.devices import processes_together
from vit2linear.errors import NotFiniteError, StoppedError
from vit2linear.interrupt import Interrupts
from vit2linear.journal import Journal, refuse_changes, settings_of
from vit2linear.moments import Course, moments_of
from vit2linear.opening import checked_accelerator, judge_of, models_of
from vit2linear.prepare import Prepared, prepare
from vit2linear.recipe import Recipe, parse_recipe, to_toml
from vit2linear.record import record_of, shown, timed
from vit2linear.reporting import Reporter
from vit2linear.run_folder import RunFolder, clear_leftovers, open_run
from vit2linear.trackers import start_trackers


def convert(
    recipe: Recipe,
    *,
    overwrite: bool = False,
    resume: bool = False,
    ignore_labels: bool = False,
    reporter: Reporter | None = None,
) -> Artifact:
    """Convert a pretrained Softmax ViT and write an artifact.

    Args:
        recipe: the whole request; see ``Recipe``.
        overwrite: replace an artifact in the output folder, at the last moment.
        resume: go on from the last checkpoint of the same request, if there is one; what is finished stays as it is.
        ignore_labels: do not match the images' classes with the model's.
        reporter: told about progress; default: the ``vit2linear`` logger.

    Returns:
        The artifact, with its report; without one in other processes than the main one.

    Raises:
        Vit2LinearError: see ``vit2linear.errors``. Nothing half-written is left behind, whatever happens.
    """
    interrupts = Interrupts()
    with interrupts.installed():
        prepared = prepare(recipe, overwrite or resume)
        if resume and not overwrite and artifact.is_artifact(prepared.output):
            return _finished(prepared, ignore_labels, reporter or Reporter())
        accelerator = checked_accelerator(prepared.recipe)
        main = accelerator.is_main_process
        opened = open_run(prepared.output, resume, overwrite) if main else nullcontext()
        try:
            with opened as run, processes_together():
                spoken = reporter if reporter is not None and main else Reporter()
                written = _convert(prepared, run, Course(accelerator, interrupts, spoken, run), ignore_labels)
        except (NotFiniteError, StoppedError):
            accelerator.end_training()  # on every process alike
            raise
        accelerator.end_training()
        return written


def _convert(prepared: Prepared, run: RunFolder | None, course: Course, ignore_labels: bool) -> Artifact:
    reporter, accelerator = course.reporter, course.accelerator
    more = {"source": prepared.ref.record(), "ignore_labels": ignore_labels, "class_map": prepared.class_map}
    settings = settings_of(prepared.recipe, **more)
    begun = course.begun()
    if begun is not None:
        refuse_changes(begun.journal.settings, settings)
        reporter.say(f"going on from {begun.words}")
    for note in prepared.notes:
        reporter.say(note)
    recipe, plan = prepared.recipe, prepared.plan
    judge = judge_of(prepared, accelerator.device, ignore_labels, reporter)
    images = judge.bad.total
    if begun is not None:
        counted = f"images of {recipe.data.path}"
        refuse_changes({counted: begun.journal.images}, {counted: images})
    set_seed(recipe.run.seed)
    loaded = model.load(prepared.ref, prepared.spec)
    others = licence.fetch(prepared.ref, prepared.licence) if run is not None else {}
    journal = begun.journal if begun is not None else Journal(settings, to_toml(recipe), images)
    if recipe.keep_softmax:
        if begun is None:
            recipe, kept = hybrid.keep_costliest(loaded.module, recipe, plan, judge, reporter)
            journal = Journal(settings, to_toml(recipe), images, dataclasses.asdict(kept))
        # The rest may be other than when the run began, where it changes no weight.
        rules = parse_recipe(journal.recipe).convert
        prepared = prepared.replanned(dataclasses.replace(recipe, keep_softmax=0, convert=rules))
        recipe, plan = prepared.recipe, prepared.plan
    judge.bad.found.update(journal.bad)
    journal.bad = judge.bad.found
    source = loaded.module.state_dict()
    teacher, student, drawn = models_of(loaded.module, prepared, accelerator.device)
    moments = moments_of(recipe.distill)
    start_trackers(accelerator, settings)
    report = course.walk(moments, teacher, student, prepared, judge, journal, begun)
    for found in gather_object([judge.bad.found]):
        judge.bad.found.update(found)
    if run is None or report is None:
        return Artifact(f"local-dir:{prepared.output}", {}, prepared.output)
    audited = audit(source, student, plan, trained=bool(journal.stages or journal.calibration), drawn=drawn)
    speed = timed(prepared, teacher, student, accelerator.device, journal)
    for summary in (speed and speed.summary, judge.bad.summary):
        if summary:
            reporter.say(summary)
    record = record_of(prepared, loaded.spec.dtype, journal, judge, audited, report, speed)
    # Where this run wrote its output is nobody else's business, and the recipe is to run again elsewhere.
    portable = dataclasses.replace(recipe, output=dataclasses.replace(recipe.output, dir=None))
    text, files = shown(prepared, record, portable, teacher, student, judge)
    return run.write(
        prepared.output, student, prepared.data_config, to_toml(portable), record, text, {**others, **files}
    )


def _finished(prepared: Prepared, ignore_labels: bool, reporter: Reporter) -> Artifact:
    """What an earlier run of the same request has written.

    Raises:
        RecipeError: it was another request.
    """
    there, recipe, source = artifact.open_artifact(str(prepared.output)), prepared.recipe, prepared.ref.record()
    written, labels = there.recipe, there.report["data"]["ignore_labels"]
    if recipe.keep_softmax:  # which the written recipe has as rules
        kept = (there.report["keep_softmax"] or {}).get("kept", [])
        written = dataclasses.replace(written, keep_softmax=len(kept))
        if len(kept) == recipe.keep_softmax:
            rules = hybrid.keeping(recipe, prepared.plan, kept).convert
            recipe = dataclasses.replace(recipe, convert=rules)
    refuse_changes(
        settings_of(written, source={k: there.report["source"].get(k) for k in source}, ignore_labels=labels),
        settings_of(recipe, source=source, ignore_labels=ignore_labels),
        "What is there is finished: choose another --output, or replace it at the end with --overwrite, and with "
        "--resume --overwrite if a run that was to replace it was interrupted.",
    )
    clear_leftovers(prepared.output)
    reporter.say(f"{str(prepared.output)!r} is finished; nothing is left to resume.")
    return there
