"""A web server for tests: files from memory or from a directory, a record of what was asked, and faults on demand.

It listens on 127.0.0.1 alone, on a port that the kernel chooses, in threads of the process that uses it.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import mmap
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

MODIFIED_S = 1_700_000_000
PIECE_BYTES = 256 * 1024


@dataclass(slots=True)
class Request:
    """One request, and how many bytes of body were sent for it."""

    method: str
    path: str
    """As it was sent, query included."""
    headers: dict[str, str]
    """Names in lower case."""
    sent_bytes: int = 0

    @property
    def range(self) -> tuple[int, int] | None:
        """First and last byte asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2])) if match else None


Behaviour = Callable[["Handler"], bool]
"""Answers a request, or leaves that to the server by returning False."""


@dataclass
class Web:
    """A running server; leave its context to stop it."""

    files: Mapping[str, bytes] | Path
    behave: Behaviour | None = None
    delay_s: float = 0.0
    requests: list[Request] = field(default_factory=list)
    version: str = "1"
    """Part of every ETag."""

    def __enter__(self) -> Web:
        web = self

        class Bound(Handler):
            server_files = web

        self._server = _Server(("127.0.0.1", 0), Bound)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self._server.connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()

    def use_tls(self, context: ssl.SSLContext) -> None:
        """From now on."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        """Without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def sent_bytes(self) -> int:
        """Bytes of all bodies."""
        return sum(request.sent_bytes for request in self.requests)

    def content(self, path: str) -> memoryview | None:
        """What lies at a path."""
        name = unquote(urlsplit(path).path, errors="surrogateescape").lstrip("/")
        if not isinstance(self.files, Path):
            return memoryview(self.files[name]) if name in self.files else None
        place = self.files / name
        if not place.is_file():
            return None
        with place.open("rb") as file:
            size = place.stat().st_size
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b"")


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and a short body in one packet
    server_files: Web
    request_record: Request

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        web = self.server_files
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_record = Request(self.command, self.path, headers)
        web.requests.append(self.request_record)
        if web.delay_s:
            time.sleep(web.delay_s)
        if web.behave is None or not web.behave(self):
            self.send_content()

    def send_content(self, *, ranges: bool = True, etag: bool = True, modified: bool = True, **headers: str) -> None:
        """The usual answer: the file, a range of it, 404 or 416."""
        data = self.server_files.content(self.path)
        if data is None:
            self.send_whole(404, b"not here\n")
            return
        wanted = self.request_record.range if ranges else None
        if modified:
            headers["Last_Modified"] = email.utils.formatdate(MODIFIED_S, usegmt=True)
        if etag:
            digest = hashlib.md5(self.path.encode(), usedforsecurity=False).hexdigest()[:8]
            headers["ETag"] = f'"{digest}-{self.server_files.version}"'
        if wanted is None:
            self.send_whole(200, data, **headers)
        elif wanted[0] >= len(data):
            self.send_whole(416, b"", Content_Range=f"bytes */{len(data)}")
        else:
            first, last = wanted[0], min(wanted[1], len(data) - 1)
            content_range = f"bytes {first}-{last}/{len(data)}"
            self.send_whole(206, data[first : last + 1], **{"Content_Range": content_range, **headers})

    def send_whole(self, status: int, body: bytes | memoryview, **headers: str) -> None:
        """A status and a body; `_` in the names of headers stands for `-`."""
        self.send_head(status, **{"Content_Length": str(len(body)), **headers})
        if self.command != "HEAD":
            self.send_body(body)

    def send_head(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_body(self, body: bytes | memoryview) -> None:
        view = memoryview(body)
        for at in range(0, len(body), PIECE_BYTES):
            piece = view[at : at + PIECE_BYTES]
            self.wfile.write(piece)
            self.request_record.sent_bytes += len(piece)
        self.wfile.flush()

    def cut_off(self) -> None:
        """End the connection at once, with a reset."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def finish(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """To nobody."""


def first_requests(n: int, behave: Behaviour) -> Behaviour:
    """A behaviour towards the first `n` requests only."""
    counter = iter(range(n))

    def answer(handler: Handler) -> bool:
        return next(counter, None) is not None and behave(handler)

    return answer


@contextlib.contextmanager
def serving(
    files: Mapping[str, bytes] | Path, behave: Behaviour | None = None, *, delay_s: float = 0.0
) -> Iterator[Web]:
    """A server of these files."""
    with Web(files, behave, delay_s) as web:
        yield web
