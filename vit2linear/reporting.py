"""How long work tells what it does; the command line brings its own reporter, a library call logs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

_logger = logging.getLogger("vit2linear")


@dataclass(frozen=True)
class Progress:
    """One optimiser step of a stage."""

    stage: str
    step: int
    total: int
    loss: float
    images_per_second: float
    seconds_left: float


class Reporter:
    """Sends everything to the ``vit2linear`` logger; subclasses show it."""

    def say(self, text: str) -> None:
        """One line about what happens now."""
        _logger.info(text)

    def progress(self, progress: Progress) -> None:
        """Called after every step."""
        if progress.step in (1, progress.total) or progress.step % 100 == 0:
            _logger.info("%s", progress)
