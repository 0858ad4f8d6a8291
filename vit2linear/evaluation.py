"""Judging a student against its teacher on the user's images: which images, which classes, then ``compare``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from vit2linear.bad_images import BadImages
from vit2linear.class_map import ClassMap
from vit2linear.classes import match_classes
from vit2linear.compare import EvalReport, compare
from vit2linear.data import Batch, eval_batches
from vit2linear.errors import DataError
from vit2linear.images import DEFAULT_SET, HeldOut, ImageList, ImageOptions, Images, ImageSets, open_images
from vit2linear.reporting import Reporter
from vit2linear.resolve import DEMO
from vit2linear.views import eval_view

BANK_IMAGES = 5000
"""At most so many training images are a headless model's neighbours; three for each image evaluated, if limited."""


def default_images(source_name: str) -> str:
    """What is read without ``--data``: the demo's own images for the demo, otherwise an open set on the Hub."""
    return DEMO if source_name == DEMO else DEFAULT_SET


@dataclass(frozen=True)
class ImageRequest:
    """Which images, and how they are read."""

    path: str | tuple[str, ...]
    options: ImageOptions = dataclasses.field(default_factory=ImageOptions)
    class_map: ClassMap | None = None
    """Which class of the model each class is, where the user said so."""
    held_out: HeldOut = None
    """Of an earlier conversion, so that the same images are held out again."""

    @classmethod
    def again(cls, record: dict[str, Any]) -> ImageRequest:
        """What a judge recorded; artifacts written before there were more options have path and held_out alone."""
        names = {field.name for field in dataclasses.fields(ImageOptions)} & set(record)
        path, held_out = (tuple(x) if isinstance(x, list) else x for x in (record["path"], record["held_out"]))
        return cls(path, ImageOptions(**{name: record[name] for name in names}), record.get("class_map"), held_out)


@dataclass(frozen=True)
class Judge:
    """An image set bound to a model's preprocessing and classes."""

    sets: ImageSets
    request: ImageRequest
    data_config: dict[str, Any]
    class_map: list[int] | None
    batch_size: int
    workers: int
    limit: int | None
    device: torch.device
    bad: BadImages
    """What could not be used, in training as well."""

    def __call__(self, teacher: nn.Module, student: nn.Module, limit: int | None = None) -> EvalReport:
        """Compare on the validation images, at most ``limit`` of them."""
        images = self.sets.validation
        limit = min((n for n in (limit, self.limit) if n is not None), default=None)
        headless = not teacher.num_classes
        return compare(
            teacher,
            student,
            self._batches(images, limit),
            images.name,
            self.device,
            class_map=self.class_map,
            bank=self._bank(limit) if headless and images.classes is not None else None,
            classes=images.classes,
        )

    @property
    def record(self) -> dict[str, Any]:
        """What opens the same images again (``ImageRequest.again``), as JSON."""
        path, held_out = ([*x] if isinstance(x, tuple) else x for x in (self.request.path, self.sets.held_out))
        options = dataclasses.asdict(self.request.options)
        return {"path": path, "held_out": held_out, **options, "class_map": self.request.class_map}

    def look(self, count: int) -> Float[Tensor, "images channels height width"]:
        """At most ``count`` validation images as they are evaluated, always the same ones."""
        return torch.cat([pixels for pixels, _ in self._batches(self.sets.validation, count)])

    def sample(self, count: int) -> Batch:
        """At most ``count`` training images as they are evaluated, always the same ones, and the model's classes."""
        pixels, classes = zip(*self._batches(self.sets.train, count), strict=True)
        return torch.cat(pixels), self.as_model_classes(torch.cat(classes))

    def as_model_classes(self, classes: Int[Tensor, " images"]) -> Int[Tensor, " images"]:
        """The model's class of each image, from the set's; -1 where the set's classes are not the model's."""
        # An image without a class has -1 already, which here is the last entry.
        return torch.full_like(classes, -1) if self.class_map is None else torch.tensor([*self.class_map, -1])[classes]

    def _batches(self, images: Images, limit: int | None) -> Iterator[Batch]:
        view = eval_view(self.data_config)
        return eval_batches(images, view, self.batch_size, limit, self.workers, self.bad)

    def _bank(self, limit: int | None) -> Iterator[Batch]:
        """Training images as neighbours."""
        return self._batches(self.sets.train, BANK_IMAGES if limit is None else min(BANK_IMAGES, 3 * limit))


def open_judge(
    request: ImageRequest,
    data_config: dict[str, Any],
    num_classes: int,
    labels: list[str] | None,
    *,
    batch_size: int = 64,
    workers: int = 2,
    limit: int | None = None,
    device: torch.device | None = None,
    max_bad: float = 0.01,
    reporter: Reporter | None = None,
) -> Judge:
    """Open an image set, decode one image as a probe, and match its classes with the model's.

    Args:
        request: which images.
        data_config: the model's preprocessing.
        num_classes, labels: the model's classes, 0 and ``None`` where it has none or does not name them.
        batch_size, workers, limit, device: as in a recipe.
        reporter: told what is left out of the set, and of accuracy; default: the ``vit2linear`` logger.

    Raises:
        DataError: no images, more than ``max_bad`` of them bad, or a class map that does not fit.
    """
    if request.options.ignore_labels and request.class_map is not None:
        raise DataError("--ignore-labels and --class-map exclude each other.", "Leave one of them out.")
    sets = open_images(request.path, request.options, request.held_out)
    images = sets.validation
    matched = match_classes(images.classes, labels, num_classes, images.name, request.class_map)
    for note in (*sets.notes, *([matched.note] if matched.note else [])):
        (reporter or Reporter()).say(note)
    parts = [s.size for s in (sets.train, images) if isinstance(s, ImageList)]
    bad = BadImages(max_bad, sum(parts) if len(parts) == 2 else None)
    # The validation images only: a training stream would fill its shuffle buffer for one image.
    next(eval_batches(images, eval_view(data_config), 1, None, 0, bad))
    where = device or torch.device("cpu")
    return Judge(sets, request, data_config, matched.indices, batch_size, workers, limit, where, bad)
