"""A web server without sockets, whose answers are damaged. Shared by the suite and by scripts/fuzz.

Bytes go through http.client, urllib3 and requests as from a network, so that each of them gets to see the damage.
Checksums find damage in archives, whatever it is; in a directory only answers that contradict themselves or the
question can be found out, so that no others are given there.
"""

from __future__ import annotations

import io
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import fuzzing
from dafmount.source import http_client
from dafmount.source.http_settings import HttpSettings

HOST = "web.invalid"
SETTINGS = HttpSettings(timeout_s=30, retries=2, connections=1)

STATUSES = (100, 200, 204, 206, 301, 304, 403, 404, 416, 429, 500, 503, 999)
NUMBERS = (b"0", b"1", b"-1", b"16383", b"65536", b"4294967296", b"18446744073709551616", b"x", b"", b"9" * 40)
HEADERS = (
    b"Content-Encoding: gzip", b"Content-Encoding: br", b"Transfer-Encoding: chunked", b"Content-Length: 5",
    b"Content-Type: multipart/byteranges; boundary=x", b"Location: file:///etc/passwd", b"Location: /elsewhere",
    b"Retry-After: 0", b"Retry-After: 999999999", b"Retry-After: Fri, 31 Feb 2026 99:00:00 GMT", b'ETag: "other"',
    b"Content-Range: bytes */*", b"Content-Range: bytes 5-1/3", b"X: " + b"y" * 70_000, b"no header at all",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """Head lines, without their ends, and the body."""

    head: tuple[bytes, ...]
    body: bytes

    def raw(self) -> bytes:
        return b"\r\n".join([*self.head, b"", b""]) + self.body


class Web:
    """Files, and how likely an answer is damaged."""

    def __init__(self, files: Mapping[str, bytes], choose: random.Random, rate: float, *, is_checked: bool) -> None:
        self.files = files
        self.choose = choose
        self.rate = rate
        self.damages = [*_FOUND_OUT, *(_CHECKED if is_checked else ())]

    def answer(self, request: bytes) -> bytes:
        """All bytes that the server sends for a request."""
        answer = self._right(request)
        if self.choose.random() >= self.rate:
            return answer.raw()
        return self.choose.choice(self.damages)(answer, self.choose)

    def _right(self, request: bytes) -> Answer:
        path = request.split(b" ", 2)[1].decode().lstrip("/")
        data = self.files.get(path)
        if data is None:
            return Answer((b"HTTP/1.1 404 Not Found", b"Content-Length: 4"), b"none")
        common = (b'ETag: "1"', b"Last-Modified: Tue, 14 Nov 2023 22:13:20 GMT", b"Content-Type: x/y")
        match = re.search(rb"\r\nRange: bytes=(\d+)-(\d+)\r\n", request)
        if match is None:
            return Answer((b"HTTP/1.1 200 OK", b"Content-Length: %d" % len(data), *common), data)
        start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
        if start >= len(data):
            head = (b"HTTP/1.1 416 No", b"Content-Range: bytes */%d" % len(data), b"Content-Length: 0")
            return Answer(head, b"")
        told = b"Content-Range: bytes %d-%d/%d" % (start, stop - 1, len(data))
        length = b"Content-Length: %d" % (stop - start)
        return Answer((b"HTTP/1.1 206 Partial", told, length, *common), data[start:stop])


_Damage = Callable[[Answer, random.Random], bytes]


def _drop(answer: Answer, choose: random.Random) -> bytes:
    raw = answer.raw()
    return raw[: choose.randrange(len(raw))]


def _another_status(answer: Answer, choose: random.Random) -> bytes:
    status = choose.choice([status for status in STATUSES if status not in (200, 206)])
    return Answer((b"HTTP/1.1 %d Odd" % status, *answer.head[1:]), answer.body).raw()


def _another_etag(answer: Answer, choose: random.Random) -> bytes:
    return answer.raw().replace(b'ETag: "1"', b'ETag: "%d"' % choose.randrange(3))


def _another_start(answer: Answer, choose: random.Random) -> bytes:
    moved = choose.randrange(1, 5)
    return re.sub(rb"bytes (\d+)-", lambda match: b"bytes %d-" % (int(match[1]) + moved), answer.raw())


def _more_than_told(answer: Answer, choose: random.Random) -> bytes:
    return answer.raw() + choose.randbytes(choose.choice((1, 100, 100_000)))


def _an_encoding_it_does_not_have(answer: Answer, choose: random.Random) -> bytes:
    head = [line for line in answer.head if not line.startswith(b"Content-Length")]
    return Answer((*head, b"Content-Encoding: gzip"), answer.body).raw()


def _damaged_head(answer: Answer, choose: random.Random) -> bytes:
    return fuzzing.damaged(b"\r\n".join([*answer.head, b"", b""]), choose) + answer.body


def _damaged_body(answer: Answer, choose: random.Random) -> bytes:
    return Answer(answer.head, fuzzing.damaged(answer.body, choose)).raw()


def _another_number(answer: Answer, choose: random.Random) -> bytes:
    head = list(answer.head)
    at = choose.randrange(len(head))
    numbers = list(re.finditer(rb"\d+", head[at]))
    if numbers:
        match = choose.choice(numbers)
        head[at] = head[at][: match.start()] + choose.choice(NUMBERS) + head[at][match.end() :]
    return Answer(tuple(head), answer.body).raw()


def _another_header(answer: Answer, choose: random.Random) -> bytes:
    head = list(answer.head)
    at = choose.randrange(1, len(head))
    head[at : at + choose.randrange(2)] = [choose.choice(HEADERS)]
    if choose.random() < 0.3:
        head[0] = b"HTTP/1.1 %d Odd" % choose.choice(STATUSES)
    return Answer(tuple(head), answer.body).raw()


_FOUND_OUT: tuple[_Damage, ...] = (
    _drop, _another_status, _another_etag, _another_start, _more_than_told, _an_encoding_it_does_not_have,
)  # fmt: skip
_CHECKED: tuple[_Damage, ...] = (_damaged_head, _damaged_body, _another_number, _another_header)


class _Socket:
    """What http.client and urllib3 use of a socket."""

    def __init__(self, web: Web) -> None:
        self._web = web
        self._request = b""

    def sendall(self, data: bytes) -> None:
        self._request += data

    def makefile(self, *_: Any, **__: Any) -> io.BufferedIOBase:
        request, self._request = self._request, b""
        return io.BytesIO(self._web.answer(request))

    def settimeout(self, _: object) -> None: ...

    def setsockopt(self, *_: object) -> None: ...

    def shutdown(self, _: object) -> None: ...

    def close(self) -> None: ...


@contextmanager
def reached(web: Web) -> Iterator[None]:
    """Within, every URL leads to `web`, and nothing waits before it tries again."""

    class Connection(http_client._Connection):
        is_connected = False  # each request gets a socket of its own

        def _new_conn(self) -> Any:
            return _Socket(web)

    with mock.patch.object(http_client._Pool, "ConnectionCls", Connection), mock.patch.object(
        http_client, "_FIRST_DELAY_S", 0.0
    ):
        yield


def as_web_directory(seed: fuzzing.Seed) -> dict[str, bytes]:
    """The files of a data set below x.daf, with the metadata.json that a directory on a server needs."""
    descriptors: dict[str, object] = {
        path.removesuffix(".json"): json.loads(data)
        for path, data in seed.stored.items()
        if path.endswith(".json") and path != "daf.json"
    }
    for path in [path for path in seed.stored if path.startswith("axes/")]:
        n_entries = seed.stored[path].count(b"\n")
        descriptors[path.removesuffix(".txt")] = {"format": "axis", "n_entries": n_entries}
    files = {f"x.daf/{path}": data for path, data in seed.stored.items()}
    return {**files, "x.daf/metadata.json": json.dumps(descriptors).encode()}
