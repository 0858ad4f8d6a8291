"""Everything that can go wrong and is the user's to mend.

::

    Vit2LinearError                       exit code 1
    ├─ RecipeError                        2   the request itself: recipe, options, names
    │  └─ UnknownNameError                    a name that is not in a registry
    ├─ SourceError                        3   the source cannot be reached or read
    │  ├─ SourceNotFoundError
    │  ├─ GatedSourceError
    │  └─ UnreachableHubError
    ├─ UnsupportedModelError              4   the source is read, but cannot be converted
    │  ├─ WeightsError                        missing, unexpected or misshapen weights
    │  └─ SurgeryError                        no sites, a rule without a site, a failed audit
    ├─ DataError                          5   the images
    │  └─ BadImageError                       one image that cannot be used
    ├─ DistillError                       6   training went wrong
    │  └─ NotFiniteError                      a loss or gradient; a step is skipped, many in a row end the run
    ├─ ArtifactError                      7   the output folder or a written artifact
    ├─ PublishError                       8   push
    └─ StoppedError                     130   SIGINT, 143 SIGTERM; --resume continues

A message says what was seen and where; ``hint`` says what is allowed and what to do next. Anything outside this tree
is a bug and shows its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class Vit2LinearError(Exception):
    """Base of every error that is turned into a sentence and an exit code."""

    exit_code: int = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message} {hint}")
        self.message = message
        self.hint = hint


class RecipeError(Vit2LinearError):
    """The recipe or the options are wrong; lists every problem found."""

    exit_code = 2


class UnknownNameError(RecipeError):
    """A name that is not registered."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        close = get_close_matches(name, names, n=3)
        guess = f"Did you mean {' or '.join(repr(c) for c in close)}? " if close else ""
        super().__init__(f"unknown {kind} {name!r}.", f"{guess}Available: {', '.join(names)}.")


class SourceError(Vit2LinearError):
    """The source cannot be fetched or read."""

    exit_code = 3


class SourceNotFoundError(SourceError):
    """No such folder, repository, revision or file."""


class GatedSourceError(SourceError):
    """The repository exists, but this user may not read it."""


class UnreachableHubError(SourceError):
    """The Hub does not answer, or offline mode forbids asking it."""


class UnsupportedModelError(Vit2LinearError):
    """The source is readable, but is not a model that can be converted."""

    exit_code = 4


class WeightsError(UnsupportedModelError):
    """Weights that do not fit the architecture which the config describes."""


class SurgeryError(UnsupportedModelError):
    """The plan cannot be made or did not hold."""


class DataError(Vit2LinearError):
    """Images that are absent, unreadable, or do not fit the model."""

    exit_code = 5


class BadImageError(DataError):
    """One image that cannot be used; whoever reads a set leaves it out and counts it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name} cannot be used: {reason}.", "Repair or remove it.")
        self.name = name
        self.reason = reason


class DistillError(Vit2LinearError):
    """Training cannot go on."""

    exit_code = 6


class NotFiniteError(DistillError):
    """A loss or a gradient norm that is not finite."""


class StoppedError(Vit2LinearError):
    """A signal ended the run; its exit code is the shell's, 128 and the signal's number."""

    def __init__(self, signal_name: str, number: int, hint: str) -> None:
        super().__init__(f"stopped by {signal_name}.", hint)
        self.exit_code = 128 + number


class ArtifactError(Vit2LinearError):
    """The output folder, or an artifact that is read back."""

    exit_code = 7


class PublishError(Vit2LinearError):
    """Uploading failed."""

    exit_code = 8
