"""``vit2linear eval``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.compare import EvalReport


def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Artifact: folder or Hub id; default: the newest under the current folder.", show_default=False
        ),
    ] = None,
    data: o.Data = None,
    split: o.Split = None,
    val_split: o.ValSplit = None,
    class_map: o.ClassMap = None,
    stream: o.Stream = None,
    teacher: Annotated[str | None, typer.Option(help="Where the source is, if its folder has moved.")] = None,
    img_size: o.ImgSize = None,
    batch_size: o.BatchSize = None,
    workers: o.Workers = None,
    num_samples: o.EvalSamples = None,
    max_bad: o.MaxBad = None,
    ignore_labels: o.IgnoreLabels = False,
    device: o.Device = None,
    offline: o.Offline = False,
    json: o.Json = False,
) -> None:
    """Show teacher and student side by side: accuracy, agreement, speed, and each site's error."""
    with exit_codes():
        import dataclasses

        from vit2linear import finished
        from vit2linear.artifact import open_artifact
        from vit2linear.cli._output import TerminalReporter, err, out, print_json
        from vit2linear.recipe import Recipe, override
        from vit2linear.sizes import parse_size

        request = override(
            Recipe(),
            source__model="unused",
            distill__batch_size=batch_size,
            data__workers=workers,
            data__eval_samples=num_samples,
            data__max_bad=o.share(max_bad, "--max-bad") if max_bad is not None else None,
        ).check()
        artifact = open_artifact(model)
        err.print(f"Evaluating {artifact.name}", markup=False)
        report = finished.evaluate(
            artifact,
            data=o.one_or_many(data),
            split=split,
            val_split=val_split,
            class_map=class_map,
            streaming=stream,
            teacher=teacher,
            ignore_labels=ignore_labels,
            batch_size=request.distill.batch_size,
            workers=request.data.workers,
            limit=request.data.eval_samples,
            max_bad=request.data.max_bad,
            device=device or "auto",
            size=parse_size(img_size) if img_size is not None else None,
            reporter=TerminalReporter(),
        )
        if json:
            print_json({"model": artifact.name, **dataclasses.asdict(report)})
            return
        for table in _tables(artifact.name, report):
            out.print(table)
        if report.difference is not None:
            out.print(f"Top-1, student against teacher: {report.difference.words}.", markup=False)


def _tables(name: str, report: EvalReport) -> list[object]:
    from vit2linear.cli._output import table
    from vit2linear.compare import SAME, SCORES

    rows = []
    more = {"calibration_error": "calibration error, %", "images_per_second": "images/s"}
    for key, title in (SCORES | more).items():
        a, b = getattr(report.teacher, key), getattr(report.student, key)
        if a is not None and b is not None:
            rows.append([title, f"{a:.2f}", f"{b:.2f}", f"{b - a:+.2f}"])
    for key, (title, form) in SAME.items():
        if (value := getattr(report, key)) is not None:
            rows.append([title, "", f"{value:{form}}", ""])
    rows.append(["speed against teacher", "", f"{report.speedup:.2f}x", ""])
    errors = [[path, f"{error:.4f}"] for path, error in report.site_errors.items()]
    tables: list[object] = [
        table(f"{name} on {report.data}, {report.images:,} images", ["", "teacher", "student", ""], rows),
        table("Unexplained energy of attention outputs (0 equal, 1 as bad as zero)", ["site", "error"], errors),
    ]
    if report.lost_classes:
        lost = [[c.name, str(c.images), f"{c.teacher:.1f}", f"{c.student:.1f}"] for c in report.lost_classes]
        tables.append(table("Classes that lost most, top-1 in %", ["class", "images", "teacher", "student"], lost))
    return tables
