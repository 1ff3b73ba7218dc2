"""The page while runs go on: a small server on this machine's loopback address that only ever reads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from isofed.errors import UserError
from isofed.report.gather import Reader, Run, Splits
from isofed.report.page import as_json, content, render

HOST, PORT = "127.0.0.1", 8765
_NAMES = (HOST, "localhost")  # by which a browser may call it: another name would be another site's trick


class Watch:
    """Serves the page of some folders; several browsers may look at once.

    Nothing is read while nobody looks, and files that have not changed are not read again.
    """

    def __init__(self, paths: Sequence[Path], port: int | None = None) -> None:
        self._paths, self._reader, self._splits = list(paths), Reader(), Splits()
        self._reading = threading.Lock()
        self._last: tuple[_Shown, dict[str, Any]] | None = None
        self._server = self._listen(port)
        self._serving: threading.Thread | None = None
        self._splitting: threading.Thread | None = None
        self.port = self._server.server_port
        self.address = f"http://{HOST}:{self.port}/"

    def _listen(self, port: int | None) -> ThreadingHTTPServer:
        watch = self

        class Handler(_Handler):
            of = watch

        try:
            return ThreadingHTTPServer((HOST, PORT if port is None else port), Handler)
        except OSError as error:
            if port is None:  # taken, for instance by another watch: any free one will do
                return ThreadingHTTPServer((HOST, 0), Handler)
            raise UserError(f"port {port} cannot be used: {error.strerror}; choose another port=") from None
        except OverflowError:
            raise UserError(f"a port is a number from 0 to 65535, not {port}") from None

    def content(self) -> dict[str, Any]:
        """What the page shows at this moment; made anew only if something has changed."""
        with self._reading:
            found = self._reader.read(self._paths)
            found.problems.extend(f"There is no run in {path} yet." for path in self._paths if not path.exists())
            self._make_splits(found.runs)
            splits = self._splits.known(found.runs)
            now = _Shown(found.runs, found.target, found.problems, splits)
            if self._last is None or not self._last[0].same(now):
                self._last = now, content(found, splits, live=True)
            return self._last[1]

    def _make_splits(self, runs: Sequence[Run]) -> None:
        """Begin with those that are missing. Data sets take a while to read, so the page does not wait for them."""
        if self._splits.missing(runs) and not (self._splitting and self._splitting.is_alive()):
            self._splitting = threading.Thread(target=self._splits.of, args=(runs,), daemon=True)
            self._splitting.start()

    def serve(self) -> None:
        """Answer until :meth:`close` is called, from another thread, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def __enter__(self) -> Watch:
        self._serving = threading.Thread(target=self.serve, daemon=True)
        self._serving.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self.close()

    def close(self) -> None:
        self._server.server_close()


@dataclass(frozen=True)
class _Shown:
    """What a page is made of."""

    runs: list[Run]
    target: float | None
    problems: list[str]
    splits: list[dict[str, Any]]

    def same(self, other: _Shown) -> bool:
        """Whether nothing has changed; a run that has is read into another object."""
        mine, theirs = [*self.runs, *self.splits], [*other.runs, *other.splits]
        kept = len(mine) == len(theirs) and all(a is b for a, b in zip(mine, theirs, strict=True))
        return kept and (self.target, self.problems) == (other.target, other.problems)


class _Handler(BaseHTTPRequestHandler):
    of: Watch

    def do_GET(self) -> None:
        called = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        if called not in _NAMES:
            return self._answer(403, "text/plain", b"This page is only for a browser on the same machine.\n")
        path = self.path.partition("?")[0]
        if path not in ("/", "/data"):
            return self._answer(404, "text/plain", b"There is only one page here.\n")
        try:
            content = self.of.content()
        except Exception as error:  # a record that no version of isofed has written must not end the watching
            return self._answer(500, "text/plain", f"{type(error).__name__}: {error}\n".encode())
        if path == "/":
            return self._answer(200, "text/html", render(content).encode())
        body = as_json(content).encode()
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            return self._answer(304, None, b"", tag)
        return self._answer(200, "application/json", body, tag)

    do_HEAD = do_GET

    def _answer(self, status: int, kind: str | None, body: bytes, tag: str | None = None) -> None:
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
        if tag:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # a browser that was closed in the middle
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Quiet: a line for each look every two seconds would tell nobody anything."""
