"""``OUTPUT.run``: the folder of a conversion that is not finished, with its lock, checkpoints and metrics.

It lies beside the output, so that the finished artifact is moved into place by renaming, and it is gone when the
artifact is there. A checkpoint is ``checkpoint-MOMENT-STEP/``, ``state.json`` and safetensors, complete or absent; the
one before is deleted after the new one is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vit2linear import artifact
from vit2linear.checkpoint import FORMAT, STATE, Checkpoint
from vit2linear.durable import drop, space_words, written_aside
from vit2linear.errors import ArtifactError

LOCK = "lock"
_REPLACED = "replaced"


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
            state: JSON; with it goes what reading it back needs.

        Raises:
            ArtifactError: the disk refused; the checkpoint before is as it was.
        """
        folder = self.path / f"checkpoint-{moment}-{step}"
        before = [p for p in self.path.glob("checkpoint-*") if p != folder and p.suffix != ".part"]
        if folder.exists():
            return
        try:
            with written_aside(folder) as aside:
                for name, group in tensors.items():
                    whole = {k: v.detach().contiguous() for k, v in group.items()}
                    save_file(whole, aside / f"{name}.safetensors", metadata={"format": "pt"})
                whole_state = {"format": FORMAT, "files": [*tensors], **state}
                (aside / STATE).write_text(json.dumps(whole_state) + "\n", "utf-8")
        except (OSError, SafetensorError) as error:
            raise self._full("a checkpoint", _size(*tensors.values()), error) from error
        for old in before:
            with suppress(OSError):
                drop(old)

    @property
    def words(self) -> str:
        """Which checkpoint is there."""
        last = self.checkpoint
        return f"The last checkpoint is {str(last.folder)!r}." if last is not None else "There is no checkpoint yet."

    def log(self, line: dict[str, Any]) -> None:
        """Append a line to the metrics.

        Raises:
            ArtifactError: the disk refused.
        """
        text = json.dumps(line) + "\n"
        try:
            with self.metrics.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise self._full(repr(str(self.metrics)), len(text), error) from error

    def forget_after(self, moment: int, step: int) -> None:
        """Drop the metrics of steps that will be taken again.

        Raises:
            ArtifactError: the disk refused; the metrics are as they were.
        """
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
        aside = self.metrics.with_suffix(".part")
        try:
            aside.write_text("".join(kept), "utf-8")
            aside.replace(self.metrics)
        except OSError as error:
            aside.unlink(missing_ok=True)
            raise self._full(repr(str(self.metrics)), sum(map(len, kept)), error) from error

    def put_back(self, output: Path) -> None:
        """Undo the first of the two renames of ``write``, if the second did not come."""
        replaced = self.path / _REPLACED
        if replaced.exists() and not output.exists():
            replaced.rename(output)
        shutil.rmtree(replaced, ignore_errors=True)  # the second did come

    def clear(self, resume: bool) -> None:
        """Leave only the lock, or, to resume, all that is whole."""
        for path in [*self.path.iterdir()]:
            if path.name == LOCK or (resume and path.suffix != ".part"):
                continue
            if path.suffix != ".part" and path.is_dir():
                drop(path)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def write(
        self,
        output: Path,
        student: nn.Module,
        data_config: dict[str, Any],
        recipe: str,
        report: dict[str, Any],
        card: str,
        others: Mapping[str, bytes],
    ) -> artifact.Artifact:
        """``artifact.write`` in this folder, then in place of ``output``, whatever was there; this folder is done with.

        Raises:
            ArtifactError: the disk refused, or the model differs when reloaded; the checkpoint is kept.
        """
        folder = self.path / "artifact"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            metrics = {artifact.METRICS: self.metrics.read_bytes()} if self.metrics.exists() else {}
            artifact.write(folder, student, data_config, recipe, report, card, {**others, **metrics})
            if output.exists():
                output.rename(self.path / _REPLACED)
            folder.rename(output)
        except OSError as error:
            raise self._full(repr(str(output)), _size(student.state_dict()), error) from error
        shutil.rmtree(self.path, ignore_errors=True)
        return artifact.open_artifact(str(output))

    def _full(self, what: str, size: int, error: Exception) -> ArtifactError:
        return ArtifactError(
            f"cannot write {what}: {error}. {space_words(size, self.path)}",
            f"{self.words} Make room there, then run the same command with --resume.",
        )


def _size(*groups: dict[str, Tensor]) -> int:
    return sum(t.numel() * t.element_size() for group in groups for t in group.values())


def clear_leftovers(output: Path) -> None:
    """Remove what a run beside a finished ``output`` has left, unless another process is at it."""
    run = RunFolder(_run_path(output))
    if run.path.exists():
        with suppress(Timeout, OSError), FileLock(run.path / LOCK, timeout=0):
            shutil.rmtree(run.path, ignore_errors=True)


def _run_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.run")


@contextmanager
def open_run(output: Path, resume: bool, overwrite: bool) -> Iterator[RunFolder]:
    """The run folder of ``output``, locked; without ``resume`` an empty one.

    It is removed at the end unless there is a checkpoint in it.

    Raises:
        ArtifactError: it cannot be made, another process is at it, or there is a checkpoint and neither ``resume`` nor
            ``overwrite`` says what becomes of it.
    """
    run = RunFolder(_run_path(output))
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
        try:
            run.clear(resume)
        except OSError as error:
            raise ArtifactError(f"cannot empty {str(run.path)!r}: {error}.", "Choose another --output.") from error
        yield run
    finally:
        run.put_back(output)
        if run.path.exists() and run.checkpoint is None:
            shutil.rmtree(run.path, ignore_errors=True)  # before others may take it up
        lock.release()
