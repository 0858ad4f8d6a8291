"""The promise "any pretrained Softmax ViT", measured over timm's names."""

from __future__ import annotations

import pytest

from tests import coverage


@pytest.mark.slow
def test_every_name_and_the_page() -> None:
    found = [coverage.outcome(name) for name in coverage.names()]
    converted = [f for f in found if f.reason is None]
    assert len(found) >= 403 and len(converted) >= 345
    assert coverage.page(found) == coverage.PAGE.read_text("utf-8"), "run python -m tests.coverage"
