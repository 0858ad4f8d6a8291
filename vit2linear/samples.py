"""What a loader process does: read, decode, and find a stand-in for a bad image.

Every random choice (order, crop, flip) derives from (seed, epoch, sample), never from a worker or a process, so a run
sees the same samples with other workers, on more processes, or resumed. So does the image that stands in for a bad one:
the next good one of the list, or of the stream.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from vit2linear.bad_images import IN_A_ROW
from vit2linear.errors import BadImageError, DataError, Vit2LinearError
from vit2linear.images import ImageList, ImageStream, content_digest
from vit2linear.views import View

STAND_INS = 1000
"""So many images in a row are tried for one sample."""

BACK = "Bring it back; a conversion then continues with --resume."

Sample = tuple[Tensor, int]
"""Pixels (channels, height, width) and class index."""
Key = tuple[int, int]
"""Epoch and index."""


@dataclass(frozen=True)
class Loaded:
    """What a loader process hands over: any number of good samples, and the bad images met on the way.

    An error travels as data as well, because torch would turn it into a traceback.
    """

    pixels: Tensor
    labels: Tensor
    bad: list[tuple[str, str]]
    error: Vit2LinearError | None = None

    @classmethod
    def of(cls, samples: list[Sample], bad: list[tuple[str, str]], error: Vit2LinearError | None = None) -> Loaded:
        """Stack the samples."""
        pixels, labels = default_collate(samples) if samples else (torch.empty(0), torch.empty(0, dtype=torch.long))
        return cls(pixels, labels, bad, error)


@dataclass(frozen=True)
class Samples(Dataset[Loaded]):
    """``samples[keys]``: (epoch, index) pairs, under a view whose randomness is fixed by the seed and the pair."""

    images: ImageList
    view: View
    seed: int
    stand_in: bool
    """Whether the next good image stands in for a bad one, which is otherwise left out."""

    def __getitem__(self, keys: list[Key]) -> Loaded:
        samples: list[Sample] = []
        bad: list[tuple[str, str]] = []
        try:
            for key in keys:
                samples += self._sample(key, bad)
        except Vit2LinearError as error:
            return Loaded.of([], bad, error)
        return Loaded.of(samples, bad)

    def _sample(self, key: Key, bad: list[tuple[str, str]]) -> list[Sample]:
        first, tries = key[1], min(STAND_INS, self.images.size) if self.stand_in else 1
        for index in range(first, first + tries):
            try:
                data, label = _read(self.images, index % self.images.size)
                where = self.images.where(index % self.images.size)
                return [(seeded_view(self.view, data, where, (self.seed, *key)), label)]
            except BadImageError as error:
                bad.append((error.name, error.reason))
        if self.stand_in:
            raise DataError(f"{self.images.where(first)} and all of the {tries - 1} images after it cannot be used.")
        return []


@dataclass(frozen=True)
class StreamSamples(IterableDataset[Loaded]):
    """The endless stream of epochs; a process decodes its own part of each global batch."""

    images: ImageStream
    view: View
    seed: int
    batch_size: int
    start: int
    rank: int
    world: int

    def __iter__(self) -> Iterator[Loaded]:
        try:
            yield from self._batches()
        except Vit2LinearError as error:
            yield Loaded.of([], [], error)

    def _batches(self) -> Iterator[Loaded]:
        local = self.batch_size // self.world
        waiting: list[Key] = []  # more than one where bad images are replaced by what comes next
        samples: list[Sample] = []
        bad: list[tuple[str, str]] = []
        for position, (key, where, data, label) in enumerate(self._rows()):
            if position < self.start * self.batch_size:
                continue
            if position % self.batch_size // local == self.rank:
                waiting.append(key)
            try:
                samples += [(seeded_view(self.view, data, where, (self.seed, *key)), label) for key in waiting]
                waiting.clear()
            except BadImageError as error:
                bad.append((error.name, error.reason))
                if len(waiting) >= STAND_INS:
                    raise DataError(f"{len(waiting)} images in a row of {self.images.name} cannot be used.") from error
                if len(waiting) % IN_A_ROW == 0:
                    yield Loaded.of([], bad)
                    bad = []
            while len(samples) >= local:
                yield Loaded.of(samples[:local], bad)
                samples, bad = samples[local:], []

    def _rows(self) -> Iterator[tuple[Key, str, bytes, int]]:
        for epoch in itertools.count():
            index = -1
            for index, (where, data, label) in enumerate(stream_rows(self.images, epoch)):
                yield (epoch, index), where, data, label
            if index < 0:
                raise DataError(f"{self.images.name} gave no images.")


@dataclass(frozen=True)
class StepBatches(Sampler[list[Key]]):
    """This process's part of the global batch of every step; epochs run on across batches, so none is partial."""

    size: int
    batch_size: int
    start: int
    steps: int
    seed: int
    rank: int
    world: int

    def __iter__(self) -> Iterator[list[Key]]:
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
        return self.steps - self.start


def stream_rows(images: ImageStream, epoch: int) -> Iterator[tuple[str, bytes, int]]:
    """Name, encoded bytes and class of an epoch's images; the name tells the content, as the order may change.

    Raises:
        DataError: the stream breaks off.
    """
    try:
        for data, label in images.start(epoch):
            yield f"image {content_digest(data)} of {images.name}", data, label
    except OSError as error:
        raise DataError(f"{images.name} can no longer be read: {error}.", BACK) from error


def _read(images: ImageList, index: int) -> tuple[bytes, int]:
    try:
        return images.read(index)
    except OSError as error:
        folder = Path(error.filename).parent if isinstance(error.filename, str) else None
        if folder is not None and _is_gone(folder):
            raise DataError(
                f"the folder {str(folder)!r} of {images.name} is gone or can no longer be read.", BACK
            ) from error
        raise BadImageError(images.where(index), f"cannot be read: {error.strerror or error}") from error


def _is_gone(folder: Path) -> bool:
    try:
        # The place of a drive that is no longer mounted is an empty folder.
        return next(folder.iterdir(), None) is None
    except OSError:
        return True


def _seed(seed: int, epoch: int, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=4).digest(), "big")


def seeded_view(view: View, data: bytes, where: str, key: tuple[int, int, int]) -> Tensor:
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
