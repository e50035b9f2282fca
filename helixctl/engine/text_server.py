"""One page of text on localhost, answered by a thread of its own while the run goes on."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

HOST = "127.0.0.1"
_CLIENT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)


class TextServer:
    """Answers GET requests for ``path`` with what ``render`` returns; reachable from this machine only.

    Requests are answered one after another. ``render`` runs in the server's thread.
    """

    def __init__(self, port: int, path: str, content_type: str, render: Callable[[], str]) -> None:
        """Listen on ``port``; 0 takes a free one.

        Raises:
            OSError: the port is taken, or not for this user.
        """
        self._server = _Server((HOST, port), _handler(path, content_type, render))
        self._closing = False
        self.url = f"http://{HOST}:{self._server.server_port}{path}"
        self._thread = threading.Thread(target=self._serve, name="text-server", daemon=False)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; returns when the thread has ended."""
        self._closing = True
        with contextlib.suppress(OSError), socket.create_connection((HOST, self._server.server_port), 1.0):
            pass  # the thread waits for a connection, without looking at the clock: this is one
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._closing:
            self._server.handle_request()


class _Server(HTTPServer):
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Called inside of an except clause; a client that hangs up must not end the thread."""
        logger.warning("a request for %s could not be answered", self.server_address, exc_info=True)


def _handler(path: str, content_type: str, render: Callable[[], str]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CLIENT_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != path:
                self.send_error(404, f"only {path} is here")
                return
            body = render().encode()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            logger.debug(format, *args)

    return Handler
