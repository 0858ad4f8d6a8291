"""What is noticed while a stage trains: steps that had to be skipped, and a loss that rises."""

from __future__ import annotations

from dataclasses import dataclass

from vit2linear.errors import NotFiniteError

IN_A_ROW = 20
"""So many skipped steps in a row end the run. fp16 looks for its loss scale by skipping, at most 16 times."""
MEMORY = 0.9
"""Of the smoothed loss: about ten steps."""
DIVERGED = 2.0
"""Times the lowest smoothed loss so far."""


@dataclass
class Watch:
    """Plain values, so that a checkpoint can carry them."""

    skipped: int = 0
    """Steps whose loss or gradient was not finite, so that they changed nothing."""
    in_a_row: int = 0
    reason: str = ""
    """Of the last one."""
    smooth: float | None = None
    lowest: float | None = None
    warned: bool = False

    def skip(self, error: NotFiniteError) -> None:
        """Count a step that changed nothing.

        Raises:
            NotFiniteError: the ``IN_A_ROW``-th in a row.
        """
        self.skipped += 1
        self.in_a_row += 1
        self.reason = error.message
        if self.in_a_row >= IN_A_ROW:
            raise NotFiniteError(f"{error.message[:-1]}, and nothing was finite for {IN_A_ROW} steps.", error.hint)

    def see(self, loss: float) -> str | None:
        """Note the loss of a step that was taken; returns a warning once, when it has gone up and stays there."""
        self.in_a_row = 0
        self.smooth = loss if self.smooth is None else MEMORY * self.smooth + (1 - MEMORY) * loss
        self.lowest = self.smooth if self.lowest is None else min(self.lowest, self.smooth)
        if self.warned or self.smooth <= DIVERGED * self.lowest:
            return None
        self.warned = True
        return (
            f"the loss goes up: {self.smooth:.4f} on average after {self.lowest:.4f}; "
            "if it does not come down again, start anew with lower learning rates"
        )
