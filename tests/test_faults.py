"""What happens to a conversion in a process of its own: killed, stopped, out of disk space, its images gone."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forked import Process
from tests.interrupted import EVERYTHING, assert_same, checkpoints, interrupt, request, run_folder
from vit2linear import Recipe, convert
from vit2linear.recipe import override, to_toml

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="signals, tmpfs and /proc of Linux")]

KILLS = 20
WRITTEN = (
    ("checkpoint-1-0", ""),
    ("checkpoint-2-2", "student.safetensors"),
    ("checkpoint-4-3", "optimiser.safetensors"),
    ("checkpoint-6-0", "state.json"),
    ("artifact", "model.safetensors"),
    ("artifact", "README.md"),
)
"""What is being written when a run is killed, and which of its files is there."""

Start = Callable[..., Process]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """In every process: sums of more threads are rounded otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
        yield


@pytest.fixture(scope="module")
def images(class_folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that may be moved away."""
    return shutil.copytree(class_folders, tmp_path_factory.mktemp("moving") / "images")


@pytest.fixture
def recipe(checkpoint: Path, images: Path, tmp_path: Path) -> Recipe:
    """The conversion with everything, a checkpoint after every step and two loader processes, to ``work/out``."""
    changes = EVERYTHING | {"run__checkpoint_every": 1, "data__workers": 2}
    (tmp_path / "work").mkdir()
    return request(checkpoint, images, tmp_path / "work" / "out", **changes)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of the same, uninterrupted, in a process of its own."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = request(checkpoint, images, folder / "out", **EVERYTHING)
    (folder / "recipe.toml").write_text(to_toml(recipe))
    process = Process("convert", "--recipe", "recipe.toml", said=folder / "said.txt")
    assert process.wait() == 0, process.text
    return folder / "out"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``vit2linear convert`` of a recipe with flags."""
    started: list[Process] = []

    def begin(recipe: Recipe, *flags: str) -> Process:
        path = tmp_path / f"recipe-{len(started)}.toml"
        path.write_text(to_toml(recipe))
        started.append(Process("convert", "--recipe", path, *flags, said=tmp_path / f"said-{len(started)}.txt"))
        return started[-1]

    yield begin
    for process in started:
        process.end()


def output_of(recipe: Recipe) -> Path:
    return Path(str(recipe.output.dir))


def finish(recipe: Recipe, start: Start, whole: Path, *flags: str) -> None:
    """Resume, and compare with the uninterrupted run."""
    process = start(recipe, "--resume", *flags)
    assert process.wait() == 0, process.text
    assert_same(whole, output_of(recipe))
    assert [p.name for p in output_of(recipe).parent.iterdir()] == ["out"], "nothing else is left"


@pytest.mark.timeout(900)
def test_sigkill_at_random_instants(recipe: Recipe, start: Start, whole: Path) -> None:
    """A run that ends before it is killed is compared, and the next one begins."""
    seed = random.SystemRandom().randrange(2**32)
    rng, began = random.Random(seed), time.monotonic()
    assert start(recipe).wait() == 0
    length = time.monotonic() - began
    assert_same(whole, output_of(recipe))
    print(f"seed {seed}, an uninterrupted run takes {length:.2f} s")
    shutil.rmtree(output_of(recipe))
    killed = finished = 0
    while killed < KILLS:
        process, instant = start(recipe, "--resume"), rng.uniform(0, length)
        time.sleep(instant)
        process.send(signal.SIGKILL)
        code = process.wait()
        assert code in (0, -signal.SIGKILL), process.text
        if code == 0:
            finished += 1
            assert_same(whole, output_of(recipe))
            assert [p.name for p in output_of(recipe).parent.iterdir()] == ["out"]
            shutil.rmtree(output_of(recipe))
            continue
        killed += 1
        there = sorted(p.name for p in run_folder(recipe).glob("*")) if run_folder(recipe).exists() else []
        last = (process.text.splitlines() or ["nothing said"])[-1]
        print(f"kill {killed} after {instant:.2f} s, at '{last}': {', '.join(there) or 'no run folder'}")
    print(f"{finished} runs ended in between")
    finish(recipe, start, whole)


@pytest.mark.parametrize(("name", "file"), WRITTEN)
def test_sigkill_while_it_is_written(name: str, file: str, recipe: Recipe, start: Start, whole: Path) -> None:
    """The folder aside is there after the kill, so the kill came before the rename."""
    aside = run_folder(recipe) / f"{name}.part"
    for _ in range(20):
        process = start(recipe, "--resume")
        if process.wait_until((aside / file).exists):
            process.send(signal.SIGKILL)
            process.wait()
            if aside.exists():
                break
        shutil.rmtree(run_folder(recipe), ignore_errors=True)
        shutil.rmtree(output_of(recipe), ignore_errors=True)
    else:
        raise AssertionError("never in time")
    print(f"killed with {name}.part/: {', '.join(sorted(p.name for p in aside.iterdir())) or 'nothing yet'}")
    assert not output_of(recipe).exists()
    assert [c for c in checkpoints(recipe) if not c.endswith(".part")] or name == "checkpoint-1-0"
    finish(recipe, start, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_command_that_a_user_types(number: signal.Signals, recipe: Recipe, whole: Path) -> None:
    path = output_of(recipe).parent.parent / "recipe.toml"
    path.write_text(to_toml(recipe))
    command = [sys.executable, "-m", "vit2linear", "convert", "--recipe", str(path), "--resume"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            while process.poll() is None and "checkpoint-2-1" not in checkpoints(recipe):
                time.sleep(0.001)
            process.send_signal(number)
            stdout, stderr = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 128 + number and not stdout
    assert f"error: stopped by {number.name}. The same command with --resume goes on" in stderr
    assert "Traceback" not in stderr
    (kept,) = checkpoints(recipe)
    print(f"{number.name}: {kept} is there")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"going on from '{kept}'" in done.stderr
    assert_same(whole, output_of(recipe))


def test_a_second_sigint_ends_at_once(recipe: Recipe, start: Start, whole: Path) -> None:
    """A stage whose first step takes long: all of 20,000 copies of images, in one part."""
    slow = override(recipe, distill__batch_size=20_000, distill__grad_accum_steps=1, data__workers=0)
    process = start(slow)
    assert process.wait_until(lambda: "after calibration" in process.text)
    time.sleep(1)
    process.send(signal.SIGINT)
    time.sleep(1)
    assert process.code is None, "the step is to be finished first"
    process.send(signal.SIGINT)
    assert process.wait(10) == 130 and "error: stopped by SIGINT." in process.text
    assert checkpoints(slow) == ["checkpoint-2-0"]


class Disk:
    """A small file system at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path, self.filler = path, path / "filler"

    def leave(self, size: int) -> None:
        """Fill it up to ``size`` bytes."""
        self.free()
        self.filler.write_bytes(bytes(shutil.disk_usage(self.path).free - size))

    def free(self) -> None:
        """As it was."""
        self.filler.unlink(missing_ok=True)

    def mount(self, options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path], check=True, capture_output=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    try:
        disk.mount("size=16m")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no tmpfs here: {error.stderr!r}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk.path], check=True)


@pytest.mark.parametrize(
    ("until", "left", "says"),
    [
        ("after calibration", 200_000, "a checkpoint: .* It takes 0.8 MiB, and 1[0-9]{2}.0 KiB are free"),
        ("after calibration", 0, "'.*metrics.jsonl': .* It takes 0.[12] KiB, and 0.0 KiB are free"),
        ("after stage task", 200_000, "'.*out': .* It takes 4[0-9]{2}.. KiB, and 1[0-9]{2}.0 KiB are free"),
    ],
    ids=["checkpoint", "metrics", "artifact"],
)
def test_a_full_disk(until: str, left: int, says: str, disk: Disk, recipe: Recipe, start: Start, whole: Path) -> None:
    recipe = override(recipe, output__dir=str(disk.path / "out"))
    interrupt(replace(recipe, data=replace(recipe.data, workers=0)), until, killed=True)
    (kept,) = run_folder(recipe).glob("checkpoint-*")
    before = {path.name: path.read_bytes() for path in kept.iterdir()}
    disk.leave(left)
    process = start(recipe, "--resume")
    assert process.wait() == 7
    error = process.text.splitlines()[-1]
    print(error)
    assert re.search(f"^error: cannot write {says}", error) and f"on the disk of '{run_folder(recipe)}'" in error
    assert f"The last checkpoint is '{kept}'" in error and "--resume" in error
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == before
    assert not output_of(recipe).exists() and not list(disk.path.rglob("*.part"))
    disk.free()
    finish(recipe, start, whole)


def test_a_disk_that_runs_full_while_a_run_writes(disk: Disk, recipe: Recipe, start: Start, whole: Path) -> None:
    """There is room for one checkpoint, and not for two."""
    recipe = override(recipe, output__dir=str(disk.path / "out"))
    disk.leave(2_000_000)
    process = start(recipe)
    assert process.wait() == 7, process.text
    print(process.text.splitlines()[-1])
    (kept,) = checkpoints(recipe)
    assert kept in process.text and "Traceback" not in process.text
    disk.free()
    finish(recipe, start, whole)


def test_a_read_only_output(disk: Disk, recipe: Recipe, start: Start, whole: Path) -> None:
    """From the start, and when a run is to be resumed."""
    recipe = override(recipe, output__dir=str(disk.path / "out"))
    disk.mount("remount,ro")
    process = start(recipe)
    assert process.wait() == 7
    assert "read-only" in process.text and "Choose another --output." in process.text
    assert "before training" not in process.text
    disk.mount("remount,rw")
    interrupt(replace(recipe, data=replace(recipe.data, workers=0)), "attention 1")
    disk.mount("remount,ro")
    process = start(recipe, "--resume")
    assert process.wait() == 7 and "read-only" in process.text, process.text
    disk.mount("remount,rw")
    finish(recipe, start, whole)


def held_at(process: Process, recipe: Recipe, name: str) -> None:
    """Stop a run when a checkpoint is there."""
    assert process.wait_until((run_folder(recipe) / name).exists), process.text
    process.send(signal.SIGSTOP)


def test_two_runs_to_one_output(recipe: Recipe, start: Start, whole: Path) -> None:
    first = start(recipe)
    held_at(first, recipe, "checkpoint-2-1")
    for flags in ([], ["--resume"], ["--overwrite"], ["--resume", "--overwrite"]):
        second = start(recipe, *flags)
        assert second.wait() == 7, second.text
        assert "another process is writing" in second.text and "before training" not in second.text
    first.send(signal.SIGCONT)
    assert first.wait() == 0, first.text
    assert_same(whole, output_of(recipe))


@pytest.mark.parametrize("workers", [0, 2])
def test_images_that_vanish(workers: int, images: Path, recipe: Recipe, start: Start, whole: Path) -> None:
    recipe = override(recipe, data__workers=workers)
    process = start(recipe)
    held_at(process, recipe, "checkpoint-2-1")
    away = images.rename(images.with_name("away"))
    try:
        process.send(signal.SIGCONT)
        assert process.wait() == 5, process.text
    finally:
        away.rename(images)
    error = process.text.splitlines()[-1]
    print(error)
    assert error.startswith("error: ") and str(images) in error and "Traceback" not in process.text
    assert checkpoints(recipe)
    finish(recipe, start, whole)


def test_a_killed_loader_process(recipe: Recipe, start: Start, checkpoint: Path, images: Path) -> None:
    long = request(checkpoint, images, output_of(recipe), distill__steps=60, data__workers=2, run__checkpoint_every=1)
    whole = override(long, output__dir=str(output_of(recipe).parent.parent / "whole"), data__workers=0)
    convert(whole)
    process = start(long)
    held_at(process, long, "checkpoint-1-2")
    os.kill(process.children()[-1], signal.SIGKILL)
    process.send(signal.SIGCONT)
    assert process.wait() == 5, process.text
    error = process.text.splitlines()[-1]
    assert error.startswith("error: a loader process was killed") and "--resume" in error
    assert "Traceback" not in process.text and checkpoints(long)
    finish(long, start, output_of(whole))
