"""``vit2linear convert``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.artifact import Artifact


def convert(
    source: Annotated[
        str | None,
        typer.Argument(
            help="demo, a Hub id, a folder or file, a timm name, hf-hub:ID or local-dir:PATH.", show_default=False
        ),
    ] = None,
    op: Annotated[str | None, typer.Option(help="Operator for every site, such as relu or elu.")] = None,
    sites: Annotated[
        str | None, typer.Option(help="Only at sites whose path matches, such as 'blocks.[0-8].attn'.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(help="Option of the operator, KEY=VALUE; may be repeated. See ops show.")
    ] = None,
    local: Annotated[str | None, typer.Option(help="none, dwc3 or dwc5: depthwise convolution beside it.")] = None,
    center_keys: Annotated[bool | None, typer.Option("--center-keys", help="Subtract the mean key.")] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(help="What may be given up, such as relative-position-bias, or all; may be repeated."),
    ] = None,
    global_windows: Annotated[
        bool | None, typer.Option("--global-windows", help="Windowed attention becomes global: one window.")
    ] = None,
    keep_softmax: Annotated[
        list[str] | None,
        typer.Option(
            metavar="K|SITES",
            help="Sites that keep the softmax: the K costliest by measuring, or a glob; may be repeated.",
        ),
    ] = None,
    data: o.Data = None,
    split: o.Split = None,
    val_split: o.ValSplit = None,
    class_map: o.ClassMap = None,
    stream: o.Stream = None,
    distill_steps: Annotated[
        int | None, typer.Option(help="Optimiser steps of all stages together; 0 converts without training.")
    ] = None,
    calibrate: Annotated[
        int | None,
        typer.Option(help="Images for the closed form before training; default: 512 for 0 steps, otherwise 0."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to write; default MODEL-OP.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="TOML recipe; flags win over it.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan; read no weights, write nothing.")] = False,
    probe: Annotated[
        bool, typer.Option("--probe", help="With --dry-run: take three real steps of every stage, and write nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an artifact in the output folder.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub source.")] = None,
    arch: o.Arch = None,
    img_size: o.ImgSize = None,
    init: Annotated[
        str | None, typer.Option(help="What the student copies: full, mlp, attention, random or mimetic.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="copy or random: the class head, whatever --init says.")] = None,
    batch_size: o.BatchSize = None,
    workers: o.Workers = None,
    num_samples: o.EvalSamples = None,
    max_bad: o.MaxBad = None,
    ignore_labels: o.IgnoreLabels = False,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    device: o.Device = None,
    mixed_precision: Annotated[str | None, typer.Option(help="auto, no (float32), bf16 or fp16.")] = None,
    grad_accum_steps: Annotated[
        int | None, typer.Option(help="Parts in which the images of a step go through; saves memory.")
    ] = None,
    grad_checkpointing: Annotated[
        bool | None,
        typer.Option("--grad-checkpointing", help="Compute blocks again in the backward pass: less memory."),
    ] = None,
    compile: Annotated[  # noqa: A002
        bool | None, typer.Option("--compile", help="torch.compile attention and MLPs while a stage runs.")
    ] = None,
    track: Annotated[
        list[str] | None, typer.Option(help="Send metrics to tensorboard, wandb, ...; may be repeated.")
    ] = None,
    checkpoint_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; default: about every 10 minutes.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the same, interrupted command.")
    ] = False,
    bench: Annotated[
        bool | None, typer.Option("--bench/--no-bench", help="Measure the speed of both models; takes a few seconds.")
    ] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the source, where it states none.")] = None,  # noqa: A002
    offline: o.Offline = False,
    json: o.Json = False,
) -> None:
    """Convert a pretrained Softmax ViT: swap the attention, copy the rest, distil, evaluate, write."""
    with exit_codes():
        from vit2linear.errors import RecipeError
        from vit2linear.recipe import KEEP, Recipe, override, read_recipe
        from vit2linear.sizes import parse_size

        if probe and not dry_run:
            raise RecipeError("--probe measures what --dry-run estimates.", "Give both, or neither.")
        request = read_recipe(recipe) if recipe is not None else Recipe()
        options = dict(o.key_value(text) for text in option or []) or None
        given = {
            "op": op,
            "sites": sites,
            "options": options,
            "local": local,
            "center_keys": center_keys,
            "drop": drop or None,
            "global_windows": global_windows,
        }
        changes = {k: v for k, v in given.items() if v is not None}
        # A new operator is a new plan; the rest changes the plan that there is.
        rules = [changes] if op is not None else [{**vars(rule), **changes} for rule in request.convert]
        count, kept = o.sites_to_keep(keep_softmax or [])
        request = override(
            request,
            keep_softmax=count,
            source__model=source,
            source__revision=revision,
            source__arch=arch,
            source__img_size=parse_size(img_size) if img_size is not None else None,
            source__init=init,
            source__head=head,
            convert=[*({"op": KEEP, "sites": glob} for glob in kept), *rules],
            distill__steps=distill_steps,
            distill__calibration__images=calibrate,
            distill__batch_size=batch_size,
            data__path=o.one_or_many(data),
            data__split=split,
            data__val_split=val_split,
            data__class_map=class_map,
            data__streaming=stream,
            data__workers=workers,
            data__eval_samples=num_samples,
            data__max_bad=o.share(max_bad, "--max-bad") if max_bad is not None else None,
            output__dir=str(output) if output is not None else None,
            output__license=license,
            output__bench=bench,
            run__seed=seed,
            run__device=device,
            run__mixed_precision=mixed_precision,
            run__grad_checkpointing=grad_checkpointing,
            run__compile=compile,
            run__track=track or None,
            run__checkpoint_every=checkpoint_every,
            distill__grad_accum_steps=grad_accum_steps,
        ).check()

        from vit2linear import pipeline, prepare
        from vit2linear.cli._dry_run import show
        from vit2linear.cli._output import TerminalReporter, err, out, print_json

        if dry_run:
            show(prepare.prepare(request, overwrite), probe, ignore_labels, json)
            return
        with TerminalReporter() as reporter:
            artifact = pipeline.convert(
                request, overwrite=overwrite, resume=resume, ignore_labels=ignore_labels, reporter=reporter
            )
        if not artifact.report:
            return
        if json:
            print_json(artifact.report)
            return
        out.print(_result(artifact))
        err.print(f"Written to {artifact.folder}. Next: vit2linear eval, vit2linear push", markup=False)


def _result(artifact: Artifact) -> object:
    """Teacher, student before training, student after."""
    from vit2linear.cli._output import table

    evaluation = artifact.report["evaluation"]
    key, title = next(
        ((k, t) for k, t in (("top1", "top-1, %"), ("knn", "10-NN, %")) if evaluation["teacher"][k] is not None),
        ("images_per_second", "images/s"),
    )
    rows = [["teacher (softmax)", f"{evaluation['teacher'][key]:.2f}", str(evaluation["images"])]]
    rows += [
        [f"student, {h['moment']}", f"{h['student'][key]:.2f}", str(h["images"])] for h in artifact.report["history"]
    ]
    return table(artifact.name, ["", title, "images"], rows)
