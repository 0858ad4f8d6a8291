"""A tiny Hugging Face Hub on loopback, for unmodified clients that are pointed to it by ``HF_ENDPOINT``.

It answers what ``huggingface_hub``, ``datasets``, ``timm`` and ``transformers`` ask when they read, create and commit
to model and dataset repositories; everything else is a 404. As on the real Hub, the description and the file list of a
gated repository are public and only its files are refused. It also poses as a proxy (``proxy_env``) that refuses
everything, so that a request to any other host lands in the log instead of on the internet.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

OWNER = "loopback-user"
Answer = tuple[int, Any, dict[str, str]]
"""Status, body (bytes, or what becomes JSON) and headers."""

_API = re.compile(
    r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|preupload|commit|tree|paths-info)/([^/]+)(/.*)?)?$"
)
_FILE = re.compile(r"/(dataset)?(?:s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")


class Request(NamedTuple):
    """One line of the log; the path is as sent, so it is a whole address where the hub was used as a proxy."""

    method: str
    path: str
    authorized: bool


@dataclass
class Repo:
    """A repository: every commit's files; ``main`` is the last commit, the only branch."""

    id: str
    kind: str
    gated: bool = False
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The commit that ``main`` means."""
        return next(reversed(self.commits))

    def resolve(self, revision: str) -> str:
        """The commit of a revision as it stands in an address."""
        commit = self.head if revision == "main" else unquote(revision)
        if commit not in self.commits:
            raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {commit}")
        return commit

    def commit(self, files: dict[str, bytes]) -> str:
        """Add a commit that holds ``files`` and return its id, which no earlier commit has."""
        digest = hashlib.sha1(f"{self.kind} {self.id} {len(self.commits)}".encode())
        for path in sorted(files):
            digest.update(path.encode() + files[path])
        self.commits[digest.hexdigest()] = dict(files)
        return digest.hexdigest()


class _RefusedError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, **headers}


class LoopbackHub:
    """The server, running while its context is open."""

    def __init__(self) -> None:
        self.token = "hf_" + hashlib.sha256(b"loopback").hexdigest()[:34]
        self.requests: list[Request] = []
        self._repos: dict[tuple[str, str], Repo] = {}
        self._failures: list[tuple[str, re.Pattern[str], list[int]]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def proxy_env(self) -> dict[str, str]:
        """Environment that sends what is not for loopback through this server, which logs and refuses it."""
        values = {"http_proxy": self.url, "https_proxy": self.url, "all_proxy": self.url, "no_proxy": "127.0.0.1"}
        return values | {k.upper(): v for k, v in values.items()}

    def __enter__(self) -> LoopbackHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add_repo(
        self, repo_id: str, files: dict[str, bytes], kind: str = "model", gated: bool = False, private: bool = False
    ) -> str:
        """Create a repository, or add a commit with exactly these files to it; returns the commit."""
        with self._lock:
            repo = self._repos.setdefault((kind, repo_id), Repo(repo_id, kind))
            repo.gated, repo.private = gated, private
            return repo.commit(files)

    def files(self, repo_id: str, kind: str = "model") -> dict[str, bytes]:
        """The files on ``main``."""
        repo = self._repos[kind, repo_id]
        return dict(repo.commits[repo.head])

    def commit(self, repo_id: str, kind: str = "model") -> str:
        """The commit that ``main`` means now."""
        return self._repos[kind, repo_id].head

    def fail(self, method: str, path_pattern: str, statuses: list[int]) -> None:
        """Answer the next requests that match with these statuses, one each, before any other rule."""
        self._failures.append((method, re.compile(path_pattern), list(statuses)))

    def answer(self, method: str, path: str, body: bytes, authorization: str | None) -> Answer:
        """Log a request and answer it."""
        with self._lock:
            self.requests.append(Request(method, path, authorization is not None))
            for wanted, pattern, statuses in self._failures:
                if statuses and wanted == method and pattern.search(path):
                    return statuses.pop(0), {"error": "injected failure"}, {}
            if not path.startswith("/"):
                return 502, {"error": "this address is not on loopback"}, {}
            try:
                if authorization not in (None, f"Bearer {self.token}"):
                    raise _RefusedError(401, "", "Invalid credentials in Authorization header")
                return self._route(method, path, body, authorization is not None)
            except _RefusedError as refused:
                return refused.status, {"error": str(refused)}, refused.headers

    def _route(self, method: str, path: str, body: bytes, known: bool) -> Answer:
        address = urlsplit(path)
        if match := _FILE.match(address.path):
            return self._file(self._find(match[1] or "model", match[2], known), match[3], unquote(match[4]), known)
        if match := _API.match(address.path):
            kind, repo_id, action, revision, rest = match.groups()
            repo = self._find(kind, repo_id, known)
            commit = repo.resolve(revision or "main")
            if (method, action) in {("POST", "preupload"), ("POST", "commit")}:
                self._may_write(repo_id.split("/")[0], known)
                return 200, self._preupload(repo, body) if action == "preupload" else self._commit(repo, body), {}
            if method == "GET" and action in (None, "revision"):
                return 200, _description(repo, commit), {}
            entries = _entries(repo.commits[commit])
            if method == "GET" and action == "tree":
                folder, deep = unquote(rest or "").strip("/"), parse_qs(address.query).get("recursive") == ["true"]
                if folder and entries.get(folder, {}).get("type") != "directory":
                    raise _RefusedError(404, "EntryNotFound", f"{folder} does not exist on {commit}")
                below = {p: e for p, e in entries.items() if not folder or p.startswith(f"{folder}/")}
                depth = folder.count("/") + 1 if folder else 0
                return 200, [e for p, e in below.items() if deep or p.count("/") == depth], {}
            if method == "POST" and action == "paths-info":
                names = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
                return 200, [entries[name] for name in names if name in entries], {}
        if (method, address.path) == ("GET", "/api/whoami-v2"):
            self._may_write(OWNER, known)
            return 200, {"type": "user", "name": OWNER, "fullname": OWNER, "orgs": []}, {}
        if (method, address.path) == ("POST", "/api/validate-yaml"):
            return 200, {"errors": [], "warnings": []}, {}
        if (method, address.path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body), known)
        raise _RefusedError(404, "", f"no such page: {method} {address.path}")

    def _file(self, repo: Repo, revision: str, name: str, known: bool) -> Answer:
        if repo.gated:
            raise _RefusedError(403 if known else 401, "GatedRepo", f"Access to {repo.id} is restricted.")
        commit = repo.resolve(revision)
        if name not in repo.commits[commit]:
            raise _RefusedError(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        data = repo.commits[commit][name]
        return 200, data, {"ETag": f'"{_blob_id(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}

    def _find(self, kind: str, repo_id: str, known: bool) -> Repo:
        repo = self._repos.get((kind, unquote(repo_id)))
        if repo is None or (repo.private and not known):
            raise _RefusedError(404 if known else 401, "RepoNotFound", "Repository not found")
        return repo

    def _may_write(self, owner: str, known: bool) -> None:
        if not known:
            raise _RefusedError(401, "", "Invalid username or password.")
        if owner != OWNER:
            raise _RefusedError(403, "", f"You don't have the rights to write under the namespace {owner!r}.")

    def _create(self, request: dict[str, Any], known: bool) -> Answer:
        owner, kind = request.get("organization") or OWNER, request.get("type") or "model"
        self._may_write(owner, known)
        repo_id = f"{owner}/{request['name']}"
        answer = {"url": f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{repo_id}", "name": repo_id}
        if (kind, repo_id) in self._repos:
            return 409, {**answer, "error": "You already created this repo"}, {}
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self._repos[kind, repo_id] = repo = Repo(repo_id, kind, private=private)
        repo.commit({".gitattributes": b""})
        return 200, answer, {}

    def _preupload(self, repo: Repo, body: bytes) -> dict[str, Any]:
        present = {path: _blob_id(data) for path, data in repo.commits[repo.head].items()}
        # Never "lfs": the client then puts every byte into the commit, and no storage server is needed.
        common = {"uploadMode": "regular", "shouldIgnore": False}
        paths = [file["path"] for file in json.loads(body)["files"]]
        return {"files": [{"path": path, "oid": present.get(path), **common} for path in paths]}

    def _commit(self, repo: Repo, body: bytes) -> dict[str, Any]:
        files = dict(repo.commits[repo.head])
        for line in filter(None, body.splitlines()):
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header" and value.get("parentCommit", repo.head) != repo.head:
                raise _RefusedError(412, "", "A commit has happened since. Please refresh and try again.")
            if key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                files.pop(value["path"], None)
        commit = repo.commit(files)
        return {"success": True, "commitOid": commit, "commitUrl": f"{self.url}/{repo.id}/commit/{commit}"}


def _blob_id(data: bytes) -> str:
    """git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entries(files: dict[str, bytes]) -> dict[str, dict[str, Any]]:
    """Files and the folders above them, as the tree and paths-info routes describe them."""
    parents = {path.rsplit("/", n)[0] for path in files for n in range(1, path.count("/") + 1)}
    folders: dict[str, dict[str, Any]] = {p: {"type": "directory", "oid": "0" * 40, "path": p} for p in parents}
    return folders | {p: {"type": "file", "oid": _blob_id(d), "size": len(d), "path": p} for p, d in files.items()}


def _description(repo: Repo, commit: str) -> dict[str, Any]:
    files = repo.commits[commit]
    front = re.match(r"---\n(.*?)\n---", files.get("README.md", b"").decode(), re.DOTALL)
    # One-line fields only, licence among them: the standard library reads no YAML.
    card = dict(re.findall(r"^(\w+): (\S.*)$", front[1], re.MULTILINE)) if front else {}
    fields = {"id": repo.id, "sha": commit, "private": repo.private, "gated": "manual" if repo.gated else False}
    siblings = [{"rfilename": path} for path in files]
    return {**fields, "disabled": False, "tags": [], "siblings": siblings, "cardData": card}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        # Clients end without closing their connections.
        with suppress(ConnectionError):
            super().handle()

    def _answer(self) -> None:
        # Read even where it is not wanted: the connection is kept for the next request.
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, value, headers = self.hub.answer(self.command, self.path, body, self.headers.get("Authorization"))
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if status == 200 and wanted:
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            status, data = 206, data[first : last + 1]
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        self.send_response(status)
        for name, text in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_HEAD = do_POST = do_CONNECT = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing on stderr; ``LoopbackHub.requests`` is the log."""
