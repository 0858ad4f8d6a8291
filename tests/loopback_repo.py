"""A repository of the loopback Hub: commits, branches, pull requests, large files; and how the Hub describes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote


class RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


@dataclass
class Repo:
    """A repository: every commit's files, and the commit that each branch and pull request means."""

    id: str
    kind: str
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    large: set[str] = field(default_factory=set)
    """SHA-256 of the contents that are kept in the storage, not in git."""
    messages: list[str] = field(default_factory=list)

    def resolve(self, revision: str) -> str:
        """The commit of a revision as it stands in an address."""
        commit = self.refs.get(unquote(revision), unquote(revision))
        if commit not in self.commits:
            raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {commit}")
        return commit

    def commit(self, files: dict[str, bytes], ref: str = "main") -> str:
        """Add a commit that holds ``files`` to a branch and return its id, which no earlier commit has."""
        digest = hashlib.sha1(f"{self.kind} {self.id} {len(self.commits)}".encode())
        for path in sorted(files):
            digest.update(path.encode() + files[path])
        self.commits[digest.hexdigest()] = dict(files)
        self.refs[ref] = digest.hexdigest()
        return digest.hexdigest()

    def branch(self, name: str, start: str | None = None) -> None:
        """A new branch at a commit or at another branch."""
        if name.startswith("refs/"):
            raise RefusedError(400, "", f"Invalid reference for a branch: {name}")
        if name in self.refs:
            raise RefusedError(409, "", f"Reference {name} exists")
        self.refs[name] = self.resolve(start or "main")

    def pull_request(self, start: str) -> int:
        """A new pull request from a revision; its number."""
        number = 1 + sum(ref.startswith("refs/pr/") for ref in self.refs)
        self.refs[f"refs/pr/{number}"] = self.resolve(start)
        return number

    def apply(self, body: bytes, revision: str, pull: bool, stored: dict[str, bytes]) -> tuple[str, int | None]:
        """Do what the lines of a commit request say; the new commit, and the number of its pull request."""
        entries = [(entry["key"], entry["value"]) for entry in map(json.loads, filter(None, body.splitlines()))]
        ((_, header),) = [entry for entry in entries if entry[0] == "header"]
        ref, parent = unquote(revision), header.get("parentCommit")
        files = dict(self.commits[self.resolve(parent if pull and parent else ref)])
        if not pull and parent not in (None, self.resolve(ref)):
            raise RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
        for key, value in entries:
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                if value["oid"] not in stored:
                    raise RefusedError(400, "", f"Your push was rejected: {value['path']} is not in the storage")
                files[value["path"]] = stored[value["oid"]]
                self.large.add(value["oid"])
            elif key == "deletedFile" and files.pop(value["path"], None) is None:
                raise RefusedError(404, "EntryNotFound", f"A file with this name doesn't exist: {value['path']}")
        self.messages.append(header["summary"])
        number = self.pull_request(ref) if pull else None
        return self.commit(files, ref if number is None else f"refs/pr/{number}"), number

    def is_large(self, data: bytes) -> bool:
        """Whether a file of these contents is in the storage."""
        return sha256(data) in self.large

    def entries(self, commit: str) -> dict[str, dict[str, Any]]:
        """Files and the folders above them, as the tree and paths-info routes describe them."""
        files = self.commits[commit]
        parents = {path.rsplit("/", n)[0] for path in files for n in range(1, path.count("/") + 1)}
        found: dict[str, dict[str, Any]] = {p: {"type": "directory", "oid": "0" * 40, "path": p} for p in parents}
        for path, data in files.items():
            found[path] = {"type": "file", "oid": blob_id(data), "size": len(data), "path": path}
            if self.is_large(data):
                found[path]["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
        return found

    def tree(self, commit: str, folder: str, deep: bool) -> list[dict[str, Any]]:
        """The entries of a folder, or all below it."""
        entries = self.entries(commit)
        if folder and entries.get(folder, {}).get("type") != "directory":
            raise RefusedError(404, "EntryNotFound", f"{folder} does not exist on {commit}")
        below = {p: e for p, e in entries.items() if not folder or p.startswith(f"{folder}/")}
        depth = folder.count("/") + 1 if folder else 0
        return [e for p, e in below.items() if deep or p.count("/") == depth]

    def describe(self, commit: str) -> dict[str, Any]:
        """What the Hub says of the repository at a commit."""
        files = self.commits[commit]
        front = re.match(r"---\n(.*?)\n---", files.get("README.md", b"").decode(), re.DOTALL)
        # One-line fields only, licence among them: the standard library reads no YAML.
        card = dict(re.findall(r"^(\w+): (\S.*)$", front[1], re.MULTILINE)) if front else {}
        fields = {"id": self.id, "sha": commit, "private": self.private, "gated": "manual" if self.gated else False}
        siblings = [{"rfilename": path} for path in files]
        return {**fields, "disabled": False, "tags": [], "siblings": siblings, "cardData": card}

    def describe_refs(self) -> dict[str, Any]:
        """The branches and pull requests."""
        branches = [r for r in self.refs if not r.startswith("refs/")]
        pulls = [r for r in self.refs if r.startswith("refs/pr/")]
        described: dict[str, Any] = {
            "branches": [{"name": r, "ref": f"refs/heads/{r}", "targetCommit": self.refs[r]} for r in branches],
            "pullRequests": [{"name": r, "ref": r, "targetCommit": self.refs[r]} for r in pulls],
        }
        return {"converts": [], "tags": [], **described}


def blob_id(data: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    """The storage's name of a file's content."""
    return hashlib.sha256(data).hexdigest()
