"""The folder that a conversion writes, complete or absent, and reading it back.

It is written aside, reloaded through timm and compared, and only then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import timm.models
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from vit2linear import hub
from vit2linear.durable import written_aside
from vit2linear.errors import ArtifactError, SourceError, Vit2LinearError
from vit2linear.jsonfile import read_object
from vit2linear.licence import LICENSE, NOTICE
from vit2linear.recipe import Recipe, read_recipe
from vit2linear.stored import check_model, read_config, read_report

WEIGHTS, CONFIG, RECIPE, REPORT, CARD = "model.safetensors", "config.json", "recipe.toml", "report.json", "README.md"
METRICS, SPEED, SITES, PAGE = "metrics.jsonl", "speed.png", "sites.png", "report.html"
FILES = [WEIGHTS, CONFIG, RECIPE, REPORT, CARD, METRICS, SPEED, SITES, PAGE, LICENSE, NOTICE]
"""All that an artifact consists of, and all that is ever uploaded. Metrics are there only after training, ``speed.png``
only where more than one size was measured, and the licence's files only where the source has them."""
REQUIRED = [WEIGHTS, CONFIG, RECIPE, REPORT, CARD]
"""What no artifact lacks."""
LONGEST_NAME = 240
"""Bytes of a folder's name: file systems take 255, and the run folder beside it has a longer one."""
LABELS = ("label_names", "label_descriptions")


@dataclass(frozen=True)
class Artifact:
    """A converted model on disk or on the Hub."""

    name: str
    """timm's name for it: ``local-dir:PATH`` or ``hf-hub:ID@COMMIT``."""
    report: dict[str, Any]
    """The record of the conversion."""
    folder: Path | None = None

    @property
    def model_args(self) -> dict[str, Any]:
        """The arguments that build it again: base architecture, operators, sizes."""
        args: dict[str, Any] = read_config(self._file(CONFIG), self.name)["model_args"]
        return args

    @property
    def recipe(self) -> Recipe:
        """The effective recipe."""
        assert self.folder is not None
        return read_recipe(self.folder / RECIPE)

    def model(self, **args: Any) -> nn.Module:
        """The converted model, in eval mode; ``args`` such as ``img_size`` go to the architecture.

        Raises:
            ArtifactError: config and weights do not fit each other, or make no model.
        """
        try:
            check_model(read_config(self._file(CONFIG), self.name), self._file(WEIGHTS), self.name)
            model: nn.Module = timm.create_model(self.name, pretrained=True, **args)
        except ArtifactError:
            raise
        except Vit2LinearError as error:
            raise ArtifactError(f"{self.name!r} cannot be loaded: {error.message}", error.hint) from error
        except (RuntimeError, OSError, ValueError) as error:
            raise ArtifactError(f"{self.name!r} cannot be loaded: {str(error).splitlines()[0]}.") from error
        return model.eval()

    def _file(self, name: str) -> Path:
        if self.folder is not None:
            path: Path | None = self.folder / name
        else:
            repo, _, commit = self.name.removeprefix("hf-hub:").partition("@")
            path = hub.download(repo, commit, name)
        if path is None or not path.is_file():
            raise ArtifactError(f"{self.name!r} has no {name}.", "Convert again, or download the artifact again.")
        return path


def check_output(folder: Path, overwrite: bool, reads: Sequence[Path] = ()) -> None:
    """Refuse an output folder before any work is done.

    Args:
        folder: where the artifact is to be.
        overwrite: whether an artifact there may be replaced.
        reads: what the conversion reads, none of which may lie in ``folder``.

    Raises:
        ArtifactError: it exists (without ``overwrite``), is no artifact, holds what is read, or cannot be written.
    """
    other = "Choose another --output."
    try:
        if _is_there(folder):
            if not overwrite:
                raise ArtifactError(f"the output {str(folder)!r} exists.", "Use --overwrite, or another --output.")
            if not folder.is_dir() or (any(folder.iterdir()) and not is_artifact(folder)):
                raise ArtifactError(
                    f"{str(folder)!r} is not an artifact of vit2linear, so --overwrite does not delete it.", other
                )
            for path in reads:
                if path.exists() and path.resolve().is_relative_to(folder.resolve()):
                    raise ArtifactError(f"{str(folder)!r} holds {str(path)!r}, which is read to convert.", other)
        if len(os.fsencode(folder.name)) > LONGEST_NAME:
            raise ArtifactError(f"the name of the output has more than {LONGEST_NAME} bytes.", other)
        place = folder.absolute().parent
        while not _is_there(place):
            place = place.parent
        if not place.is_dir():
            raise ArtifactError(f"{str(place)!r} is not a folder.", other)
        if not os.access(place, os.W_OK | os.X_OK):
            raise ArtifactError(f"{str(place)!r} cannot be written: it is read-only for this user.", other)
    except (OSError, ValueError) as error:  # such as a link to itself, or a name with a zero byte
        raise ArtifactError(f"{str(folder)!r} can be no output: {error}.", other) from error


def _is_there(path: Path) -> bool:
    """Whether there is something of that name, be it a link to nowhere; an ``OSError`` tells that there cannot be."""
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def write(
    folder: Path,
    student: nn.Module,
    data_config: dict[str, Any],
    recipe: str,
    report: dict[str, Any],
    card: str,
    others: Mapping[str, bytes],
) -> None:
    """Write a complete artifact and prove that it reloads to the same outputs.

    Args:
        folder: where there is nothing yet.
        student: the converted model, on any device, in eval mode.
        data_config: timm's preprocessing for it.
        recipe, report, card: the contents of the other files; the report gets ``files``, the digest of each of them.
        others: pictures, metrics and licence, file name to contents.

    Raises:
        ArtifactError: the reloaded model differs.
        OSError: the disk refused.
    """
    student = student.cpu().eval()
    with written_aside(folder) as aside:
        weights = {k: v.detach().contiguous() for k, v in student.state_dict().items()}
        try:
            save_file(weights, aside / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        (aside / WEIGHTS).chmod(0o644)  # safetensors lets only the owner read it
        names = {k: student.pretrained_cfg[k] for k in LABELS if k in student.pretrained_cfg}  # type: ignore
        timm.models._hub.save_config_for_hf(student, str(aside / CONFIG), names, data_config=data_config)
        _amend(aside / CONFIG)
        (aside / RECIPE).write_text(recipe, "utf-8")
        (aside / CARD).write_text(card, "utf-8")
        for name, contents in others.items():
            (aside / name).write_bytes(contents)
        digests = {path.name: digest(path) for path in sorted(aside.iterdir())}
        (aside / REPORT).write_text(json.dumps({**report, "files": digests}, indent=2) + "\n", "utf-8")
        _compare(student, aside, data_config["input_size"])


def open_artifact(name: str | None, revision: str | None = None) -> Artifact:
    """An artifact by folder or Hub id; without a name the newest one under the current folder.

    Raises:
        ArtifactError: nothing there, or it was not written by vit2linear.
    """
    folder = newest(Path()) if name is None else Path(name.removeprefix("local-dir:"))
    if folder.is_dir():
        if not is_artifact(folder):
            raise ArtifactError(
                f"{str(folder)!r} is not an artifact of vit2linear: {CONFIG} or {REPORT} is missing or foreign.",
                "Name a folder that 'vit2linear convert' wrote.",
            )
        return Artifact(f"local-dir:{folder}", read_report(folder / REPORT, str(folder)), folder)
    assert name is not None
    try:
        info = hub.repo_info(name.removeprefix("hf-hub:"), revision)
    except SourceError as error:
        raise ArtifactError(f"there is no artifact {name!r}: {error.message}", error.hint) from error
    report = hub.download(info.repo, info.commit, REPORT)
    if report is None:
        raise ArtifactError(f"{name!r} has no {REPORT}, so it was not converted by vit2linear.")
    return Artifact(f"hf-hub:{info.repo}@{info.commit}", read_report(report, name))


def digest(content: Path | bytes) -> str:
    """SHA-256, in hexadecimal digits."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest(root: Path) -> Path:
    """The artifact under ``root`` (itself, or up to two folders down) that was written last."""
    folders = [p.parent for pattern in ("", "*/", "*/*/") for p in root.glob(pattern + REPORT)]
    # Not the one that a running conversion is about to move into place.
    found = [folder for folder in folders if folder.parent.suffix != ".run" and is_artifact(folder)]
    if not found:
        raise ArtifactError(
            "no artifact was found under the current folder.", "Run 'vit2linear convert' first, or name a folder."
        )
    return max(found, key=lambda folder: (folder / REPORT).stat().st_mtime)


def is_artifact(folder: Path) -> bool:
    """Whether a folder was written by ``write``."""
    try:
        config = read_object(folder / CONFIG, CONFIG, ArtifactError)
        return config.get("architecture") == "vit2linear" and (folder / REPORT).is_file()
    except (ArtifactError, OSError):
        return False


def _amend(path: Path) -> None:
    """Take out what timm writes too much of.

    It repeats num_classes among the model arguments, where transformers' wrapper cannot bear it; and the licence is
    that of the architecture's usual weights, which need not be this source's: the card states it.
    """
    config = json.loads(path.read_text("utf-8"))
    config["model_args"].pop("num_classes", None)
    config["pretrained_cfg"].pop("license", None)
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _compare(student: nn.Module, folder: Path, input_size: tuple[int, int, int]) -> None:
    reloaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    pixels = torch.randn(1, *input_size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        same = torch.equal(student(pixels), reloaded(pixels))
    if not same:
        raise ArtifactError("the written model does not reload to the same outputs; nothing was kept.")
