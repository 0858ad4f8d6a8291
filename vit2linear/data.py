"""From images to batches: the source's own preprocessing, one random view for teacher and student.

Every random choice (order, crop, flip) derives from (seed, epoch, sample), never from a worker or a process, so a run
sees the same samples with other workers, on more processes, or resumed.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from timm.data import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from torchvision.transforms import Compose, RandomHorizontalFlip

from vit2linear.errors import DataError
from vit2linear.images import ImageList, Images, ImageStream

Batch = tuple[Tensor, Tensor]
"""Pixels (batch, channels, height, width) float32 and class indices (batch,), -1 where there is none."""


@dataclass(frozen=True)
class View:
    """Encoded bytes to a normalised tensor (channels, height, width)."""

    transform: Callable[[Image.Image], Tensor]
    channels: int

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode, convert to the model's channels, transform; ``where`` names the image in an error."""
        try:
            image = Image.open(io.BytesIO(data)).convert("L" if self.channels == 1 else "RGB")
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            raise DataError(f"{where} is no image that can be decoded.", "Remove or repair it.") from error
        return self.transform(image)


def eval_view(data_config: dict[str, Any]) -> View:
    """The source's own preprocessing (timm's data configuration)."""
    return View(create_transform(**data_config, is_training=False), data_config["input_size"][0])


def train_view(data_config: dict[str, Any], augment: str) -> View:
    """``mild``: random resized crop and flip; ``flip``: the evaluation view or its mirror; ``none``: that view."""
    if augment == "none":
        return eval_view(data_config)
    if augment == "flip":
        view = eval_view(data_config)
        return View(Compose([RandomHorizontalFlip(), view.transform]), view.channels)
    transform = create_transform(
        input_size=data_config["input_size"],
        is_training=True,
        scale=(0.7, 1.0),
        color_jitter=0.0,
        interpolation=data_config["interpolation"],
        mean=data_config["mean"],
        std=data_config["std"],
    )
    return View(transform, data_config["input_size"][0])


@dataclass(frozen=True)
class Samples(Dataset[tuple[Tensor, int]]):
    """``samples[epoch, index]``: one image under a view whose randomness is fixed by seed, epoch and index."""

    images: ImageList
    view: View
    seed: int

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        epoch, index = key
        data, label = self.images.read(index)
        return _seeded_view(self.view, data, self.images.where(index), (self.seed, epoch, index)), label


@dataclass(frozen=True)
class StreamSamples(IterableDataset[tuple[Tensor, int]]):
    """The endless stream of epochs; a process keeps its own part of each global batch."""

    images: ImageStream
    view: View
    seed: int
    batch_size: int
    rank: int
    world: int

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        position = 0
        for epoch in itertools.count():
            before = position
            for index, (data, label) in enumerate(self.images.start(epoch)):
                if position % self.batch_size * self.world // self.batch_size == self.rank:
                    where = f"image {index} of {self.images.name}"
                    yield _seeded_view(self.view, data, where, (self.seed, epoch, index)), label
                position += 1
            if position == before:
                raise DataError(f"{self.images.name} gave no images.")


@dataclass(frozen=True)
class StepBatches(Sampler[list[tuple[int, int]]]):
    """This process's part of the global batch of every step; epochs run on across batches, so none is partial."""

    size: int
    batch_size: int
    steps: int
    seed: int
    rank: int
    world: int
    start: int = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        orders: dict[int, list[int]] = {}
        local = self.batch_size // self.world
        for step in range(self.start, self.steps):
            first = step * self.batch_size + self.rank * local
            batch = []
            for position in range(first, first + local):
                epoch, place = divmod(position, self.size)
                if epoch not in orders:
                    generator = torch.Generator().manual_seed(_seed(self.seed, epoch, -1))
                    orders = {epoch: torch.randperm(self.size, generator=generator).tolist(), **orders}
                    orders.pop(epoch - 2, None)
                batch.append((epoch, orders[epoch][place]))
            yield batch

    def __len__(self) -> int:
        return self.steps


def train_batches(
    images: Images,
    view: View,
    batch_size: int,
    steps: int,
    seed: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
) -> Iterator[Batch]:
    """Exactly ``steps`` batches; ``batch_size`` is over all processes, a multiple of their number.

    Raises:
        DataError: an undecodable image.
    """
    dataset: Dataset[tuple[Tensor, int]]
    if isinstance(images, ImageStream):
        dataset = StreamSamples(images, view, seed, batch_size, rank, world)
        # Always one reader: datasets derives the order of a stream from the number of workers.
        loader = DataLoader(dataset, batch_size=batch_size // world, num_workers=1, generator=torch.Generator())
    else:
        dataset = Samples(images, view, seed)
        sampler = StepBatches(images.size, batch_size, steps, seed, rank, world, start)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers, generator=torch.Generator())
    return itertools.islice(iter(loader), steps)


def eval_batches(images: Images, view: View, batch_size: int, limit: int | None, workers: int) -> Iterator[Batch]:
    """All images, or ``limit`` of them: always the same random choice of a list, the first of a stream."""
    if isinstance(images, ImageStream):
        rows = itertools.islice(images.start(0), limit)
        while chunk := list(itertools.islice(rows, batch_size)):
            pixels = [view(data, f"an image of {images.name}") for data, _ in chunk]
            yield torch.stack(pixels), torch.tensor([label for _, label in chunk])
        return
    count = images.size if limit is None else min(limit, images.size)
    # Not the first ones: class folders are sorted by class.
    chosen = sorted(random.Random(0).sample(range(images.size), count))
    batches = [[(0, i) for i in chosen[a : a + batch_size]] for a in range(0, count, batch_size)]
    dataset = Samples(images, view, 0)
    yield from DataLoader(dataset, batch_sampler=batches, num_workers=workers, generator=torch.Generator())


def _seed(seed: int, epoch: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=4).digest(), "big")


def _seeded_view(view: View, data: bytes, where: str, key: tuple[int, int, int]) -> Tensor:
    """Apply ``view`` with every generator that transforms draw from seeded, and put them back afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    value = _seed(*key)
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)
    try:
        return view(data, where)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
