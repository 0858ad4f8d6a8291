"""From images to batches, in loader processes: bad images left out and counted, errors said in a sentence."""

from __future__ import annotations

import itertools
import random
import signal
import threading
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vit2linear.bad_images import BadImages
from vit2linear.errors import BadImageError, DataError
from vit2linear.images import Images, ImageStream
from vit2linear.samples import Key, Loaded, Sample, Samples, StepBatches, StreamSamples, stream_rows
from vit2linear.views import View

Batch = tuple[Tensor, Tensor]
"""Pixels (batch, channels, height, width) float32 and class indices (batch,), -1 where there is none."""


def train_batches(
    images: Images,
    view: View,
    batch_size: int,
    steps: int,
    seed: int,
    workers: int,
    rank: int = 0,
    world: int = 1,
    *,
    start: int = 0,
    bad: BadImages | None = None,
) -> Iterator[Batch]:
    """The batches of the steps ``start`` to ``steps``, the same ones as without a ``start``.

    Args:
        images, view: what is read, and how.
        batch_size: over all processes, a multiple of their number.
        steps, start: the last step, not included, and the first.
        seed: of order and view.
        workers: loader processes; a stream has always one.
        rank, world: this process and how many there are.
        bad: told of bad images, whose places the next good ones take; without it the first one is an error.

    Raises:
        DataError: too many bad images, images that cannot be read any more, or a loader process that died.
    """
    bad = BadImages(0.0, None) if bad is None else bad
    if isinstance(images, ImageStream):
        dataset: Dataset[Loaded] = StreamSamples(images, view, seed, batch_size, start, rank, world)
        # Always one reader: datasets derives the order of a stream from the number of workers.
        sampler, workers = None, 1
    else:
        dataset = Samples(images, view, seed, stand_in=True)
        sampler = StepBatches(images.size, batch_size, start, steps, seed, rank, world)
    return itertools.islice(_taken(_loader(dataset, sampler, workers), bad), steps - start)


def eval_batches(
    images: Images, view: View, batch_size: int, limit: int | None, workers: int, bad: BadImages | None = None
) -> Iterator[Batch]:
    """All images, or ``limit`` of them: always the same random choice of a list, the first of a stream.

    Bad ones are left out and told to ``bad``; without it the first one is an error.

    Raises:
        DataError: as ``train_batches``, or no image that can be used.
    """
    if isinstance(images, ImageStream):
        loader: Iterable[Loaded] = _stream_batches(images, view, batch_size, limit)
    else:
        count = images.size if limit is None else min(limit, images.size)
        # Not the first ones: class folders are sorted by class.
        chosen = sorted(random.Random(0).sample(range(images.size), count))
        keys = [[(0, i) for i in chosen[a : a + batch_size]] for a in range(0, count, batch_size)]
        loader = _loader(Samples(images, view, 0, stand_in=False), keys, workers)
    bad = BadImages(0.0, None) if bad is None else bad
    batches = _taken(loader, bad)
    try:
        yield next(batches)
    except StopIteration:
        raise DataError(f"{images.name} gave no image that can be used.", bad.summary) from None
    yield from batches


def _loader(dataset: Dataset[Loaded], keys: Iterable[list[Key]] | None, workers: int) -> DataLoader[Loaded]:
    # The datasets make whole batches. Without an own generator, torch's global one would be drawn from.
    return DataLoader(dataset, None, sampler=keys, num_workers=workers, generator=torch.Generator())


def _taken(loader: Iterable[Loaded], bad: BadImages) -> Iterator[Batch]:
    """Tell the ledger, raise the errors, pass the rest on."""
    try:
        for loaded in _started(loader):
            bad.add(loaded.bad, good=len(loaded.labels))
            if loaded.error is not None:
                raise loaded.error
            if len(loaded.labels):
                yield loaded.pixels, loaded.labels
    except (RuntimeError, ConnectionError, EOFError) as error:
        # The last two, where the process is still about to end.
        if isinstance(error, RuntimeError) and not str(error).startswith("DataLoader worker (pid"):
            raise
        raise DataError(
            "a loader process was killed, most likely because the machine ran out of memory or /dev/shm was full.",
            "Take fewer with --workers (0: none); a conversion then continues with --resume.",
        ) from error


def _started(loader: Iterable[Loaded]) -> Iterator[Loaded]:
    """Its iterator, whose processes run, with the handler of SIGCHLD as it was.

    torch's own raises the death of a loader process wherever the main process is, even where a file is being written.
    The iterator also finds out by itself, within seconds, when it waits for the next batch.
    """
    number = getattr(signal, "SIGCHLD", None)  # Windows has none
    if number is None or threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(number)
    try:
        return iter(loader)
    finally:
        signal.signal(number, before or signal.SIG_DFL)


def _stream_batches(images: ImageStream, view: View, batch_size: int, limit: int | None) -> Iterator[Loaded]:
    rows = itertools.islice(stream_rows(images, 0), limit)
    while chunk := list(itertools.islice(rows, batch_size)):
        samples: list[Sample] = []
        bad = []
        for where, data, label in chunk:
            try:
                samples.append((view(data, where), label))
            except BadImageError as error:
                bad.append((error.name, error.reason))
        yield Loaded.of(samples, bad)
