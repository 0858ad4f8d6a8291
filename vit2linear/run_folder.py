"""``OUTPUT.run``: the folder of a conversion that is not finished, with its lock, checkpoints and metrics.

It lies beside the output, so that the finished artifact is moved into place by renaming, and it is gone when the
artifact is there. A checkpoint is ``checkpoint-MOMENT-STEP/``, ``state.json`` and safetensors, complete or absent; the
one before is deleted after the new one is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vit2linear import artifact
from vit2linear.durable import free_words, written_aside
from vit2linear.errors import ArtifactError

STATE, LOCK = "state.json", "lock"
_REPLACED = "replaced"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path

    @property
    def place(self) -> tuple[int, int]:
        """Moment and step."""
        _, moment, step = self.folder.name.split("-")
        return int(moment), int(step)

    @property
    def state(self) -> dict[str, Any]:
        """All that is no tensor."""
        try:
            state: dict[str, Any] = json.loads((self.folder / STATE).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise self._broken(error) from error
        return state

    def tensors(self, device: str = "cpu") -> dict[str, dict[str, Tensor]]:
        """By file and key."""
        try:
            return {path.stem: load_file(path, device) for path in sorted(self.folder.glob("*.safetensors"))}
        except (OSError, SafetensorError) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> ArtifactError:
        return ArtifactError(
            f"the checkpoint {str(self.folder)!r} cannot be read: {error}.", "Start anew with --overwrite."
        )


@dataclass(frozen=True)
class RunFolder:
    """An unfinished conversion on disk."""

    path: Path

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The last complete one."""
        found = [Checkpoint(path) for path in self.path.glob("checkpoint-*") if path.suffix != ".part"]
        return max(found, key=lambda c: c.place, default=None)

    @property
    def metrics(self) -> Path:
        """One JSON object a line, in the order of the steps."""
        return self.path / artifact.METRICS

    def save(self, moment: int, step: int, tensors: dict[str, dict[str, Tensor]], state: dict[str, Any]) -> None:
        """Write a checkpoint, and only then delete the one before.

        Args:
            moment: of the conversion, counted from 0.
            step: of its stage; 0 where it has none.
            tensors: by file and key.
            state: JSON.

        Raises:
            ArtifactError: the disk refused; the checkpoint before is as it was.
        """
        folder = self.path / f"checkpoint-{moment}-{step}"
        before = [p for p in self.path.glob("checkpoint-*") if p != folder]
        if folder.exists():
            return
        try:
            with written_aside(folder) as aside:
                for name, group in tensors.items():
                    whole = {k: v.detach().contiguous() for k, v in group.items()}
                    save_file(whole, aside / f"{name}.safetensors", metadata={"format": "pt"})
                (aside / STATE).write_text(json.dumps(state) + "\n", "utf-8")
        except (OSError, SafetensorError) as error:
            size = sum(t.numel() * t.element_size() for group in tensors.values() for t in group.values())
            raise ArtifactError(
                f"cannot write a checkpoint of {size / 2**20:,.0f} MiB: {error}. {free_words(self.path)}.",
                f"{self.words} Free space, then run the same command with --resume.",
            ) from error
        for old in before:
            shutil.rmtree(old, ignore_errors=True)

    @property
    def words(self) -> str:
        """Which checkpoint is there."""
        last = self.checkpoint
        return f"The last checkpoint is {str(last.folder)!r}." if last is not None else "There is no checkpoint yet."

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to the metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def forget_after(self, moment: int, step: int) -> None:
        """Drop the metrics of steps that will be taken again."""
        if not self.metrics.exists():
            return
        kept = []
        for text in self.metrics.read_text("utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # cut off in the middle
                break
            if (line["moment"], line["step"]) <= (moment, step):
                kept.append(text + "\n")
        self.metrics.write_text("".join(kept), "utf-8")

    def put_back(self, output: Path) -> None:
        """Undo the first of the two renames of ``write``, if the second did not come."""
        if (self.path / _REPLACED).exists() and not output.exists():
            (self.path / _REPLACED).rename(output)

    def write(self, output: Path, *contents: Any) -> artifact.Artifact:
        """``artifact.write`` in this folder, then in place of ``output``, whatever was there; this folder is done with.

        Raises:
            ArtifactError: the disk refused, or the model differs when reloaded; the checkpoint is kept.
        """
        folder = self.path / "artifact"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            artifact.write(folder, *contents)
            if self.metrics.exists():
                shutil.copy(self.metrics, folder / artifact.METRICS)
            if output.exists():
                output.rename(self.path / _REPLACED)
            folder.rename(output)
        except OSError as error:
            raise ArtifactError(
                f"cannot write {str(output)!r}: {error}. {free_words(self.path)}.",
                f"{self.words} Free space, then run the same command with --resume.",
            ) from error
        shutil.rmtree(self.path, ignore_errors=True)
        return artifact.open_artifact(str(output))


@contextmanager
def open_run(output: Path, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
    """The run folder of ``output``, locked; without ``resume`` an empty one.

    It is removed at the end unless there is a checkpoint in it.

    Raises:
        ArtifactError: it cannot be made, another process is at it, or there is a checkpoint and neither ``resume`` nor
            ``overwrite`` says what becomes of it.
    """
    run = RunFolder(output.with_name(f"{output.name}.run"))
    try:
        run.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run.path / LOCK, timeout=0)
        lock.acquire()
    except Timeout as error:
        raise ArtifactError(
            f"another process is writing {str(output)!r}.", "Wait for it, or choose another --output."
        ) from error
    except OSError as error:
        raise ArtifactError(f"cannot write {str(run.path)!r}: {error}.", "Choose another --output.") from error
    try:
        run.put_back(output)
        # Nobody else writes there from here on.
        artifact.check_output(output, overwrite)
        if run.checkpoint is not None and not resume and not overwrite:
            raise ArtifactError(
                f"{str(run.path)!r} holds a conversion that was interrupted.",
                "Go on with --resume, or start anew with --overwrite.",
            )
        for path in run.path.iterdir() if not resume else ():
            if path.name != LOCK:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        yield run
    finally:
        run.put_back(output)
        lock.release()
        if run.path.exists() and run.checkpoint is None:
            shutil.rmtree(run.path, ignore_errors=True)
