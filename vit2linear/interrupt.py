"""SIGINT and SIGTERM end a run between two steps, or at once where nothing would be lost."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from vit2linear.errors import StoppedError, Vit2LinearError

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(KeyboardInterrupt):
    """Raised wherever the run is; no library swallows it."""


class Interrupts:
    """The first signal is noted while it is ``deferred``; otherwise, and the second time, it ends the run at once."""

    def __init__(self) -> None:
        self._seen: signal.Signals | None = None
        self._deferred = False
        self._process = os.getpid()

    @property
    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self._seen is not None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Listen; in a thread that Python gives no signals, do nothing.

        Raises:
            StoppedError: a signal ended what ran inside.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        try:
            yield
        except _Stopped:
            self.stop()
        except Vit2LinearError:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # A launcher sends SIGTERM to the others when a process has ended; what ended this one is said first.
                before[signal.SIGTERM] = signal.SIG_IGN
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What runs inside asks ``wanted`` often enough."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def stop(self) -> None:
        """End the run with what was noted, or as after SIGTERM: another process has been told to end."""
        seen = self._seen or signal.SIGTERM
        raise StoppedError(seen.name, seen.value, "The same command with --resume goes on from the last checkpoint.")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a loader process that was forked from this one, which ends it itself
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        repeated, self._seen = self.wanted, signal.Signals(number)
        if not self._deferred or repeated:
            raise _Stopped
