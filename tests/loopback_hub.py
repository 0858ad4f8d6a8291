"""A tiny Hugging Face Hub on loopback, for unmodified clients that are pointed to it by ``HF_ENDPOINT``.

It answers what ``huggingface_hub``, ``datasets``, ``timm`` and ``transformers`` ask when they read, create and commit
to model and dataset repositories, branches and pull requests; everything else is a 404, Xet among it. As on the real
Hub, the description and the file list of a gated repository are public and only its files are refused. With ``lfs``,
binary files go through a storage on another port, which is told no token. It also poses as a proxy (``proxy_env``) that
refuses everything, so that a request to any other host lands in the log instead of on the internet.

Failures on demand: ``fail`` (statuses), ``card_errors``, ``when`` (something happens meanwhile), ``line`` (bytes).
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from tests.loopback_http import Answer, Line, serve
from tests.loopback_repo import RefusedError, Repo, blob_id, sha256
from tests.loopback_storage import Storage

OWNER = "loopback-user"
_FILE = re.compile(r"/(dataset)?(?:s/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)$")
_REPO = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/([\w-]+))?(?:/([^/]+))?(/.*)?$")
_BATCH = re.compile(r"/(dataset)?(?:s/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch$")


class Request(NamedTuple):
    """One line of the log; the path is a whole address for the storage, and where the Hub was used as a proxy."""

    method: str
    path: str
    authorized: bool


class LoopbackHub:
    """The server and its storage, running while the context is open."""

    def __init__(self) -> None:
        self.token = "hf_" + sha256(b"loopback")[:34]
        self.read_token = "hf_" + sha256(b"reader")[:34]
        """Reads what ``token`` reads, and writes nothing but pull requests."""
        self.requests: list[Request] = []
        self.leaks: list[str] = []
        """Requests to anybody but the Hub with a token anywhere in them."""
        self.lfs = False
        """Whether binary files go through the storage; otherwise their bytes are part of the commit."""
        self.card_errors: list[str] = []
        """What is wrong with every card from now on."""
        self.line = Line()
        self._repos: dict[tuple[str, str], Repo] = {}
        self._failures: list[tuple[str, re.Pattern[str], list[int], Any, dict[str, str]]] = []
        self._events: list[tuple[str, re.Pattern[str], Callable[[], object]]] = []
        self._lock = threading.RLock()
        self.storage = Storage(self.line, self.log)
        self._servers = [serve(self), serve(self.storage)]
        self.url, self.storage.url = (f"http://127.0.0.1:{server.server_port}" for server in self._servers)

    @property
    def proxy_env(self) -> dict[str, str]:
        """Environment that sends what is not for loopback through this server, which logs and refuses it."""
        values = {"http_proxy": self.url, "https_proxy": self.url, "all_proxy": self.url, "no_proxy": "127.0.0.1"}
        return values | {k.upper(): v for k, v in values.items()}

    def __enter__(self) -> LoopbackHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add_repo(
        self, repo_id: str, files: dict[str, bytes], kind: str = "model", gated: bool = False, private: bool = False
    ) -> str:
        """Create a repository, or add a commit with exactly these files to it; returns the commit."""
        with self._lock:
            repo = self._repos.setdefault((kind, repo_id), Repo(repo_id, kind))
            repo.gated, repo.private = gated, private
            for data in files.values():
                if self.lfs and b"\0" in data[:512]:
                    self.storage.contents[sha256(data)] = data
                    repo.large.add(sha256(data))
            return repo.commit(files)

    def repo(self, repo_id: str, kind: str = "model") -> Repo:
        """A repository."""
        return self._repos[kind, repo_id]

    def files(self, repo_id: str, kind: str = "model", revision: str = "main") -> dict[str, bytes]:
        """The files at a revision."""
        repo = self.repo(repo_id, kind)
        return dict(repo.commits[repo.resolve(revision)])

    def commit(self, repo_id: str, kind: str = "model") -> str:
        """The commit that ``main`` means now."""
        return self.repo(repo_id, kind).resolve("main")

    def fail(
        self, method: str, path_pattern: str, statuses: list[int], body: bytes | None = None, **headers: str
    ) -> None:
        """Answer the next requests that match with these statuses, one each, before any other rule."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        said = {"error": "injected failure"} if body is None else body
        self._failures.append((method, re.compile(path_pattern), list(statuses), said, named))

    def when(self, method: str, path_pattern: str, action: Callable[[], object]) -> None:
        """Do something just before the next request that matches is answered."""
        self._events.append((method, re.compile(path_pattern), action))

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Log a request and answer it."""
        given = {name.lower(): text for name, text in headers.items()}.get("authorization")
        with self._lock:
            self.log(method, path, body, headers)
            for event in [e for e in self._events if e[0] == method and e[1].search(path)]:
                self._events.remove(event)
                event[2]()
            for wanted, pattern, statuses, said, extra in self._failures:
                if statuses and wanted == method and pattern.search(path):
                    return statuses.pop(0), said, dict(extra)
            if not path.startswith("/"):
                return 502, {"error": "this address is not on loopback"}, {}
            roles = {None: "", f"Bearer {self.token}": "writes", f"Bearer {self.read_token}": "reads"}
            try:
                if given not in roles:
                    raise RefusedError(401, "", "Invalid credentials in Authorization header")
                return self._route(method, path, body, roles[given])
            except RefusedError as refused:
                return refused.status, {"error": str(refused)}, refused.headers

    def log(self, method: str, address: str, body: bytes, headers: dict[str, str]) -> None:
        """Remember a request, and whether it carries a token to where none belongs."""
        known = any(name.lower() == "authorization" for name in headers)
        self.requests.append(Request(method, address, known))
        text = f"{address} {headers}".encode() + body
        if not address.startswith("/") and any(token.encode() in text for token in (self.token, self.read_token)):
            self.leaks.append(f"{method} {address}")

    def _route(self, method: str, path: str, body: bytes, role: str) -> Answer:
        address = urlsplit(path)
        query = parse_qs(address.query)
        if match := _FILE.match(address.path):
            return self._file(self._find(match[1] or "model", match[2], role), match[3], unquote(match[4]), role)
        if method == "POST" and (match := _BATCH.match(address.path)):
            request = json.loads(body)
            self._may_write(self._find(match[1] or "model", match[2], role), role, pull="ref" not in request)
            return 200, self.storage.batch(request["objects"]), {}
        if (method, address.path) == ("GET", "/api/whoami-v2"):
            self._known(role)
            return 200, {"type": "user", "name": OWNER, "fullname": OWNER, "orgs": []}, {}
        if (method, address.path) == ("POST", "/api/validate-yaml"):
            found = [{"message": text} for text in self.card_errors]
            return 400 if found else 200, {"errors": found, "warnings": []}, {}
        if (method, address.path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body), role)
        if match := _REPO.match(address.path):
            repo = self._find(match[1], match[2], role)
            return self._of_repo(method, repo, match[3] or "", match[4] or "main", match[5] or "", query, body, role)
        raise RefusedError(404, "", f"no such page: {method} {address.path}")

    def _of_repo(
        self, method: str, repo: Repo, action: str, revision: str, rest: str, query: Any, body: bytes, role: str
    ) -> Answer:
        pull = query.get("create_pr") == ["1"]
        match method, action:
            case "GET", "" | "revision":
                return 200, repo.describe(repo.resolve(revision)), {}
            case "GET", "refs":
                return 200, repo.describe_refs(), {}
            case "GET", "tree":
                deep = query.get("recursive") == ["true"]
                return 200, repo.tree(repo.resolve(revision), unquote(rest).strip("/"), deep), {}
            case "POST", "paths-info":
                names = json.loads(body)["paths"] if body[:1] == b"{" else parse_qs(body.decode()).get("paths", [])
                entries = repo.entries(repo.resolve(revision))
                return 200, [entries[name] for name in names if name in entries], {}
            case "POST", "preupload":
                self._may_write(repo, role, pull or unquote(revision).startswith("refs/pr/"))
                return 200, self._preupload(repo, repo.resolve(revision), body), {}
            case "POST", "commit":
                self._may_write(repo, role, pull or unquote(revision).startswith("refs/pr/"))
                commit, number = repo.apply(body, revision, pull, self.storage.contents)
                where = {"pullRequestUrl": f"{self.url}/{repo.id}/discussions/{number}"} if number else {}
                url = f"{self.url}/{repo.id}/commit/{commit}"
                return 200, {"success": True, "commitOid": commit, "commitUrl": url, **where}, {}
            case "POST", "branch":
                self._may_write(repo, role)
                repo.branch(unquote(revision), json.loads(body or b"{}").get("startingPoint"))
                return 200, {}, {}
            case "POST", "discussions":
                self._known(role)
                return 200, {"num": repo.pull_request("main")}, {}
            case "GET", "discussions":
                about = {"isPullRequest": True, "changes": {"base": "refs/heads/main"}, "filesWithConflicts": []}
                named = {"title": "", "num": int(revision), "author": {"name": OWNER}, "status": "draft"}
                dated = {"createdAt": "2026-01-01T00:00:00.000Z", "events": []}
                return 200, {**about, **named, **dated, "repo": {"name": repo.id, "type": repo.kind}}, {}
        raise RefusedError(404, "", f"no such page: {method} {action}")

    def _file(self, repo: Repo, revision: str, name: str, role: str) -> Answer:
        if repo.gated:
            raise RefusedError(403 if role else 401, "GatedRepo", f"Access to {repo.id} is restricted.")
        commit = repo.resolve(revision)
        if name not in repo.commits[commit]:
            raise RefusedError(404, "EntryNotFound", "Entry not found", **{"X-Repo-Commit": commit})
        data = repo.commits[commit][name]
        headers = {"ETag": f'"{blob_id(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not repo.is_large(data):
            return 200, data, headers
        linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        return 302, b"", {**headers, **linked, "Location": f"{self.storage.url}/{sha256(data)}"}

    def _find(self, kind: str, repo_id: str, role: str) -> Repo:
        repo = self._repos.get((kind, unquote(repo_id)))
        if repo is None or (repo.private and not role):
            raise RefusedError(404 if role else 401, "RepoNotFound", "Repository not found")
        return repo

    def _known(self, role: str) -> None:
        if not role:
            raise RefusedError(401, "", "Invalid username or password.")

    def _may_write(self, where: Repo | str, role: str, pull: bool = False) -> None:
        self._known(role)
        owner = where if isinstance(where, str) else where.id.split("/")[0]
        if not pull and (owner != OWNER or role == "reads"):
            raise RefusedError(403, "", f"You don't have the rights to write under the namespace {owner!r}.")

    def _create(self, request: dict[str, Any], role: str) -> Answer:
        owner, kind = request.get("organization") or OWNER, request.get("type") or "model"
        self._may_write(owner, role)
        repo_id = f"{owner}/{request['name']}"
        answer = {"url": f"{self.url}/{'datasets/' if kind == 'dataset' else ''}{repo_id}", "name": repo_id}
        if (kind, repo_id) in self._repos:
            return 409, {**answer, "error": "You already created this repo"}, {}
        private = request.get("visibility") == "private" or bool(request.get("private"))
        self._repos[kind, repo_id] = repo = Repo(repo_id, kind, private=private)
        repo.commit({".gitattributes": b""})
        return 200, answer, {}

    def _preupload(self, repo: Repo, commit: str, body: bytes) -> dict[str, Any]:
        answers = []
        for file in json.loads(body)["files"]:
            large = self.lfs and b"\0" in base64.b64decode(file["sample"])
            present = repo.commits[commit].get(file["path"])
            oid = None if present is None else (sha256 if repo.is_large(present) else blob_id)(present)
            mode = "lfs" if large else "regular"
            answers.append({"path": file["path"], "oid": oid, "uploadMode": mode, "shouldIgnore": False})
        return {"files": answers}
