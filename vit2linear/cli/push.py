"""``vit2linear push``."""

from __future__ import annotations

from typing import Annotated

import typer

from vit2linear.cli import _options as o
from vit2linear.cli._errors import exit_codes


def push(
    model: Annotated[
        str | None,
        typer.Argument(help="Artifact folder; default: the newest under the current folder.", show_default=False),
    ] = None,
    repo_id: Annotated[
        str | None, typer.Argument(help="OWNER/NAME; default: your account and the folder's name.", show_default=False)
    ] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Visibility of a new repository.")] = None,
    commit_message: Annotated[str, typer.Option(help="Message of the commit.")] = "Upload with vit2linear",
    json: o.Json = False,
) -> None:
    """Create the repository if needed, upload the artifact, print the address."""
    with exit_codes():
        from vit2linear import hub
        from vit2linear.artifact import FILES, open_artifact
        from vit2linear.cli._output import err, out, print_json
        from vit2linear.errors import ArtifactError

        artifact = open_artifact(model)
        if artifact.folder is None:
            raise ArtifactError(f"{artifact.name!r} is not a local folder.", "Push an artifact from disk.")
        folder = artifact.folder.resolve()
        repo = repo_id or f"{hub.account()}/{folder.name}"
        err.print(f"Uploading {folder.name} to {repo}", markup=False)
        address = hub.upload(folder, repo, FILES, commit_message, private)
        if json:
            print_json({"model": folder.name, "repo": repo, "url": address})
        else:
            out.print(address, markup=False)
