"""Teacher and student side by side, on the same images, in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vit2linear.data import Batch
from vit2linear.distill.forward import has_head, last_features, pooled_feature, run
from vit2linear.errors import DataError
from vit2linear.headless import nearest_neighbours, neighbour_agreement, ridge_probe
from vit2linear.losses import Outputs, unexplained
from vit2linear.significance import ClassChange, Difference, calibration_error, classes_that_lost, difference
from vit2linear.site import sites_of

_ERROR_IMAGES = 256
SCORES = {"top1": "top-1, %", "top5": "top-5, %", "knn": "10-NN, %", "probe": "ridge probe, %"}
"""What a model is judged by, in ``Scores``, with its title; wherever results are shown."""
SAME = {
    "agreement": ("same first class, %", ".2f"),
    "neighbour_agreement": ("same 10 neighbours, %", ".2f"),
    "feature_cosine": ("cosine of features", ".4f"),
}
"""How alike both models are, in ``EvalReport``, with title and format."""


@dataclass(frozen=True)
class Scores:
    """One model. Percentages; ``None`` where it has no meaning for this model and these images."""

    top1: float | None
    top5: float | None
    knn: float | None
    """Headless and labelled: accuracy of the 10 nearest training images by cosine of the pooled feature."""
    probe: float | None
    """Headless and labelled: accuracy of a linear classifier of the pooled feature, fitted by ridge regression."""
    images_per_second: float
    calibration_error: float | None = None
    """Expected calibration error of the class probabilities."""


@dataclass(frozen=True)
class EvalReport:
    """What the conversion cost and won on one set of images."""

    data: str
    images: int
    teacher: Scores
    student: Scores
    agreement: float | None
    """Share of images on which both models' first class is the same, in per cent."""
    neighbour_agreement: float | None
    """Headless: share of an image's 10 nearest images that both models agree on, in per cent."""
    feature_cosine: float
    """Mean cosine between the models' pooled features."""
    speedup: float
    """Student's images/s over the teacher's, medians of interleaved batches."""
    site_errors: dict[str, float] = field(default_factory=dict)
    """Unexplained energy of each site's output in the running student: 0 is equal, 1 is as bad as zero."""
    difference: Difference | None = None
    """In top-1, with its interval and test."""
    lost_classes: tuple[ClassChange, ...] = ()
    """Classes that lost most of their images."""

    @property
    def summary(self) -> str:
        """The comparison in one line."""
        parts = [f"{self.images:,} images"]
        for title, key in (("top-1", "top1"), ("10-NN", "knn"), ("ridge probe", "probe")):
            teacher, student = getattr(self.teacher, key), getattr(self.student, key)
            if teacher is not None and student is not None:
                parts.append(f"{title} {student:.2f}% (teacher {teacher:.2f}%)")
        if self.agreement is not None:
            parts.append(f"agreement {self.agreement:.2f}%")
        if self.difference is not None:
            parts.append(self.difference.words)
        if self.neighbour_agreement is not None:
            parts.append(f"neighbours shared {self.neighbour_agreement:.2f}%")
        return ", ".join([*parts, f"feature cosine {self.feature_cosine:.4f}"])


@dataclass
class _Kept:
    pooled: list[Tensor] = field(default_factory=list)
    top: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)


def compare(
    teacher: nn.Module,
    student: nn.Module,
    batches: Iterator[Batch],
    data: str,
    device: torch.device,
    class_map: list[int] | None = None,
    bank: Iterator[Batch] | None = None,
    classes: Sequence[str] | None = None,
) -> EvalReport:
    """Run both models over ``batches``, alternating, and compare.

    Args:
        teacher, student: timm models of the same architecture, in eval mode.
        batches: pixels and class indices of the image set.
        data: name of the image set, for the report.
        device: where to compute.
        class_map: the model's class of every class of the set (``match_classes``); without it there is no accuracy.
        bank: labelled training batches for nearest neighbours; headless models only.
        classes: names of the set's classes, to say which ones lost.

    Raises:
        DataError: no images.
    """
    models = {"teacher": teacher.to(device).eval(), "student": student.to(device).eval()}
    kept = {name: _Kept() for name in models}
    labels: list[Tensor] = []
    errors: dict[str, list[float]] = {}
    count = 0
    for pixels, found in batches:
        pixels = pixels.to(device)
        if count < _ERROR_IMAGES:
            for path, error in _site_errors(teacher, student, pixels).items():
                errors.setdefault(path, []).append(error)
        for name, model in models.items():
            _forward(model, pixels, kept[name])
        labels.append(found)
        count += len(found)
    if not count:
        raise DataError(f"{data} gave no images to evaluate on.")
    truth = torch.cat(labels)
    pooled = {name: F.normalize(torch.cat(k.pooled).float(), dim=-1) for name, k in kept.items()}
    headless = not teacher.num_classes
    by_features = _bank_scores(models, pooled, truth, bank, device) if headless and bank is not None else {}
    # -1 is an image without a class, or with one that the model has not.
    wanted = torch.full_like(truth, -1) if headless or class_map is None else torch.tensor([*class_map, -1])[truth]
    known = wanted >= 0
    hits: dict[str, Tensor] = {}
    scores = {}
    for name, k in kept.items():
        top1 = top5 = unsure = None
        if known.any():
            right = torch.cat(k.top)[known] == wanted[known][:, None]
            hits[name] = right[:, 0]
            top1, top5 = _percent(right[:, 0]), _percent(right.any(-1))
            unsure = calibration_error(torch.cat(k.confidence)[known], right[:, 0])
        # The first batch pays for warming up.
        rate = statistics.median(k.rates[1:] or k.rates)
        knn, probe = (by_features.get(name, {}).get(kind) for kind in ("knn", "probe"))
        scores[name] = Scores(top1, top5, knn, probe, rate, unsure)
    agreement = None
    if not headless:
        first = [torch.cat(kept[name].top)[:, 0] for name in models]
        agreement = _percent(first[0] == first[1])
    paired = [a / b for a, b in zip(kept["student"].rates, kept["teacher"].rates, strict=True)]
    return EvalReport(
        data=data,
        images=count,
        teacher=scores["teacher"],
        student=scores["student"],
        agreement=agreement,
        neighbour_agreement=neighbour_agreement(pooled["teacher"], pooled["student"]) if headless else None,
        feature_cosine=float((pooled["teacher"] * pooled["student"]).sum(-1).mean()),
        speedup=statistics.median(paired[1:] or paired),
        site_errors={path: statistics.fmean(values) for path, values in errors.items()},
        difference=difference(hits["teacher"], hits["student"]) if hits else None,
        lost_classes=classes_that_lost(hits["teacher"], hits["student"], truth[known], classes or ()) if hits else (),
    )


@torch.inference_mode()
def _forward(model: nn.Module, pixels: Tensor, kept: _Kept) -> None:
    start = time.perf_counter()
    features = last_features(model, pixels)
    outputs = model.forward_head(features) if has_head(model) else features  # type: ignore[operator]
    if pixels.device.type == "cuda":
        torch.cuda.synchronize()
    kept.rates.append(len(pixels) / (time.perf_counter() - start))
    kept.pooled.append(pooled_feature(model, features).cpu())
    if model.num_classes:
        kept.top.append(outputs.topk(min(5, outputs.shape[-1]), dim=-1).indices.cpu())
        kept.confidence.append(outputs.float().softmax(-1).amax(-1).cpu())


@torch.inference_mode()
def _site_errors(teacher: nn.Module, student: nn.Module, pixels: Tensor) -> dict[str, float]:
    sites = sites_of(student)
    target: Outputs = run(teacher, pixels, {p: m for p, m in sites_of(teacher).items() if p in sites})
    mine = run(student, pixels, sites)
    return {path: float(unexplained(y, target.sites[path])) for path, y in mine.sites.items()}


def _bank_scores(
    models: dict[str, nn.Module],
    pooled: dict[str, Tensor],
    truth: Tensor,
    bank: Iterator[Batch],
    device: torch.device,
) -> dict[str, dict[str, float]]:
    """``knn`` and ``probe`` of every model, from labelled images beside those of ``pooled``."""
    kept = {name: _Kept() for name in models}
    labels = []
    for pixels, classes in bank:
        for name, model in models.items():
            _forward(model, pixels.to(device), kept[name])
        labels.append(classes)
    bank_labels = torch.cat(labels)
    labelled, known = bank_labels >= 0, truth >= 0
    if not labelled.any() or not known.any():
        return {}
    scores = {}
    for name, k in kept.items():
        features, queries = F.normalize(torch.cat(k.pooled).float(), dim=-1), pooled[name][known]
        predicted = {
            "knn": nearest_neighbours(features[labelled], bank_labels[labelled], queries),
            "probe": ridge_probe(features[labelled], bank_labels[labelled], queries),
        }
        scores[name] = {kind: _percent(classes == truth[known]) for kind, classes in predicted.items()}
    return scores


def _percent(hits: Tensor) -> float:
    return 100 * float(hits.float().mean())
