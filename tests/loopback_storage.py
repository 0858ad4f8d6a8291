"""The host that the loopback Hub has large files sent to and fetched from; it is told no token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.loopback_http import Answer, Line
from tests.loopback_repo import sha256


class Storage:
    """Contents under their SHA-256, given to anybody who has that."""

    def __init__(self, line: Line, log: Callable[[str, str, bytes, dict[str, str]], None]) -> None:
        self.line, self.url = line, ""
        self.contents: dict[str, bytes] = {}
        self._log = log

    def batch(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """Where to send the objects that are not here yet."""
        answers: list[dict[str, Any]] = []
        for wanted in objects:
            oid = wanted["oid"]
            upload = {} if oid in self.contents else {"actions": {"upload": {"href": f"{self.url}/{oid}"}}}
            answers.append({"oid": oid, "size": wanted["size"], **upload})
        return {"transfer": "basic", "objects": answers}

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Log a request under its whole address and answer it."""
        self._log(method, self.url + path, body, headers)
        oid = path.strip("/")
        if method == "PUT":
            if sha256(body) != oid:
                return 400, {"error": "the contents are not those of the address"}, {}
            self.contents[oid] = body
            return 200, b"", {}
        if oid not in self.contents:
            return 404, {"error": "no such contents"}, {}
        return 200, self.contents[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"}
