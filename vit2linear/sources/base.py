"""What a source is, before and after it is read: where its files are, and the timm model that they describe."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from torch import Tensor

from vit2linear import hub
from vit2linear.errors import SourceError, SourceNotFoundError, UnsupportedModelError
from vit2linear.jsonfile import read_object
from vit2linear.sources._description import check_description, understanding
from vit2linear.sources._weights import SUFFIXES, read
from vit2linear.strict import shown

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "open_clip_model.safetensors", "open_clip_pytorch_model.bin")
"""Names under which weights are looked for, in this order."""


@dataclass(frozen=True)
class ModelRef:
    """A source that was found: its name as given, and a folder or a repository at one commit."""

    name: str
    folder: Path | None = None
    repo: hub.RepoInfo | None = None
    registry_name: str | None = None
    """timm's name, where the source was named so; its registry then describes the model."""
    arch: str | None = None
    """timm's name as the user states it, for weights that no config describes."""
    weights_name: str | None = None
    """The weights, where the source is that one file in ``folder``."""

    def file(self, filename: str) -> Path | None:
        """A local path of one of the source's files (downloaded if need be), or ``None`` if it has none."""
        if self.repo is not None:
            return hub.download(self.repo.repo, self.repo.commit, filename)
        assert self.folder is not None
        path = self.folder / filename
        return path if path.is_file() else None

    def json(self, filename: str) -> dict[str, Any] | None:
        """A JSON file of the source, or ``None`` if it has none."""
        path = self.file(filename)
        return None if path is None else read_object(path, f"{filename} of {self.name!r}", UnsupportedModelError)

    def weights_files(self) -> list[Path]:
        """Where the weights are: one file, or the shards that an index lists.

        Raises:
            SourceNotFoundError: nowhere, or in one of several files that could be meant.
        """
        for filename in (self.weights_name,) if self.weights_name else WEIGHTS:
            path = self.file(filename)
            if path is not None:
                return [path]
            index = self.json(f"{filename}.index.json")
            if index is not None:
                return self._shards(f"{filename}.index.json", index.get("weight_map", {}))
        others = [name for name in self.filenames if name.endswith(SUFFIXES)]
        if len(others) == 1 and (path := self.file(others[0])) is not None:
            return [path]
        if others:
            raise SourceNotFoundError(
                f"{self.name!r} has no weights of a usual name.", f"Name one: {', '.join(others)}."
            )
        raise SourceNotFoundError(f"{self.name!r} has no weights.", f"Expected {' or '.join(WEIGHTS[:2])}.")

    @property
    def filenames(self) -> list[str]:
        """The names of all files at the top."""
        if self.repo is not None:
            return [name for name in self.repo.files if "/" not in name]
        assert self.folder is not None
        return sorted(path.name for path in self.folder.iterdir() if path.is_file())

    def weights(self) -> dict[str, Tensor]:
        """The weights as stored; nothing in the files is executed. timm strips the prefixes of wrappers."""
        return read(self.name, self.weights_files())

    def record(self) -> dict[str, Any]:
        """What the artifact stores to find exactly this source again."""
        record = {"name": self.name} | ({"arch": self.arch} if self.arch else {})
        if self.repo is not None:
            return {**record, "repo": self.repo.repo, "commit": self.repo.commit}
        digest = hashlib.sha256()
        for path in self.weights_files():
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        return {**record, "weights_sha256": digest.hexdigest()}

    def _shards(self, index: str, weight_map: Any) -> list[Path]:
        """The files that an index lists; they lie beside it, so a name that leads elsewhere is refused."""
        names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else {str(weight_map)}
        found = []
        for name in sorted(names):
            if name != PurePosixPath(name).name or "\\" in name or not name.endswith(SUFFIXES):
                raise SourceError(
                    f"{index} of {self.name!r} lists {shown(name)}, which is no file of weights beside it.",
                    f"Names without a folder that end in {' or '.join(SUFFIXES)} are read; download it again.",
                )
            path = self.file(name)
            if path is None:
                raise SourceNotFoundError(f"{self.name!r} lacks {name}, which its index lists.", "Download it again.")
            found.append(path)
        return found


@dataclass(frozen=True)
class ModelSpec:
    """A source brought to timm's terms, without its weights."""

    architecture: str
    """timm architecture."""
    model_args: dict[str, Any]
    """JSON-only arguments of that architecture, and of ours around it: ``norm_eps`` and ``head``."""
    pretrained_cfg: dict[str, Any]
    """timm's description of input, preprocessing, classes and licence."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know about how the source was read."""
    dtype: str = "float32"
    """Type of the weights in the source, whatever they are computed in: what its config says, then what was read."""


class Layout(ABC):
    """One checkpoint layout. One file in ``sources/`` each."""

    config_file: ClassVar[str] = "config.json"
    """The file that describes the model."""

    @abstractmethod
    def matches(self, config: dict[str, Any]) -> bool:
        """Whether ``config_file`` is of this layout."""

    def spec(self, ref: ModelRef) -> ModelSpec:
        """Read the configuration; no weight file is opened.

        Raises:
            UnsupportedModelError: the configuration is of this layout, but of a model that is not supported, or it says
                what no model has.
        """
        with understanding(f"the description of {ref.name!r}"):
            spec = self.describe(ref)
            check_description(ref.name, spec.model_args, spec.pretrained_cfg)
        return spec

    @abstractmethod
    def describe(self, ref: ModelRef) -> ModelSpec:
        """What ``spec`` checks and returns."""

    @abstractmethod
    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """Read the weights, under the names of the spec's architecture."""
