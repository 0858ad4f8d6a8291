"""Reading from the Hugging Face Hub: which commit, which files; the client's errors turned into ours.

Tokens are resolved by huggingface_hub itself (environment, stored login) and never seen here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as hf
from huggingface_hub import constants, errors
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # httpx or its successor, as the client uses

from vit2linear.errors import (
    GatedSourceError,
    SourceError,
    SourceNotFoundError,
    UnreachableHubError,
)

CONFIGS = ("config.json", "open_clip_config.json")
"""Files that describe a model, the preferred one first."""


@dataclass(frozen=True)
class RepoInfo:
    """A repository at one commit."""

    repo: str
    commit: str
    license: str | list[str] | None = None
    license_name: str | None = None
    license_link: str | None = None
    files: tuple[str, ...] = ()
    gated: bool | None = None
    """Whether its terms have to be accepted; ``None`` where the Hub could not be asked."""


@contextmanager
def friendly_errors(what: str) -> Iterator[None]:
    """Turn the Hub client's errors about reading ``what`` into ours; all else passes."""
    try:
        yield
    except errors.GatedRepoError as error:
        terms = (
            f"Accept the terms at {constants.ENDPOINT}/{what} with your account, then retry."
            if hf.get_token()
            else f"Accept the terms at {constants.ENDPOINT}/{what}, then log in with 'hf auth login' or set HF_TOKEN."
        )
        raise GatedSourceError(f"{what!r} is gated and this account has no access.", terms) from error
    except errors.RevisionNotFoundError as error:
        raise SourceNotFoundError(f"{what!r} has no such revision.", "Check --revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise SourceNotFoundError(
            f"there is no folder and no repository on the Hub called {what!r}, or it is private.",
            "Check the spelling; for a private repository log in with 'hf auth login'.",
        ) from error
    except errors.HFValidationError as error:
        raise SourceNotFoundError(
            f"{what!r} is neither an existing folder nor a valid Hub id.", "Use owner/name or the path of a folder."
        ) from error
    except errors.RemoteEntryNotFoundError as error:
        raise SourceNotFoundError(f"a file is missing in {what!r}: {_first_line(error)}.") from error
    except (errors.LocalEntryNotFoundError, httpx.TransportError, ConnectionError) as error:
        if constants.is_offline_mode():
            raise UnreachableHubError(
                f"{what!r} is not in the local cache, and HF_HUB_OFFLINE or --offline forbids fetching it.",
                "Fetch it once without, or name a local folder.",
            ) from error
        raise UnreachableHubError(
            f"the Hub at {constants.ENDPOINT} cannot be reached for {what!r}.",
            "Check the connection (or HF_ENDPOINT); cached repositories and local folders work without it.",
        ) from error
    except errors.HfHubHTTPError as error:
        unauthorized = error.response is not None and error.response.status_code == 401
        hint = "The token is not valid: run 'hf auth login', or unset HF_TOKEN." if unauthorized else None
        raise SourceError(f"the Hub refused to serve {what!r}: {_first_line(error)}.", hint) from error
    except OSError as error:
        raise SourceError(
            f"the files of {what!r} cannot be stored in {constants.HF_HUB_CACHE!r}: {_first_line(error)}.",
            "Free space there, or let HF_HUB_CACHE name a folder that can be written.",
        ) from error


def repo_info(repo: str, revision: str | None = None) -> RepoInfo:
    """The commit that ``revision`` (default: main) means now, and the stated licence.

    Where the Hub cannot be asked, the cached commit of that revision is used, by default the newest.
    """
    try:
        with friendly_errors(repo):
            info = hf.HfApi().model_info(repo, revision=revision)
    except UnreachableHubError:
        cached = _cached(repo, revision)
        if cached is None:
            raise
        return cached
    card = info.card_data
    fields = {k: getattr(card, k, None) for k in ("license", "license_name", "license_link")} if card else {}
    files = tuple(sibling.rfilename for sibling in info.siblings or [])
    return RepoInfo(repo, str(info.sha), **fields, files=files, gated=bool(info.gated))


def _cached(repo: str, revision: str | None) -> RepoInfo | None:
    """What the cache has of a commit, branch or tag; without a revision the commit that was fetched last."""
    try:
        repos = hf.scan_cache_dir().repos
    except (errors.CacheNotFound, ValueError):  # nothing there, or a file
        return None
    commits = [c for found in repos if (found.repo_id, found.repo_type) == (repo, "model") for c in found.revisions]
    named = [c for c in commits if revision is None or revision == c.commit_hash or revision in c.refs]
    if not named:
        return None
    newest = max(named, key=lambda commit: commit.last_modified)
    return RepoInfo(repo, newest.commit_hash, files=tuple(sorted(file.file_name for file in newest.files)))


def download(repo: str, commit: str, filename: str) -> Path | None:
    """A file of a repository at a commit, from the cache where it is there; ``None`` if the repository lacks it."""
    cached = hf.try_to_load_from_cache(repo, filename, revision=commit)
    if cached is not None:
        return Path(cached) if isinstance(cached, str) else None  # the other answer is that it is known to be absent
    with friendly_errors(repo):
        try:
            return Path(hf.hf_hub_download(repo, filename, revision=commit))
        except errors.RemoteEntryNotFoundError:
            return None


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
