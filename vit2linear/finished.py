"""What is done with a finished artifact: load it, judge it again, measure it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from timm.data import resolve_model_data_config
from torch import nn

from vit2linear import model, surgery
from vit2linear.artifact import Artifact, open_artifact
from vit2linear.bench import Job
from vit2linear.class_map import ClassMap, read_class_map
from vit2linear.compare import EvalReport
from vit2linear.devices import device_of
from vit2linear.errors import ArtifactError
from vit2linear.evaluation import ImageRequest, open_judge
from vit2linear.images import ImageOptions
from vit2linear.probe import example_pixels
from vit2linear.reporting import Reporter
from vit2linear.resolve import layout_of, resolve
from vit2linear.sizes import Size
from vit2linear.sources.base import ModelRef
from vit2linear.speed import job_of


def load(ref: str, revision: str | None = None) -> nn.Module:
    """A converted model by folder or Hub id, in eval mode."""
    return open_artifact(ref, revision).model()


def evaluate(
    ref: str | Artifact | None = None,
    *,
    data: str | Sequence[str] | None = None,
    split: str | None = None,
    val_split: str | None = None,
    class_map: str | None = None,
    streaming: bool | None = None,
    teacher: str | None = None,
    ignore_labels: bool = False,
    batch_size: int = 64,
    workers: int = 2,
    limit: int | None = None,
    max_bad: float = 0.01,
    device: str = "auto",
    size: Size | None = None,
    reporter: Reporter | None = None,
) -> EvalReport:
    """A converted model beside its teacher, which is fetched again at its pinned commit.

    Args:
        ref: artifact, folder or Hub id; default: the newest artifact under the current folder.
        data: images; default: those of the conversion, with the same ones held out.
        split, val_split, class_map, streaming: as in a recipe; default: those of the conversion for its own images.
        teacher: the source's place, where a local folder has moved.
        ignore_labels: do not match the images' classes with the model's.
        batch_size, workers, limit, max_bad, device: as in a recipe.
        size: height and width in pixels; default: those of the conversion.
        reporter: told what is resized for ``size``, and which images were bad; default: the ``vit2linear`` logger.

    Raises:
        ArtifactError, SourceError, DataError
    """
    opened = ref if isinstance(ref, Artifact) else open_artifact(ref)
    reporter = reporter or Reporter()
    record = opened.report
    student = opened.model()
    height, width = size or tuple(example_pixels(student).shape[-2:])
    source = _source_again(record["source"], teacher)
    spec = model.at_size(layout_of(source).spec(source), (height, width))
    data_config = {**resolve_model_data_config(student), "input_size": (student.in_chans, height, width)}
    if size is not None:
        student = opened.model(**{k: v for k, v in spec.model_args.items() if k == "img_size"})
        reporter.say(spec.notes[-1])
    module = model.load(source, spec).module
    softmax = {path: {"op": "softmax"} for path in opened.model_args["operators"]}
    num_classes, labels = int(student.num_classes), spec.pretrained_cfg.get("label_names")  # type: ignore[arg-type]
    judge = open_judge(
        _images(
            ImageRequest.again(record["data"]),
            data,
            {"split": split, "val_split": val_split, "ignore_labels": ignore_labels or None, "streaming": streaming},
            read_class_map(class_map, labels, num_classes) if class_map is not None else None,
        ),
        data_config,
        num_classes,
        labels,
        batch_size=batch_size,
        workers=workers,
        limit=limit,
        device=device_of(device),
        max_bad=max_bad,
        reporter=reporter,
    )
    report = judge(surgery.apply(module, softmax).eval(), student)
    if judge.bad.summary:
        reporter.say(judge.bad.summary)
    return report


def bench_job(ref: str, batch_size: int) -> Job:
    """The architecture of an artifact, with its operators, for ``bench``."""
    args = dict(open_artifact(ref).model_args)
    operators, base = args.pop("operators"), args.pop("base")
    return job_of(base, args, operators, batch_size)


def _images(
    recorded: ImageRequest, data: str | Sequence[str] | None, given: dict[str, Any], class_map: ClassMap | None
) -> ImageRequest:
    """The images of the conversion, unless others are named; the same ones are held out where it is the same set."""
    path = data if data is None or isinstance(data, str) else tuple(data)
    changes = {key: value for key, value in given.items() if value is not None}
    if class_map is not None:
        changes.setdefault("ignore_labels", False)
    if path not in (None, recorded.path):
        return ImageRequest(path, ImageOptions(**changes), class_map)
    options = dataclasses.replace(recorded.options, **changes)
    known = class_map or (None if "ignore_labels" in changes else recorded.class_map)
    splits = (options.split, options.val_split) == (recorded.options.split, recorded.options.val_split)
    return ImageRequest(recorded.path, options, known, recorded.held_out if splits else None)


def _source_again(record: dict[str, Any], place: str | None) -> ModelRef:
    """The teacher of an artifact: the recorded repository at its commit, or a folder with the same weights."""
    if "repo" in record and place is None:
        found = resolve(f"hf-hub:{record['repo']}", record["commit"], record.get("arch"))
        named_by_timm = record["name"] != record["repo"] and "/" not in record["name"]
        return dataclasses.replace(found, name=record["name"], registry_name=record["name"] if named_by_timm else None)
    found = resolve(place or record["name"], arch=record.get("arch"))
    if "weights_sha256" in record and found.record().get("weights_sha256") != record["weights_sha256"]:
        raise ArtifactError(
            f"the weights in {found.name!r} are not those that were converted.", "Point to the original with --teacher."
        )
    return found
