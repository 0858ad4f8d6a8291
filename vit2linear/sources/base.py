"""What a source is, before and after it is read: where its files are, and the timm model that they describe."""

from __future__ import annotations

import hashlib
import json
import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from timm.models import load_state_dict
from torch import Tensor

from vit2linear import hub
from vit2linear.errors import SourceNotFoundError, UnsupportedModelError, WeightsError


@dataclass(frozen=True)
class ModelRef:
    """A source that was found: its name as given, and a folder or a repository at one commit."""

    name: str
    folder: Path | None = None
    repo: hub.RepoInfo | None = None
    registry_name: str | None = None
    """timm's name, where the source was named so; its registry then describes the model."""

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
        if path is None:
            return None
        try:
            value = json.loads(path.read_text("utf-8"))
        except (ValueError, OSError) as error:
            raise UnsupportedModelError(f"{filename} of {self.name!r} is not JSON: {error}.") from error
        if not isinstance(value, dict):
            raise UnsupportedModelError(f"{filename} of {self.name!r} is not a JSON object.")
        return value

    def weights_file(self) -> Path:
        """Where the weights are."""
        for filename in ("model.safetensors", "pytorch_model.bin"):
            path = self.file(filename)
            if path is not None:
                return path
        raise SourceNotFoundError(
            f"{self.name!r} has no weights.", "Expected model.safetensors or pytorch_model.bin beside config.json."
        )

    def weights(self) -> dict[str, Tensor]:
        """The weights as stored; nothing in the file is executed. timm strips the prefixes of wrappers."""
        path = self.weights_file()
        try:
            weights: dict[str, Tensor] = load_state_dict(str(path), weights_only=True)
        except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            raise WeightsError(f"{path.name} of {self.name!r} cannot be read: {str(error).splitlines()[0]}.") from error
        return weights

    def record(self) -> dict[str, Any]:
        """What the artifact stores to find exactly this source again."""
        if self.repo is not None:
            return {"name": self.name, "repo": self.repo.repo, "commit": self.repo.commit}
        with self.weights_file().open("rb") as file:
            return {"name": self.name, "weights_sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@dataclass(frozen=True)
class ModelSpec:
    """A source brought to timm's terms, without its weights."""

    architecture: str
    """timm architecture."""
    model_args: dict[str, Any]
    """JSON-only arguments of that architecture; ``norm_eps`` stands for a norm layer with that epsilon."""
    pretrained_cfg: dict[str, Any]
    """timm's description of input, preprocessing, classes and licence."""
    notes: tuple[str, ...] = field(default=())
    """What the user should know about how the source was read."""


class Layout(ABC):
    """One checkpoint layout. One file in ``sources/`` each."""

    @abstractmethod
    def matches(self, config: dict[str, Any]) -> bool:
        """Whether ``config.json`` is of this layout."""

    @abstractmethod
    def spec(self, ref: ModelRef) -> ModelSpec:
        """Read the configuration; no weight file is opened.

        Raises:
            UnsupportedModelError: the configuration is of this layout, but of a model that is not supported.
        """

    @abstractmethod
    def state_dict(self, ref: ModelRef) -> dict[str, Tensor]:
        """Read the weights, under the names of the spec's architecture."""
