"""The ledger of images that cannot be used: left out, counted, named, and too many are an error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from vit2linear.errors import DataError

LISTED = 20
"""So many are named in a message."""
JUDGED_FROM = 1000
"""Images of a stream that are seen before the share of bad ones says something."""
IN_A_ROW = 100
"""So many bad ones in a row say something at once."""


@dataclass
class BadImages:
    """Images that could not be used, over a whole run.

    ``found`` is all that a checkpoint has to carry: a run that is resumed starts from ``BadImages(..., found=found)``.
    """

    allowed: float
    """The share of bad images, 0 to 1, above which a run stops; with 0 it stops at the first."""
    total: int | None
    """Images of the whole set, training and validation together; ``None`` for a stream of unknown length."""
    found: dict[str, str] = field(default_factory=dict)
    """Name to reason, each image once."""
    _seen: int = field(default=0, repr=False)
    _met: int = field(default=0, repr=False)
    _row: int = field(default=0, repr=False)

    def add(self, bad: Sequence[tuple[str, str]], good: int = 0) -> None:
        """Note a batch: names and reasons of its bad images, and how many good ones it had.

        Without a ``total`` it is the share of the images seen so far that is judged.

        Raises:
            DataError: more bad images than allowed, with their list.
        """
        self.found.update(bad)
        self._seen += good + len(bad)
        self._met += len(bad)
        self._row = len(bad) if good else self._row + len(bad)
        if not bad:
            return
        if self.total is not None:
            count, of, told = len(self.found), self.total, True
        else:
            count, of = self._met, self._seen
            told = not self.allowed or of >= JUDGED_FROM or self._row >= IN_A_ROW
        if told and count > self.allowed * of:
            seen = f"{count:,} of {of:,} images" + ("" if self.total is not None else " read so far")
            more = min(100, max(5, math.ceil(200 * self.allowed)))
            raise DataError(
                f"{seen} cannot be used, and at most {100 * self.allowed:g}% may be so: {self._listed()}.",
                f"Repair or remove them, or allow more with --max-bad {more}%.",
            )

    @property
    def summary(self) -> str | None:
        """What was left out, in one line; ``None`` if nothing was."""
        if not self.found:
            return None
        count = "1 image" if len(self.found) == 1 else f"{len(self.found):,} images"
        return f"{count} could not be used and {'was' if len(self.found) == 1 else 'were'} left out: {self._listed()}."

    def _listed(self) -> str:
        named = [f"{name} ({reason})" for name, reason in list(self.found.items())[:LISTED]]
        rest = len(self.found) - len(named)
        return ", ".join(named) + (f", and {rest:,} more" if rest else "")
