"""Writing to the Hub: open a repository, see what is there, commit in one piece; the client's errors turned into ours.

A token that is given goes to the client and nowhere else; without one the client finds it (environment, stored login).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub as hf
from huggingface_hub import constants, errors

# httpx or its successor, as the client uses
from huggingface_hub.utils import httpx, parse_ratelimit_headers, validate_repo_id  # type: ignore[attr-defined]

from vit2linear.errors import PublishError

LOGIN = "Run 'hf auth login' or set HF_TOKEN."
"""What to do without a token, or with a bad one."""
_KNOWN = (errors.HfHubHTTPError, httpx.TransportError, OSError, ValueError)


@dataclass(frozen=True)
class Target:
    """Where an upload goes."""

    repo: str
    """``OWNER/NAME``."""
    private: bool | None = None
    """Visibility of a new repository; ``None`` leaves it to the owner's default."""
    revision: str | None = None
    """A branch, made if need be, or ``refs/pr/N``; default: main."""
    create_pr: bool = False
    """Propose the commit as a pull request instead."""


@dataclass(frozen=True)
class There:
    """What a target holds at one commit."""

    commit: str
    private: bool
    files: tuple[str, ...]


def check_repo_id(repo: str) -> None:
    """Refuse what cannot be the name of a repository.

    Raises:
        PublishError: it is not ``NAME`` or ``OWNER/NAME`` in the Hub's letters.
    """
    try:
        validate_repo_id(repo)
    except errors.HFValidationError as error:
        raise PublishError(f"{repo!r} is no name for a repository: {_first_line(error)}.", "Use OWNER/NAME.") from error


def login(token: str | None = None) -> hf.HfApi:
    """A client for whoever is logged in.

    Raises:
        PublishError: nobody is, or offline mode is on.
    """
    if constants.is_offline_mode():
        raise errors.OfflineModeIsEnabled
    found = token or hf.get_token()
    if not found:
        raise errors.LocalTokenNotFoundError
    return hf.HfApi(token=found)


def account(api: hf.HfApi) -> str:
    """The name that is logged in, for a repository without an owner."""
    return str(api.whoami()["name"])


def open_target(api: hf.HfApi, target: Target) -> There:
    """Create the repository and the branch where they are missing, and see what is there.

    Raises:
        PublishError: the name belongs to somebody else, or is public where private was asked for.
    """
    try:
        api.create_repo(target.repo, exist_ok=True, private=target.private)
    except errors.HfHubHTTPError as error:
        owner = target.repo.split("/")[0]
        if error.response.status_code != 403 or owner in _names(api):
            raise
        raise PublishError(
            f"{target.repo!r} cannot be created: {owner!r} is another account.",
            "Choose a name under your own account, or under an organisation that you may write to.",
        ) from error
    info = api.model_info(target.repo)
    if target.private and not info.private:
        raise PublishError(
            f"{target.repo!r} exists and is public.",
            "Choose another name, make it private on the Hub, or say --public.",
        )
    if target.revision is not None:
        try:
            info = api.model_info(target.repo, revision=target.revision)
        except errors.RevisionNotFoundError as error:
            if target.revision.startswith("refs/"):
                raise PublishError(f"{target.repo!r} has no {target.revision!r}.", "Check --revision.") from error
            api.create_branch(target.repo, branch=target.revision)
            info = api.model_info(target.repo, revision=target.revision)
    return There(str(info.sha), bool(info.private), tuple(s.rfilename for s in info.siblings or []))


def read(api: hf.HfApi, target: Target, there: There, filename: str) -> bytes | None:
    """A file of the target, or ``None`` where it has none."""
    if filename not in there.files:
        return None
    return Path(api.hf_hub_download(target.repo, filename, revision=there.commit)).read_bytes()


def commit(
    api: hf.HfApi, target: Target, there: There, folder: Path, files: Sequence[str], stale: Sequence[str], message: str
) -> tuple[str, str]:
    """Upload ``files`` of ``folder`` and delete ``stale`` in one commit on top of ``there``, or not at all.

    Returns:
        The commit (that of ``there`` where nothing differs) and the address of the result.
    """
    additions = [hf.CommitOperationAdd(name, folder / name) for name in files]
    done = api.create_commit(
        target.repo,
        [*additions, *(hf.CommitOperationDelete(name) for name in stale)],
        commit_message=message,
        revision=target.revision,
        create_pr=target.create_pr,
        parent_commit=there.commit,
    )
    place = f"{constants.ENDPOINT}/{target.repo}"
    return done.oid, done.pr_url or (place if target.revision is None else f"{place}/tree/{target.revision}")


@contextmanager
def explained(repo: str, again: str) -> Iterator[None]:
    """Turn the client's errors about writing to ``repo`` into ours; ``again`` says how to go on."""
    try:
        yield
    except (*_KNOWN, RuntimeError) as error:
        # The client wraps what happened to one of several large files.
        inner = error.__cause__ if isinstance(error, RuntimeError) else error
        of_the_disk = type(inner).__module__ == "builtins" and not isinstance(inner, ConnectionError | ValueError)
        if not isinstance(inner, _KNOWN) or of_the_disk:
            raise
        message, advice = _explain(inner, repo)
        raise PublishError(message, f"{advice} {again}") from error


def _explain(error: Exception, repo: str) -> tuple[str, str]:
    """What happened, and what to do about it."""
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline mode forbids uploading.", "Unset HF_HUB_OFFLINE, or leave --offline out."
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "you are not logged in to the Hub.", LOGIN
    if isinstance(error, errors.GatedRepoError):
        return f"{repo!r} is gated and this account has no access.", f"Ask for it at {constants.ENDPOINT}/{repo}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo!r} is not there for this account: absent, or private to others.", "Check the name."
    if isinstance(error, errors.HfHubHTTPError):
        said = (error.server_message or _first_line(error)).strip().splitlines()[0].rstrip(".")
        if not str(error.response.url).startswith(constants.ENDPOINT):
            return f"the storage of large files refused ({error.response.status_code}).", "Wait a little."
        return _refused(error.response.status_code, said, repo, _wait(error))
    if isinstance(error, json.JSONDecodeError):
        return f"{constants.ENDPOINT} answers, but not as the Hub does.", "Check HF_ENDPOINT, or wait a little."
    if isinstance(error, ValueError):
        said = "; ".join(line.removeprefix("- ").rstrip(".") for line in str(error).splitlines()[1:])
        if isinstance(error.__cause__, errors.BadRequestError):
            return f"the Hub rejects the card's metadata: {said}.", "Correct the front matter of README.md."
        return f"the Hub's answer makes no sense to its client: {_first_line(error)}.", "Wait a little."
    if isinstance(error, ConnectionError | PermissionError) and (status := re.search(r"\((\d{3}) ", str(error))):
        # hf_xet has no other way to tell what it was answered.
        if status[1] == "404":
            return f"{constants.ENDPOINT} has no Xet storage.", "Set HF_HUB_DISABLE_XET=1."
        return _refused(int(status[1]), _first_line(error), repo, "some minutes")
    wrapped = isinstance(error, errors.LocalEntryNotFoundError)  # what went wrong with a download
    if isinstance(
        error.__cause__ if wrapped else error,
        httpx.ConnectError | httpx.ConnectTimeout | httpx.UnsupportedProtocol | httpx.ProxyError,
    ):
        return f"the Hub at {constants.ENDPOINT} cannot be reached.", "Check the connection, or HF_ENDPOINT."
    return f"the connection to {constants.ENDPOINT} was cut; nothing is half-uploaded.", "Check the connection."


def _refused(status: int, said: str, repo: str, wait: str) -> tuple[str, str]:
    """The same for an answer that is a status."""
    if status == 401:
        return "the token is not valid (any more).", LOGIN
    if status == 403:
        advice = "Use a token with write access, or propose the upload with --create-pr."
        return f"there is no permission to write to {repo!r}: {said}.", advice
    if status == 412:
        return f"somebody committed to {repo!r} meanwhile; nothing was uploaded.", "Look at it."
    if status == 429:
        return "the Hub limits the rate of requests (429).", f"Wait {wait}."
    if status >= 500:
        return f"the Hub has trouble of its own ({status}).", "Wait a little."
    return f"the Hub refused ({status}): {said}.", "Look at what it says."


def _wait(error: errors.HfHubHTTPError) -> str:
    """How long, as the answer says."""
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    seconds = headers.get("Retry-After") or (str(limit.reset_in_seconds) if limit is not None else "")
    if not seconds.isdecimal():
        return f"until {seconds}" if seconds else "some minutes"
    whole = int(seconds)
    return f"{whole} s" if whole < 120 else f"{-(-whole // 60)} minutes"


def _names(api: hf.HfApi) -> set[str]:
    """The account and its organisations."""
    with suppress(errors.HfHubHTTPError, httpx.TransportError):
        who = api.whoami()
        return {who["name"], *(org["name"] for org in who.get("orgs", []))}
    return set()


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__
