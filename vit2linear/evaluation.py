"""Judging a student against its teacher on the user's images: which images, which classes, then ``compare``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from vit2linear.bad_images import BadImages
from vit2linear.classes import match_classes
from vit2linear.compare import EvalReport, compare
from vit2linear.data import Batch, eval_batches
from vit2linear.images import DEFAULT_SET, ImageList, Images, ImageSets, open_images
from vit2linear.resolve import DEMO
from vit2linear.views import eval_view

BANK_IMAGES = 5000
"""At most so many training images are a headless model's neighbours; three for each image evaluated, if limited."""


def default_images(source_name: str) -> str:
    """What is read without ``--data``: the demo's own images for the demo, otherwise an open set on the Hub."""
    return DEMO if source_name == DEMO else DEFAULT_SET


@dataclass(frozen=True)
class Judge:
    """An image set bound to a model's preprocessing and classes."""

    sets: ImageSets
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
        )

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
    path: str,
    data_config: dict[str, Any],
    num_classes: int,
    labels: list[str] | None,
    *,
    ignore_labels: bool = False,
    held_out: str | None = None,
    batch_size: int = 64,
    workers: int = 2,
    limit: int | None = None,
    device: torch.device | None = None,
    seed: int = 0,
    max_bad: float = 0.01,
) -> Judge:
    """Open an image set, decode one image as a probe, and match its classes with the model's.

    Raises:
        DataError: no images, more than ``max_bad`` of them bad, or classes that do not match.
    """
    sets = open_images(path, seed, held_out)
    classes = None if ignore_labels else sets.validation.classes
    class_map = match_classes(classes, labels, num_classes, sets.validation.name)
    parts = [s.size for s in (sets.train, sets.validation) if isinstance(s, ImageList)]
    bad = BadImages(max_bad, sum(parts) if len(parts) == 2 else None)
    # The validation images only: a training stream would fill its shuffle buffer for one image.
    next(eval_batches(sets.validation, eval_view(data_config), 1, None, 0, bad))
    return Judge(sets, data_config, class_map, batch_size, workers, limit, device or torch.device("cpu"), bad)
