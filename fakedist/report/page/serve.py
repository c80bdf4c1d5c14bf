"""Serves pages over HTTP for a user at another machine: on localhost only, below one unguessable address, read-only.

``ssh -L 8000:127.0.0.1:8000 host`` brings it to a laptop.
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from fakedist.errors import SetupError

HOST = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


#: A status, a type of content, and the content.
Answer = tuple[HTTPStatus, str, bytes]


class PageServer(ThreadingHTTPServer):
    """Serves one page, and those that it links to, until it is shut down. Port 0 takes a free one.

    ``linked`` makes the page at an address that the first one links to, relative to it; None if there is none.

    Raises:
        SetupError: The port is taken, or may not be used.
    """

    daemon_threads = True

    def __init__(self, text: str, port: int, linked: Callable[[str], str | None] = lambda _address: None) -> None:
        self.body = text.encode()
        self._linked, self._making = linked, threading.Lock()
        self.path = f"/{secrets.token_urlsafe(24)}/"
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise SetupError(f"port {port} cannot be used: {error}", "--port 0 takes a free one") from error

    @property
    def url(self) -> str:
        """The page's address."""
        return f"http://{HOST}:{self.server_port}{self.path}"

    def answer(self, path: str) -> Answer | None:
        """Return what is at a path; None for nothing."""
        if not secrets.compare_digest(path[: len(self.path)].encode(), self.path.encode()):
            return None
        if path == self.path:
            body: bytes | None = self.body
        else:
            with self._making:  # each takes memory
                text = self._linked(unquote(path[len(self.path) :]))
            body = None if text is None else text.encode()
        return None if body is None else (HTTPStatus.OK, "text/html; charset=utf-8", body)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of a browser that went away before it had its answer."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    # The names of methods and arguments come from http.server.
    server: PageServer
    server_version = "fakedist"
    sys_version = ""
    timeout = 30

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        # Another site's page that reaches this machine by another name may not read it (DNS rebinding).
        known = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        is_ours = self.headers.get("Host", "") in known
        answer = self.server.answer(self.path) if is_ours else None
        if answer is None:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        status, kind, body = answer
        self.send_response(status)
        self.send_header("Content-Type", kind)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Log nothing: the address is a secret."""
