"""Intervals, tests and calibration against brute force."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import numpy as np
import pytest
import torch

from vit2linear.significance import calibration_error, classes_that_lost, difference, sign_test


@pytest.mark.parametrize(("won", "lost"), [(0, 0), (1, 0), (0, 6), (3, 3), (4, 15), (40, 61), (700, 800)])
def test_the_sign_test_is_the_binomial_sum(won: int, lost: int) -> None:
    n = won + lost
    tail = sum(Fraction(comb(n, i), 2**n) for i in range(min(won, lost) + 1))
    assert sign_test(won, lost) == pytest.approx(float(min(Fraction(1), 2 * tail)), rel=1e-9)


def test_the_interval_is_that_of_resampled_images() -> None:
    torch.manual_seed(0)
    teacher = torch.rand(400) < 0.8
    student = teacher ^ (torch.rand(400) < 0.1)
    found = difference(teacher, student)
    gain = student.double().numpy() - teacher.double().numpy()
    rng = np.random.default_rng(1)
    means = [100 * rng.choice(gain, 400).mean() for _ in range(4000)]
    assert found.points == pytest.approx(100 * gain.mean())
    assert [found.low, found.high] == pytest.approx([*np.percentile(means, [2.5, 97.5])], abs=0.35)
    assert found.won - found.lost == gain.sum() and found.low < found.points < found.high


def test_noise_is_called_noise() -> None:
    teacher = torch.tensor([True] * 90 + [False] * 10)
    student = torch.tensor([True] * 88 + [False] * 11 + [True])
    assert "within the noise" in difference(teacher, student).words
    assert "noise" not in difference(teacher, ~teacher).words


def test_calibration_error_against_a_loop() -> None:
    torch.manual_seed(0)
    confidence, hits = torch.rand(500), torch.rand(500) < 0.5
    confidence[0] = 1.0
    wanted = 0.0
    for b in range(15):
        inside = (confidence >= b / 15) & ((confidence < (b + 1) / 15) | ((confidence == 1) & (b == 14)))
        if inside.any():
            gap = abs(float(confidence[inside].double().mean()) - float(hits[inside].double().mean()))
            wanted += gap * float(inside.double().mean())
    assert calibration_error(confidence, hits) == pytest.approx(100 * wanted, rel=1e-6)
    sure = torch.ones(10)
    assert calibration_error(sure, sure.bool()) == 0 and calibration_error(sure, ~sure.bool()) == 100


def test_the_class_that_lost_most_comes_first() -> None:
    truth = torch.tensor([0, 0, 1, 1, 1, 1, 2, 2])
    teacher = torch.tensor([1, 1, 1, 1, 1, 0, 0, 0]).bool()
    student = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1]).bool()
    lost = classes_that_lost(teacher, student, truth, ["a", "b", "c", "d"])
    assert [(c.name, c.images, c.teacher, c.student) for c in lost] == [("b", 4, 75.0, 0.0), ("a", 2, 100.0, 50.0)]
