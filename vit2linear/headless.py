"""What features without a class head are judged by: their nearest neighbours, and a linear classifier on top."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

NEIGHBOURS = 10
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""Penalties that are tried, in units of the features' variance."""
HELD_OUT = 5
"""One in so many labelled images chooses the penalty."""


def nearest_neighbours(
    bank: Float[Tensor, "bank channels"], labels: Int[Tensor, " bank"], queries: Float[Tensor, "queries channels"]
) -> Int[Tensor, " queries"]:
    """The commonest label of the 10 most similar rows of ``bank``; rows are unit vectors."""
    return labels[_nearest(queries, bank, NEIGHBOURS)].mode(-1).values


def ridge_probe(
    bank: Float[Tensor, "bank channels"], labels: Int[Tensor, " bank"], queries: Float[Tensor, "queries channels"]
) -> Int[Tensor, " queries"]:
    """The classes that a linear classifier gives, fitted to one-hot labels by ridge regression in float64.

    Channels are standardised; the penalty is chosen on a fifth of ``bank`` and the classifier then fitted to all of it.
    """
    mean, deviation = bank.double().mean(0), bank.double().std(0).clamp_min(1e-12)
    x, y = (bank.double() - mean) / deviation, F.one_hot(labels - labels.min()).double()
    chosen = torch.arange(len(x)) % HELD_OUT == 0
    hits = [
        (_scores(x[~chosen], y[~chosen], x[chosen], ridge).argmax(1) == y[chosen].argmax(1)).double().mean()
        for ridge in RIDGES
    ]
    best = RIDGES[int(torch.stack(hits).argmax())]
    return _scores(x, y, (queries.double() - mean) / deviation, best).argmax(1) + labels.min()


def neighbour_agreement(
    teacher: Float[Tensor, "images channels"], student: Float[Tensor, "images width"]
) -> float | None:
    """Share of each image's 10 nearest among the other images that both models see, in per cent."""
    if len(teacher) <= NEIGHBOURS:
        return None
    # An image is its own nearest neighbour: ask for one more and leave it out by its index.
    a, b = (_nearest(x, x, NEIGHBOURS + 1) for x in (teacher, student))
    own = torch.arange(len(teacher))[:, None]
    shared = (a[:, :, None] == b[:, None, :]) & (a != own)[:, :, None]
    return 100 * float(shared.any(-1).sum(-1).clamp_max(NEIGHBOURS).float().mean()) / NEIGHBOURS


def _nearest(queries: Float[Tensor, "queries channels"], bank: Float[Tensor, "bank channels"], k: int) -> Tensor:
    """Indices (queries, k) of the most similar rows of ``bank``; rows are unit vectors."""
    return torch.cat([(chunk @ bank.T).topk(min(k, len(bank))).indices for chunk in queries.split(1024)])


def _scores(
    x: Float[Tensor, "images channels"],
    y: Float[Tensor, "images classes"],
    queries: Float[Tensor, "queries channels"],
    ridge: float,
) -> Float[Tensor, "queries classes"]:
    gram = x.T @ x / len(x) + ridge * torch.eye(x.shape[1], dtype=x.dtype)
    weight: Tensor = torch.linalg.solve(gram, x.T @ (y - y.mean(0)) / len(x))
    return queries @ weight + y.mean(0)
