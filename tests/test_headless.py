from __future__ import annotations

import torch
from torch.nn import functional as F

from vit2linear.headless import RIDGES, _scores, nearest_neighbours, neighbour_agreement, ridge_probe


def clusters(spread: float, count: int = 60) -> tuple[torch.Tensor, torch.Tensor]:
    """Unit vectors around five directions, labelled 3 to 7."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 16, generator=generator)
    labels = torch.arange(count) % 5
    noise = spread * torch.randn(count, 16, generator=generator)
    return F.normalize(centres[labels] + noise, dim=-1), labels + 3


def test_separable_features_are_told_apart() -> None:
    x, labels = clusters(0.2)
    for judge in (nearest_neighbours, ridge_probe):
        assert torch.equal(judge(x[:40], labels[:40], x[40:]), labels[40:]), judge


def test_the_probe_sees_what_neighbours_do_not() -> None:
    """One informative channel under many noisy ones."""
    x, labels = torch.randn(400, 30, generator=torch.Generator().manual_seed(1)), torch.arange(400) % 2
    x[:, 0] += 3.0 * labels
    x = F.normalize(x, dim=-1)
    right = [
        (judge(x[:300], labels[:300], x[300:]) == labels[300:]).float().mean()
        for judge in (nearest_neighbours, ridge_probe)
    ]
    assert right[1] > 0.85 and right[1] > right[0] + 0.02


def test_the_probe_is_ridge_regression() -> None:
    """Against least squares with one more row for each channel."""
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(50, 6, generator=generator).double(), F.one_hot(torch.arange(50) % 3).double()
    x, queries = x - x.mean(0), torch.randn(7, 6, generator=generator).double()
    for ridge in RIDGES:
        rows = torch.cat([x, (50 * ridge) ** 0.5 * torch.eye(6).double()])
        targets = torch.cat([y - y.mean(0), torch.zeros(6, 3).double()])
        wanted = queries @ torch.linalg.lstsq(rows, targets).solution + y.mean(0)
        torch.testing.assert_close(_scores(x, y, queries, ridge), wanted)


def test_neighbours_agree_with_themselves() -> None:
    x, _ = clusters(1.0)
    other = F.normalize(torch.randn(60, 8, generator=torch.Generator().manual_seed(3)), dim=-1)
    assert neighbour_agreement(x, x) == 100
    found = neighbour_agreement(x, other)
    assert found is not None and 5 < found < 35, "about 10 of 59 by chance"
    assert neighbour_agreement(x[:10], x[:10]) is None
