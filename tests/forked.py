"""``vit2linear`` in a process of its own that imports nothing first: it is forked from a server that has.

So what is killed at a random instant is nearly always at work. For tests; they start it with ``Process(...)``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import accelerate  # noqa: F401  for those that are forked
import timm  # noqa: F401

from vit2linear import finished, pipeline  # noqa: F401
from vit2linear.cli.main import app

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload([__name__])


def _work(arguments: list[str], said: str) -> None:
    multiprocessing.set_start_method("fork", force=True)  # of the loader processes, as where the command is typed
    os.chdir(Path(said).parent)
    file = os.open(said, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    app(arguments)


class Process:
    """A running ``vit2linear ARGUMENTS``; ``said`` takes stdout and stderr, and its folder is the current one."""

    def __init__(self, *arguments: object, said: Path) -> None:
        self.said = said
        self._process = _SERVER.Process(target=_work, args=([*map(str, arguments)], str(said)))
        self._process.start()

    @property
    def code(self) -> int | None:
        """The exit code; negative after a signal, ``None`` while it runs."""
        return self._process.exitcode

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.said.read_text() if self.said.exists() else ""

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process.pid is not None
        if self.code is None:
            os.kill(self._process.pid, number)

    def children(self) -> list[int]:
        """Its loader processes."""
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def wait(self, timeout: float = 120) -> int:
        """Until it ends; returns the exit code."""
        self._process.join(timeout)
        assert self.code is not None, f"still running after {timeout} s: {self.text}"
        return self.code

    def wait_until(self, seen: Callable[[], bool], timeout: float = 120) -> bool:
        """Watch closely until ``seen`` or the end; returns whether it was seen."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if seen():
                return True
            if self.code is not None:
                return False
            time.sleep(0.0002)
        raise AssertionError(f"not seen within {timeout} s: {self.text}")

    def end(self) -> None:
        """Kill it, where a test has failed."""
        self.send(signal.SIGKILL)
        self._process.join()
