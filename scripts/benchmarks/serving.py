"""A web server that answers ranges after a delay and counts: `python -m benchmarks.serving DIRECTORY DELAY_S RATE`.

All its connections together send no more than RATE bytes a second, as over a network of that speed; 0: as they can.

It prints its URL, serves until its standard input ends, and tells at /-/counts what was asked for since the last time.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import unquote

COUNTS = "/-/counts"
SLICE_BYTES = 256 * 1024
"""What one connection sends before it is another's turn, where they share a rate."""

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class Counts(NamedTuple):
    """Requests, and bytes of bodies sent."""

    n_requests: int
    n_bytes: int


class Server(NamedTuple):
    """A server that runs in a process of its own."""

    url: str

    def counts(self) -> Counts:
        """Since the last time."""
        with urllib.request.urlopen(self.url + COUNTS) as answer:
            return Counts(*json.load(answer))


@contextmanager
def serving(directory: Path, delay_s: float, bytes_per_s: float = 0.0) -> Iterator[Server]:
    """Serve the files of a directory."""
    command = [sys.executable, "-m", "benchmarks.serving", str(directory), str(delay_s), str(bytes_per_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(process.stdout.readline().strip())
        finally:
            process.stdin.close()


class _Link:
    """What all connections share."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0

    def wait_to_send(self, wanted: int) -> int:
        """How many of the bytes wanted may be sent, once those before have gone over it."""
        if not self._bytes_per_s:
            return wanted
        n_bytes = min(wanted, SLICE_BYTES)
        with self._lock:
            # It lags behind by no more than a packet or two in a switch would.
            self._free_s = max(self._free_s, time.monotonic() - SLICE_BYTES / self._bytes_per_s)
            self._free_s += n_bytes / self._bytes_per_s
            free_s = self._free_s
        time.sleep(max(0.0, free_s - time.monotonic()))
        return n_bytes


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    directory: Path
    delay_s: float
    link: _Link
    lock = threading.Lock()
    counted: ClassVar = [0, 0]

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        if self.path == COUNTS:
            with self.lock:
                counts, self.counted[:] = list(self.counted), [0, 0]
            self._send_head(200, len(body := json.dumps(counts).encode()))
            self.wfile.write(body)
            return
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        time.sleep(self.delay_s)
        path = self.directory / unquote(self.path).lstrip("/")
        if not path.is_file():
            self._count(0)
            self._send_head(404, 0)
            return
        size = path.stat().st_size
        start, stop = self._wanted(size)
        is_part = (start, stop) != (0, size) or "range" in self.headers
        extra = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"} if is_part else {}
        self._count(stop - start if has_body else 0)
        self._send_head(206 if is_part else 200, stop - start, extra | {"ETag": f'"{path.stat().st_mtime_ns}"'})
        if has_body:
            self.wfile.flush()
            with path.open("rb") as stream:
                while start < stop:
                    length = self.link.wait_to_send(stop - start)
                    start += os.sendfile(self.connection.fileno(), stream.fileno(), start, length)

    def _wanted(self, size: int) -> tuple[int, int]:
        match = _RANGE.fullmatch(self.headers.get("range", ""))
        if match is None:
            return 0, size
        if not match[1]:
            return max(0, size - int(match[2])), size
        return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size

    def _send_head(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Accept-Ranges", "bytes")
        for name, value in (extra or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def _count(self, n_bytes: int) -> None:
        with self.lock:
            self.counted[0] += 1
            self.counted[1] += n_bytes

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def _main(directory: str, delay_s: str, bytes_per_s: str) -> None:
    _Handler.directory, _Handler.delay_s, _Handler.link = Path(directory), float(delay_s), _Link(float(bytes_per_s))
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
