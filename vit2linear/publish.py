"""``push``: from an artifact on disk to one commit on the Hub.

``prepare`` needs no network: it proves the artifact and says what would be uploaded; the dry run stops there. ``push``
looks at what the repository holds, decides about the card and about files of earlier uploads, and commits on top of
exactly that state. Nothing is left half-done, so the same command goes on after any failure.
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from vit2linear import artifact, upload
from vit2linear.artifact import CARD, CONFIG, FILES, METRICS, RECIPE, REPORT, REQUIRED, WEIGHTS, digest
from vit2linear.card.card import render
from vit2linear.errors import ArtifactError, PublishError
from vit2linear.licence import LICENSE, check_push, state
from vit2linear.recipe import read_recipe
from vit2linear.upload import Target, There

MESSAGE = "Upload with vit2linear"
_LICENCE = ("license", "license_name", "license_link")


@dataclass(frozen=True)
class Request:
    """What the user asks for; see ``vit2linear push --help``."""

    model: str | None = None
    repo: str | None = None
    private: bool | None = None
    create_pr: bool = False
    revision: str | None = None
    message: str = MESSAGE
    license: str | None = None
    overwrite_card: bool = False

    @property
    def command(self) -> str:
        """The command line that asks for it, without a token."""
        words = ["vit2linear", "push", *(word for word in (self.model, self.repo) if word is not None)]
        words += [] if self.private is None else ["--private" if self.private else "--public"]
        words += ["--create-pr"] if self.create_pr else []
        words += ["--revision", self.revision] if self.revision is not None else []
        words += ["--commit-message", self.message] if self.message != MESSAGE else []
        words += ["--license", self.license] if self.license is not None else []
        words += ["--overwrite-card"] if self.overwrite_card else []
        return shlex.join(words)


@dataclass(frozen=True)
class Publication:
    """An artifact that was proven, and what would become of it."""

    request: Request
    folder: Path
    name: str
    """``OWNER/NAME``, or ``NAME`` under the account that is logged in."""
    private: bool | None
    files: dict[str, int]
    """Bytes by name."""
    licence: dict[str, Any]
    """The card's fields."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Published:
    """What became of it."""

    repo: str
    url: str
    commit: str
    private: bool
    changed: bool
    """Whether there was anything to commit."""
    removed: tuple[str, ...] = ()
    """Files of an earlier upload that are gone."""
    notes: tuple[str, ...] = ()


def prepare(request: Request) -> Publication:
    """Prove an artifact and say what would be uploaded; nothing is written, nobody is asked.

    Raises:
        ArtifactError: there is none, or it is not what was written.
        PublishError: no licence, or no name for a repository.
        RecipeError: a licence that is not the source's.
    """
    if not request.message.strip():
        raise PublishError("the message of the commit is empty.", "Give one with --commit-message.")
    folder = artifact.newest(Path()) if request.model is None else Path(request.model.removeprefix("local-dir:"))
    if not folder.is_dir():
        raise ArtifactError(
            f"there is no folder {str(folder)!r}.",
            "push takes a folder that 'vit2linear convert' wrote, then the name: vit2linear push FOLDER OWNER/NAME.",
        )
    name = request.repo or folder.resolve().name
    upload.check_repo_id(name)
    report = _proven(folder)
    licence = _licence(report["source"])
    if request.license is not None:
        licence = state(licence, request.license)
        if licence["license"] == "other" and (folder / LICENSE).is_file():
            licence.setdefault("license_link", LICENSE)
    notes = check_push(licence)
    private = request.private
    gated = report["source"].get("gated", False)
    if gated is not False and private is not False:
        private = True
        known = "is gated" if gated else "was read offline and may be gated"
        notes += [f"The source {known}, so a new repository is private; --public makes it public."]
    files = {f: (folder / f).stat().st_size for f in FILES if (folder / f).is_file()}
    request = replace(request, model=str(folder), repo=request.repo)
    return Publication(request, folder, name, private, files, licence, tuple(notes))


def push(job: Publication, token: str | None = None) -> Published:
    """Upload what was prepared.

    Args:
        job: from ``prepare``.
        token: of the Hub; default: what the environment or the stored login has.

    Raises:
        PublishError: with the command that goes on.
    """
    request = job.request
    if request.license is not None:
        _state(job.folder, job.licence)
    go_on = "To go on: " if token is None else "To go on, with the token in HF_TOKEN: "
    with upload.explained(job.name, go_on + request.command):
        api = upload.login(token)
        repo = job.name if "/" in job.name else f"{upload.account(api)}/{job.name}"
    request = replace(request, repo=repo)
    target = Target(repo, job.private, request.revision, request.create_pr)
    with upload.explained(repo, go_on + request.command):
        there = upload.open_target(api, target)
        before = _report(upload.read(api, target, there, REPORT))
        if before is None and {WEIGHTS, CONFIG} & {*there.files} and not (request.create_pr or request.revision):
            raise PublishError(
                f"{repo!r} is taken: it holds a model that vit2linear did not push.",
                "Choose another name, or put it beside that model with --create-pr or --revision BRANCH.",
            )
        files, notes = list(job.files), list(job.notes)
        card = upload.read(api, target, there, CARD)
        ours = {digest(job.folder / CARD), (before or {}).get("files", {}).get(CARD)}
        if card is not None and digest(card) not in ours and not request.overwrite_card:
            files.remove(CARD)
            notes.append(f"{CARD} on the Hub was edited by hand and stays as it is; --overwrite-card replaces it.")
        stale = _stale(there, before, files)
        commit, url = upload.commit(api, target, there, job.folder, files, stale, request.message)
    if request.private is False and there.private:
        notes.append(f"{repo} exists and stays private.")
    return Published(repo, url, commit, there.private, commit != there.commit, tuple(stale), tuple(notes))


def _proven(folder: Path) -> dict[str, Any]:
    """The record of an artifact that is what was written: complete, unchanged where it counts, and read by timm.

    The card may have been edited; what the model computes may not.
    """
    found = artifact.open_artifact(str(folder))
    missing = [name for name in REQUIRED if not (folder / name).is_file()]
    if missing:
        raise ArtifactError(f"{str(folder)!r} lacks {' and '.join(missing)}.", "Convert again.")
    recorded = found.report.get("files") or {}
    for name in (WEIGHTS, CONFIG):
        if name in recorded and recorded[name] != digest(folder / name):
            raise ArtifactError(
                f"{str(folder / name)!r} is not the file that was evaluated: it is cut short, or was changed since.",
                "Copy it again from where it was written, or convert again.",
            )
    found.model()
    return found.report


def _licence(source: dict[str, Any]) -> dict[str, Any]:
    return {key: source[key] for key in _LICENCE if source.get(key)}


def _state(folder: Path, licence: dict[str, Any]) -> None:
    """Write the licence that the user states into the artifact, so that a later push needs no telling."""
    report = json.loads((folder / REPORT).read_text("utf-8"))
    if _licence(report["source"]) == licence:
        return
    written = report.get("files", {}).get(CARD) == digest(folder / CARD)
    report["source"] = {k: v for k, v in report["source"].items() if k not in _LICENCE} | licence
    if written:
        text = render(folder.resolve().name, report, read_recipe(folder / RECIPE))
        report["files"][CARD] = digest(text.encode())
    else:  # a person's text stays
        card = ModelCard.load(folder / CARD)
        for key in _LICENCE:
            card.data[key] = licence.get(key)
        text = str(card)
    _replace(folder / CARD, text)
    _replace(folder / REPORT, json.dumps(report, indent=2) + "\n")


def _replace(path: Path, text: str) -> None:
    aside = path.with_name(f"{path.name}.part")
    aside.write_bytes(text.encode())
    os.replace(aside, path)  # noqa: PTH105  says that it replaces


def _report(data: bytes | None) -> dict[str, Any] | None:
    """The record of an earlier push, if it is one."""
    try:
        report = json.loads(data or b"")
    except (ValueError, RecursionError):  # somebody else's file
        return None
    ours = isinstance(report, dict) and "vit2linear" in report and isinstance(report.get("files", {}), dict)
    return report if ours else None


def _stale(there: There, before: dict[str, Any] | None, files: list[str]) -> list[str]:
    """What an earlier push left that this one has not; the card and other people's files are never among it."""
    if before is None:
        return []
    ours = {*REQUIRED, METRICS, *before.get("files", {})} - {CARD, ".gitattributes"}
    return sorted((ours & {*there.files}) - {*files})
