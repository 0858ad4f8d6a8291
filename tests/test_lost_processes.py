"""A conversion by two processes that are killed or told to end, as torchrun and a cluster do it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")]

STEPS = 400
TORCHRUN = ("-m", "torch.distributed.run", "--nproc_per_node", "2")
LOST = "error: the processes lost each other ("
STOPPED = "error: stopped by SIGTERM. The same command with --resume goes on from the last checkpoint."


class Command:
    """The command that a user types, in ``folder``, which gets ``out``."""

    def __init__(self, source: Path, images: Path, folder: Path) -> None:
        self.folder = folder
        self.arguments = ["-m", "vit2linear", "convert", str(source), "--data", str(images), "-o", "out", "--resume"]
        self.arguments += ["-b", "4", "-j", "0", "--device", "cpu", "--num-samples", "2", "--checkpoint-every", "5"]
        self.arguments += ["--distill-steps", str(STEPS)]

    @contextmanager
    def started(self, *launch: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, *launch, *self.arguments]
        root = str(Path(__file__).parents[1])
        there = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            command, cwd=self.folder, env=there, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        ) as run:
            try:
                yield run
            finally:
                run.terminate()  # torchrun then ends its workers, which it could not if it were killed

    def finish(self, *launch: str) -> str:
        """Run to the end; returns what was said."""
        with self.started(*launch) as run:
            _, said = run.communicate(timeout=250)
        assert run.returncode == 0, said
        return said

    def wait_for_steps(self, run: subprocess.Popen[str]) -> None:
        """Until a checkpoint lies inside a stage."""
        while run.poll() is None and not any(step for _, step in self.checkpoints()):
            time.sleep(0.01)
        assert run.poll() is None

    def checkpoints(self) -> list[tuple[int, int]]:
        """Moment and step."""
        names = [path.name for path in (self.folder / "out.run").glob("checkpoint-*") if path.suffix != ".part"]
        return [(int(name.split("-")[1]), int(name.split("-")[2])) for name in names]

    def steps(self, metrics: Path) -> list[tuple[str, int]]:
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        return [(line["stage"], line["step"]) for line in lines]


@pytest.fixture
def command(checkpoint: Path, class_folders: Path, tmp_path: Path) -> Command:
    return Command(checkpoint, class_folders, tmp_path)


def process_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process that torchrun started as ``rank``."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    environments = {int(child): Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    environments = {int(child): Path(f"/proc/{child}/environ").read_bytes().split(b"\0") for child in children}
    (found,) = [child for child, values in environments.items() if f"RANK={rank}".encode() in values]
    return found


@pytest.mark.parametrize(("rank", "launch"), [(1, ()), (0, TORCHRUN)])
def test_a_killed_process_ends_the_run_and_leaves_a_checkpoint(
    rank: int, launch: tuple[str, ...], command: Command
) -> None:
    """Resumed by one process and by two."""
    with command.started(*TORCHRUN) as run:
        command.wait_for_steps(run)
        os.kill(process_of(run, rank), signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    assert run.returncode != 0 and said.count(LOST) == 1
    assert "run the same command with --resume" in said and not (command.folder / "out").exists()
    ((moment, step),) = command.checkpoints()
    print(f"process {rank} was killed; there is a checkpoint of step {step}")
    again = command.finish(*launch)
    assert f"going on from 'checkpoint-{moment}-{step}'" in again
    taken = command.steps(command.folder / "out" / "metrics.jsonl")
    assert taken == [(s, i + 1) for s, n in (("attention", 3), ("feature", 7)) for i in range(n * STEPS // 10)]


def test_sigterm_to_the_launcher_stops_all_processes_after_the_same_step(command: Command) -> None:
    """None waits for one that has stopped already."""
    with command.started(*TORCHRUN) as run:
        command.wait_for_steps(run)
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=60)
    assert run.returncode != 0 and said.count(STOPPED) == 2 and LOST not in said
    ((moment, step),) = command.checkpoints()
    assert command.steps(command.folder / "out.run" / "metrics.jsonl")[-1][1] == step
    assert f"going on from 'checkpoint-{moment}-{step}'" in command.finish(*TORCHRUN)
