"""Forwards that can be stopped between two layers, so that many batches go through a model in step.

A closed form needs all images at one layer before any of them may go on. Every batch's forward runs in a thread of its
own, one at a time, and stops at a hook until it is told to go on: each layer is computed once, whatever the model's
code looks like, and only what its forward holds at that moment is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class _Abandoned(BaseException):
    """Raised inside a forward that nobody will continue."""


class SteppedForward:
    """A forward without gradients that stops at every ``stop`` of a hook and goes on at ``advance``."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.notes: dict[str, Any] = {}
        """What hooks keep until a later stop."""
        self._forward = forward
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._seen: Any = None
        self._error: BaseException | None = None
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        _RUNNING[self._thread] = self
        self._thread.start()

    @staticmethod
    def current() -> SteppedForward | None:
        """The forward whose hook is running; ``None`` in a forward that is not stepped, where hooks do nothing."""
        return _RUNNING.get(threading.current_thread())

    def stop(self, seen: Any) -> None:
        """Called by a hook: hand ``seen`` to the caller of ``advance`` and wait."""
        self._seen = seen
        self._stopped.release()
        self._go.acquire()
        if self._abandoned:
            raise _Abandoned

    def advance(self) -> Any:
        """Run to the next stop and return what was seen there; ``None`` at the end. Raises what the forward raised."""
        if self._thread.is_alive():
            self._go.release()
            self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._seen

    def abandon(self) -> None:
        """End the forward where it is."""
        self._abandoned = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._abandoned:
                with torch.no_grad():
                    self._forward()
        except _Abandoned:
            pass
        except BaseException as error:  # handed over to the thread that waits for it
            self._error = error
        finally:
            del _RUNNING[threading.current_thread()]
            self._seen = None
            self._stopped.release()


_RUNNING: dict[threading.Thread, SteppedForward] = {}
