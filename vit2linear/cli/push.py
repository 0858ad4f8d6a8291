"""``vit2linear push``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes

if TYPE_CHECKING:
    from vit2linear.publish import Publication


def push(
    model: Annotated[
        str | None,
        typer.Argument(help="Artifact folder; default: the newest under the current folder.", show_default=False),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Argument(help="OWNER/NAME; default: your account and the folder's name.", show_default=False)
    ] = None,
    private: Annotated[
        bool | None,
        typer.Option("--private/--public", help="Visibility of a new repository; of a gated source's private."),
    ] = None,
    create_pr: Annotated[bool, typer.Option("--create-pr", help="Propose the upload as a pull request.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch to upload to, made if absent; default: main.")] = None,
    commit_message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload with vit2linear",
    license: Annotated[str | None, typer.Option(help="Licence of the source, where it states none.")] = None,  # noqa: A002
    overwrite_card: Annotated[
        bool, typer.Option("--overwrite-card", help="Replace a README.md that was edited on the Hub.")
    ] = False,
    token: Annotated[
        str | None, typer.Option(help="Token of the Hub; better in HF_TOKEN, where the shell keeps no history of it.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Verify, and show what would be uploaded; ask nobody, write nothing.")
    ] = False,
    offline: o.Offline = False,
    json: o.Json = False,
) -> None:
    """Verify an artifact, create the repository if needed, upload in one commit, print the address.

    The same command goes on after any failure; what is there already is not sent again.
    """
    with exit_codes():
        import dataclasses

        from huggingface_hub.utils import disable_progress_bars  # type: ignore[attr-defined]

        from vit2linear import publish
        from vit2linear.cli._output import err, out, print_json
        from vit2linear.errors import PublishError

        request = publish.Request(model, repo_id, private, create_pr, revision, commit_message, license, overwrite_card)
        job = publish.prepare(request)
        if dry_run:
            if json:
                print_json(_as_json(job))
            else:
                _show(job)
            return
        err.print(f"Uploading {job.folder.resolve().name} to {job.name}", markup=False)
        if not err.is_terminal:
            disable_progress_bars()
        try:
            done = publish.push(job, token)
        except PublishError:
            if err.is_terminal:
                err.print()  # the client's bar may have left its line open
            raise
        for note in done.notes:
            err.print(note, markup=False)
        if done.removed:
            err.print(f"Removed, of an earlier upload: {', '.join(done.removed)}", markup=False)
        if not done.changed:
            err.print("Everything was there already.", markup=False)
        if json:
            print_json({"model": job.folder.resolve().name, **dataclasses.asdict(done), **_as_json(job)})
        else:
            out.print(done.url, markup=False)


def _as_json(job: Publication) -> dict[str, Any]:
    request = job.request
    return {
        "folder": str(job.folder),
        "files": job.files,
        "licence": job.licence,
        "target": {"repo": job.name, "revision": request.revision or "main", "pull_request": request.create_pr},
        "visibility": _visibility(job),
    }


def _visibility(job: Publication) -> str:
    return {None: "the account's default", True: "private", False: "public"}[job.private]


def _show(job: Publication) -> None:
    from vit2linear.cli._output import err, out, table

    rows = [[name, f"{size:,}"] for name, size in job.files.items()]
    out.print(table(f"{job.folder} -> {job.name}", ["file", "bytes"], [*rows, ["all", f"{sum(job.files.values()):,}"]]))
    where = _as_json(job)["target"]
    own = "" if "/" in job.name else " of the account that is logged in"
    kind = "a pull request to" if where["pull_request"] else "a commit on"
    err.print(f"Target: {kind} {where['revision']} of {job.name}{own}; a new one is {_visibility(job)}.", markup=False)
    err.print(f"Licence: {', '.join(map(str, job.licence.values()))}", markup=False)
    for note in job.notes:
        err.print(note, markup=False)
    err.print("Nothing was uploaded, nothing was written.", markup=False)
