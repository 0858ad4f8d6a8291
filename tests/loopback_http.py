"""The wire of the loopback Hub: requests in, answers out, ranges, and a line that breaks after a number of bytes."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

Answer = tuple[int, Any, dict[str, str]]
"""Status, body (bytes, or what becomes JSON) and headers."""
_CHUNK = 1 << 14


class Line:
    """What passes between client and servers, and where it breaks."""

    def __init__(self) -> None:
        self.received = 0
        """Bytes of request bodies so far."""
        self._left: int | None = None
        self._answers: list[tuple[re.Pattern[str], int]] = []
        self._lock = threading.Lock()

    @property
    def broken(self) -> bool:
        """Whether nothing passes any more."""
        return self._left == 0

    def cut(self, after: int) -> None:
        """Break after so many more bytes of request bodies, until ``mend``.

        A request whose last byte still passes is carried out, and its answer is lost.
        """
        self._left = after

    def mend(self) -> None:
        """Let everything pass again."""
        self._left = None

    def cut_answer(self, path_pattern: str, after: int) -> None:
        """End the next answer that matches after so many bytes of its body."""
        self._answers.append((re.compile(path_pattern), after))

    def take(self, wanted: int) -> int:
        """How many of the bytes wanted next may pass."""
        with self._lock:
            allowed = wanted if self._left is None else min(wanted, self._left)
            if self._left is not None:
                self._left -= allowed
            self.received += allowed
            return allowed

    def answer_limit(self, path: str) -> int | None:
        """After how many bytes an answer ends."""
        for entry in self._answers:
            if entry[0].search(path):
                self._answers.remove(entry)
                return entry[1]
        return None


class Service(Protocol):
    """Who answers."""

    line: Line

    def answer(self, method: str, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Answer one request."""


def serve(service: Service) -> ThreadingHTTPServer:
    """A server on a free port of loopback, not yet running."""
    return ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"service": service}))


class _Handler(BaseHTTPRequestHandler):
    service: Service
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def handle(self) -> None:
        # Clients end without closing their connections.
        with suppress(ConnectionError):
            super().handle()

    def _answer(self) -> None:
        if self.service.line.broken:
            self._drop()
        # Read even where it is not wanted: the connection is kept for the next request.
        body = self._body()
        status, value, headers = self.service.answer(self.command, self.path, body, dict(self.headers))
        if self.service.line.broken:
            self._drop()
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        kind = "application/octet-stream" if isinstance(value, bytes) else "application/json"
        headers = {"Content-Type": kind, **headers}
        wanted = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
        if status == 200 and wanted and isinstance(value, bytes):
            status, data, headers["Content-Range"] = _part(data, wanted[1], wanted[2])
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            limit = self.service.line.answer_limit(self.path)
            self.wfile.write(data if limit is None else data[:limit])
            if limit is not None:
                self.wfile.flush()
                self._drop(gently=True)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self._read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self._read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            allowed = self.service.line.take(min(_CHUNK, size - len(data)))
            part = self.rfile.read(allowed)
            if not part:  # the line is broken, or the client has gone
                self._drop()
            data += part
        return data

    def _drop(self, gently: bool = False) -> None:
        if not gently:  # a reset, as of a machine that is gone
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        raise ConnectionAbortedError

    do_GET = do_HEAD = do_POST = do_PUT = do_CONNECT = _answer  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing on stderr; the Hub keeps a log."""


def _part(data: bytes, first: str, last: str) -> tuple[int, bytes, str]:
    """Status, bytes and ``Content-Range`` for ``bytes=FIRST-LAST``, where one of the two may be empty."""
    start = int(first) if first else max(len(data) - int(last), 0)
    end = min(int(last), len(data) - 1) if first and last else len(data) - 1
    if start >= len(data):
        return 416, b"", f"bytes */{len(data)}"
    return 206, data[start : end + 1], f"bytes {start}-{end}/{len(data)}"
