"""Files and directories on web servers.

Owns how a file is read over HTTP: ranges near each other by one request and others at the same time, the check that
every answer is of the same version of the file, servers that know no ranges, and what is kept on disk. Knows nothing of
ZIP or Daf, nor of sessions and retries, which are `http_client`'s. Threads may share all of it; no lock is held while
anything is fetched.

Facts: RFC 9110 (its section numbers are given).
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from dafmount.errors import Corrupt, ShortRead, SourceChanged, SourceUnavailable
from dafmount.source import ranges as planner
from dafmount.source.ahead import Ahead
from dafmount.source.base import ByteSource, Range, Stamp
from dafmount.source.fetchers import Fetchers, Task
from dafmount.source.http_cache import DiskCache
from dafmount.source.http_client import Answer, HttpClient, Passing, Place, Validators
from dafmount.source.http_settings import HttpSettings
from dafmount.source.http_url import Url
from dafmount.source.names import shown
from dafmount.source.spool import Spool
from dafmount.source.zip_entries import MemorySource

HEAD_BYTES = 16 * 1024
"""How much of a file is fetched to learn its size: small files are then here as a whole."""

MAX_REQUEST_BYTES = 8 << 20
"""Longer ranges are fetched by several requests."""

_FIRST_STEP_BYTES = 128 * 1024
_MAX_STEP_BYTES = 1 << 20
"""How much of an answer arrives until those who wait for its first part hear of it: little at first, then as much as
was there already, because waking threads for each bit that comes takes as long as copying it."""

_MEMORY_BYTES = 1 << 20
"""Files of servers without ranges are kept in memory up to this size, larger ones in the spool."""


class Version(NamedTuple):
    """What tells two states of a file apart."""

    total: int
    validators: Validators


class _NoRanges(Exception):
    """The server answers with the whole file, or with ranges that mean nothing."""


class HttpSite:
    """What all files of one mount share: connections, threads, the spool and the disk cache."""

    def __init__(self, url: Url, settings: HttpSettings, spool: Spool) -> None:
        """Asks nothing yet. Secrets of the settings are for the server of `url`; raises UsageError."""
        self.client = HttpClient(settings, url)
        self.settings = settings
        self.fetchers = Fetchers(settings.connections, settings.ahead_bytes)
        self.spool = spool
        self.spool_owner = object()
        self.has_changed = False
        """Whether an answer was of another version of a file than one before: nothing here is to be trusted then."""
        self.cache = None
        if settings.cache_directory is not None:
            self.cache = DiskCache(settings.cache_directory, settings.cache_directory_bytes)
        self._lock = threading.Lock()
        self._spooled: dict[tuple[str, Version], int] = {}
        self._versions: dict[str, Version] = {}
        # A site that was replaced by its next state goes when the last file opened from it is closed.
        self._end = weakref.finalize(self, _end, self.client, self.fetchers, spool, self.spool_owner)
        self._end.atexit = False

    def spool_number(self, url: Url, version: Version) -> int:
        """The spool's number of one version of a file."""
        with self._lock:
            return self._spooled.setdefault((url.requested, version), len(self._spooled))

    def first_version(self, url: Url, version: Version) -> Version:
        """The version of a file that was seen first, which is `version` if none was; also of files closed since then,
        because others may remember bytes of theirs."""
        with self._lock:
            return self._versions.setdefault(url.requested, version)

    def close(self) -> None:
        """Ends all requests and threads, and gives up what was spooled."""
        self._end()


def _end(client: HttpClient, fetchers: Fetchers, spool: Spool, spool_owner: object) -> None:
    client.close()
    fetchers.close()
    spool.forget(spool_owner)


class HttpFile:
    """A byte source over a file on a web server, as long as it is the one that was read first.

    Every answer tells the version it is of (8.8): ETag, Last-Modified and length must stay as in the first, else the
    read raises SourceChanged.
    """

    def __init__(
        self,
        site: HttpSite,
        url: Url,
        name: str,
        *,
        expected_size: int | None = None,
        parallel: int | None = None,
        is_all: bool = False,
    ) -> None:
        """Asks nothing yet. A size that is known already saves a request, and raises Corrupt if it is not the file's.

        `parallel` is the most requests at the same time for this file; None for all that the site may have. A file that
        is all that is read of its site closes that too.
        """
        self._site = site
        self._place = Place(url, shown(name), parallel)
        self._expected_size = expected_size
        self._is_all = is_all
        self._lock = threading.Lock()
        self._version: Version | None = None
        self._mtime_ns: int | None = None
        self._head = b""
        self._is_whole_only = False
        """Whether the server was seen to have no ranges."""
        self._whole: ByteSource | None = None
        self._download: Task[ByteSource] | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._place.name

    @property
    def size(self) -> int:
        """Length in bytes; asks the server once."""
        return self._known_version().total if self._expected_size is None else self._expected_size

    @property
    def known_size(self) -> int | None:
        """The length if it is known without asking."""
        if self._expected_size is not None:
            return self._expected_size
        return None if self._version is None else self._version.total

    @property
    def mtime_ns(self) -> int:
        """Last-Modified, else the present; nanoseconds since 1970."""
        self._known_version()
        return time.time_ns() if self._mtime_ns is None else self._mtime_ns

    @property
    def gap_bytes(self) -> int:
        """See ByteSource."""
        return self._site.settings.gap_bytes

    @property
    def fetchers(self) -> Fetchers:
        """The threads that fetch for it; that it has them says that it is far."""
        return self._site.fetchers

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead, SourceChanged, or what `HttpClient.get` raises."""
        return self.read_ranges([Range(offset, offset + length)])[0]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None unless the bytes are in memory or in the spool."""
        if offset >= 0 and offset + length <= len(self._head):
            return self._head[offset : offset + length]
        whole = self._whole
        return None if whole is None else whole.read_nowait(offset, length)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """Near ranges by one request, the others at the same time."""
        found: dict[int, bytes | memoryview] = {}
        missing: list[int] = []
        for position, (start, stop) in enumerate(ranges):
            self._check_bounds(start, stop)
            near = b"" if start == stop else self.read_nowait(start, stop - start)
            if near is None:
                missing.append(position)
            else:
                found[position] = near
        if missing:
            wanted = [ranges[position] for position in missing]
            for position, data in self._fetch_all(wanted).items():
                found[missing[position]] = data
        return [bytes(found[position]) for position in range(len(ranges))]

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        """See Filling; raises as `read` does."""
        self._check_bounds(offset, offset + len(buffer))
        near = self.read_nowait(offset, len(buffer))
        if near is None:
            self._fill(offset, buffer, arrived)
            return
        buffer[:] = near
        arrived(len(buffer))

    def stamp(self) -> Stamp:
        """The present state, asked anew; one that equals none where a change was seen. Raises NotFound and the like.

        Where the answer does not tell the file's length it is taken to be what it was.
        """
        if self._site.has_changed:
            return Stamp(("changed",), -1, 0)

        def ask(deadline: float) -> Stamp:
            with self._site.client.get(self._place, Range(0, 1), deadline) as answer:
                told, known = _told_length(answer), self._version
                if told is None and known is not None:
                    return _stamp(answer.validators, known.total, answer.mtime_ns)
                return _stamp_of(answer)

        return self._site.client.try_often(self.name, ask)

    @property
    def first_stamp(self) -> Stamp:
        """The state that is read, as `stamp` would have told it; may ask."""
        total, validators = self._known_version()
        return _stamp(validators, total, self._mtime_ns)

    def close(self) -> None:
        """Lets go of a copy of the whole."""
        with self._lock:
            whole, self._whole, self._download = self._whole, None, None
        if whole is not None:
            whole.close()
        if self._is_all:
            self._site.close()

    # Fetching.

    def _check_bounds(self, start: int, stop: int) -> None:
        known = self.known_size
        if start < 0 or stop < start or (known is not None and stop > known):
            raise ShortRead(f"{self.name}: asked for {stop - start} bytes at byte {start}, it has {known}")

    def _fetch_all(self, wanted: Sequence[Range]) -> dict[int, bytes | memoryview]:
        fetches = planner.join(wanted, gap_bytes=self.gap_bytes, max_bytes=MAX_REQUEST_BYTES)
        # All but the first may be fetched by other threads; what none has begun with is fetched here.
        tasks = [self.fetchers.submit(lambda r=fetch.range: self._fetch(r)) for fetch in fetches[1:]]  # type: ignore[misc]
        datas = [self._fetch(fetches[0].range), *(task.result() for task in tasks)]
        found: dict[int, bytes | memoryview] = {}
        for fetch, data in zip(fetches, datas, strict=True):
            if len(fetch.members) == 1 and len(data) == len(range(*wanted[fetch.members[0]])):
                found[fetch.members[0]] = data
            else:
                found.update(planner.cut(fetch, data, wanted))
        return found

    def _fetch(self, wanted: Range) -> memoryview:
        buffer = memoryview(bytearray(wanted.stop - wanted.start))
        self._fill(wanted.start, buffer, _nothing)
        return buffer

    def _fill(self, start: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        cache = self._site.cache
        key = self._cache_key() if cache is not None else None
        if cache is None or key is None:
            self._fill_from_server(start, buffer, arrived)
            return
        data = cache.get(key, Range(start, start + len(buffer)))
        if data is None:
            self._fill_from_server(start, buffer, arrived)
            cache.put(key, start, buffer)
        else:
            buffer[:] = data
            arrived(len(buffer))

    def _fill_from_server(self, start: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        stop = start + len(buffer)
        have = 0
        try:
            while have < len(buffer):
                if self._is_whole_only:
                    raise _NoRanges
                have = self._fill_more(start, buffer, have, arrived)
        except _NoRanges:
            whole = self._whole_file()
            if stop > whole.size:
                raise ShortRead(
                    f"{self.name}: asked for {len(buffer)} bytes at byte {start}, it has {whole.size}"
                ) from None
            buffer[:] = whole.read(start, len(buffer))
            arrived(len(buffer))

    def _fill_more(self, origin: int, buffer: memoryview, have: int, arrived: Callable[[int], None]) -> int:
        """How much of `buffer` is filled after one answer: at least a byte more. What came before a fault is kept."""

        def attempt(deadline: float) -> None:
            nonlocal have
            if have == len(buffer):
                return
            wanted = Range(origin + have, origin + len(buffer))
            with self._site.client.get(self._place, wanted, deadline) as answer:
                begin, stop = have, have + self._check(answer, wanted)
                while have < stop:
                    step = max(_FIRST_STEP_BYTES, min(_MAX_STEP_BYTES, have - begin))
                    n_bytes = answer.read_into(buffer[have : min(have + step, stop)])
                    if not n_bytes:
                        raise Passing(SourceUnavailable(f"{self.name}: the answer was cut short"))
                    have += n_bytes
                    arrived(have)

        self._site.client.try_often(self.name, attempt)
        return have

    def _check(self, answer: Answer, asked: Range) -> int:
        """How many bytes of the answer to use, which begin at `asked.start`.

        Raises SourceChanged, ShortRead, _NoRanges, or SourceUnavailable for an answer that is none to the question.
        """
        if answer.status == 416:
            if answer.total is None:
                raise _NoRanges
            self._check_total(answer.total)
            raise ShortRead(f"{self.name}: asked for byte {asked.start}, it has {answer.total}")
        if answer.status == 200:
            self._pin(None if answer.is_encoded else answer.length, answer)
            if asked.start == 0 and answer.length is not None and not answer.is_encoded and answer.length <= asked.stop:
                if answer.length < asked.stop and self._expected_size is None:
                    raise ShortRead(f"{self.name}: asked for {asked.stop} bytes, it has {answer.length}")
                return answer.length
            raise _NoRanges
        if answer.is_encoded or answer.is_multipart or answer.range is None or answer.total is None:
            raise _NoRanges
        self._pin(answer.total, answer)
        start, stop = answer.range
        if start != asked.start or stop > asked.stop or stop <= start:
            raise SourceUnavailable(
                f"{self.name}: the server answered bytes {start} to {stop}, asked for {asked.start} to {asked.stop}"
            )
        if answer.total < asked.stop:
            raise ShortRead(
                f"{self.name}: asked for {asked.stop - asked.start} bytes at byte {asked.start}, it has {answer.total}"
            )
        return stop - start

    def _pin(self, total: int | None, answer: Answer) -> None:
        """Remember the version of the first answer; raises SourceChanged for an answer of another one."""
        with self._lock:
            known = self._version
            if known is None and total is not None:
                version = Version(total, answer.validators)
                first = self._site.first_version(self._place.url, version)
                if first.total == total and _comparable(first.validators) == _comparable(answer.validators):
                    self._version = first
                    self._mtime_ns = answer.mtime_ns
                else:
                    known = first
        if known is None:
            if total is not None:
                self._check_expected(total)
            return
        if total is not None and total != known.total:
            raise self._changed(f"its length was {known.total} and is {total}")
        if _comparable(answer.validators) != _comparable(known.validators):
            raise self._changed("its ETag or Last-Modified is another")

    def _check_total(self, total: int) -> None:
        """Raises as `_pin` does, for an answer that tells the length and no validators, as 416 does (15.5.17)."""
        known = self._version
        if known is None:
            self._check_expected(total)
        elif total != known.total:
            raise self._changed(f"its length was {known.total} and is {total}")

    def _check_expected(self, total: int) -> None:
        if self._expected_size not in (None, total):
            raise Corrupt(
                f"{self.name}: the server has {total} bytes, metadata.json speaks of {self._expected_size}; "
                "one of them is out of date"
            )

    def _changed(self, how: str) -> SourceChanged:
        self._site.has_changed = True
        return SourceChanged(f"{self.name}: the file on the server changed since it was first read: {how}")

    # The version, by asking for the file's first bytes.

    def _known_version(self) -> Version:
        if self._version is None:
            self._ask()
        version = self._version
        if version is None:
            raise SourceUnavailable(f"{self.name}: the server does not tell the file's length")
        return version

    def _ask(self) -> None:
        def attempt(deadline: float) -> None:
            with self._site.client.get(self._place, Range(0, HEAD_BYTES), deadline) as answer:
                if answer.status == 416 or answer.is_encoded or answer.is_multipart:
                    raise _NoRanges
                if answer.status == 200:
                    self._is_whole_only = True
                    self._pin(answer.length, answer)
                    if answer.length is None:
                        raise _NoRanges
                    length = answer.length if answer.length <= HEAD_BYTES else 0
                else:
                    if answer.range is None or answer.total is None or answer.range.start:
                        raise _NoRanges
                    self._pin(answer.total, answer)
                    length = min(answer.range.stop, HEAD_BYTES)
                head = b"".join(_first(answer.pieces(), length))
                if len(head) < length:
                    raise Passing(SourceUnavailable(f"{self.name}: the answer was cut short"))
                self._head = head

        try:
            self._site.client.try_often(self.name, attempt)
        except _NoRanges:
            self._whole_file()

    # Servers without ranges.

    def _whole_file(self) -> ByteSource:
        """A copy of the file, downloaded once however many ask for it."""
        self._is_whole_only = True
        with self._lock:
            if self._whole is not None:
                return self._whole
            task = self._download
            if task is None:
                task = self._download = Task(lambda: self._site.client.try_often(self.name, self._download_whole))
        try:
            whole = task.result()
        except BaseException:
            with self._lock:
                if self._download is task:
                    self._download = None
            raise
        with self._lock:
            if self._download is task:
                self._whole, self._download = whole, None
        return whole

    def _download_whole(self, deadline: float) -> ByteSource:
        version = self._version
        if version is not None:
            spooled = self._site.spool.get((self._site.spool_owner, self._spool_number(version)), name=self.name)
            if spooled is not None:
                return spooled
        with self._site.client.get(self._place, None, deadline) as answer:
            if answer.status != 200:
                raise SourceUnavailable(f"{self.name}: the server answered {answer.status}, asked for the whole file")
            size = None if answer.is_encoded else answer.length
            self._pin(size, answer)
            whole = self._keep(answer, size)
            self._pin(whole.size, answer)
        return whole

    def _keep(self, answer: Answer, size: int | None) -> ByteSource:
        pieces = answer.decoded() if answer.is_encoded else answer.pieces(is_stream=True)
        if size is not None:
            pieces = self._exactly(pieces, size)
        first: list[bytes] = []
        n_first = 0
        for piece in pieces:
            first.append(piece)
            n_first += len(piece)
            if n_first > _MEMORY_BYTES:
                break
        else:
            return MemorySource(self.name, b"".join(first))
        self._site.client.complain_once(
            "ranges",
            f"{self.name}: the server sends no ranges of files, which are therefore read as a whole into the spool",
        )
        rest = _chained(first, pieces)
        number = self._spool_number(Version(-1 if size is None else size, answer.validators))
        if size is None:
            return self._site.spool.put_stream((self._site.spool_owner, number), rest, name=self.name)
        return self._site.spool.put((self._site.spool_owner, number), size, rest, name=self.name)

    def _exactly(self, pieces: Iterator[bytes], size: int) -> Iterator[bytes]:
        left = size
        for piece in pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                return
        if left:
            raise Passing(SourceUnavailable(f"{self.name}: the answer was cut short"))

    def _spool_number(self, version: Version) -> int:
        return self._site.spool_number(self._place.url, version)

    def _cache_key(self) -> str | None:
        """What stands for this version of the file on disk, None where no validator tells versions apart (8.8.1)."""
        total, (etag, last_modified) = self._known_version()
        if not etag and not last_modified:
            return None
        if etag.startswith("W/") and not last_modified:
            return None
        # The query may be a signature that differs each time; without an ETag it may be what names the file.
        url = self._place.url.shown if etag else self._place.url.requested
        text = "\0".join([url, etag, last_modified, str(total)])
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class HttpDirectory:
    """A directory on a web server, which cannot be listed: files are opened by their names."""

    def __init__(self, site: HttpSite, url: Url) -> None:
        self._site = site
        self._url = url
        self._name = url.shown.rstrip("/")

    @property
    def name(self) -> str:
        """The URL without secrets."""
        return self._name

    def open(self, path: str, expected_size: int | None = None) -> Ahead:
        """A file; asks nothing yet."""
        parallel = max(1, self._site.settings.connections - 2)  # a server that hangs for one file serves others
        file = HttpFile(
            self._site, self._url.below(path), self._called(path), expected_size=expected_size, parallel=parallel
        )
        return Ahead(file, self._site.fetchers)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """The whole of a file, by one request; raises NotFound, and Corrupt where it is larger than `limit_bytes`."""
        return self.fetch(path, limit_bytes)[0]

    def fetch(self, path: str, limit_bytes: int) -> tuple[bytes, Stamp | None]:
        """As `read_small`, with the state that `stamp` would have told; None where that may tell another."""
        place = Place(self._url.below(path), self._called(path), None)

        def attempt(deadline: float) -> tuple[bytes, Stamp | None]:
            with self._site.client.get(place, None, deadline) as answer:
                if answer.status != 200:
                    raise SourceUnavailable(f"{place.name}: the server answered {answer.status}")
                data = bytearray()
                for piece in answer.decoded() if answer.is_encoded else answer.pieces():
                    data += piece
                    if len(data) > limit_bytes:
                        raise Corrupt(f"{place.name}: more than {limit_bytes} bytes, expected at most so many")
                if not answer.is_encoded and answer.length is not None and len(data) < answer.length:
                    raise Passing(SourceUnavailable(f"{place.name}: the answer was cut short"))
                return bytes(data), None if answer.is_encoded else _stamp_of(answer)

        return self._site.client.try_often(place.name, attempt)

    def stamp(self, path: str) -> Stamp:
        """The present state of a file, asked anew."""
        return HttpFile(self._site, self._url.below(path), self._called(path)).stamp()

    def close(self) -> None:
        """Ends everything that is under way."""
        self._site.close()

    def _called(self, path: str) -> str:
        return shown(f"{self._name}/{path}")


def _nothing(n_bytes: int) -> None:
    """Nobody waits for a part of it."""


def _stamp_of(answer: Answer) -> Stamp:
    """The state of a file according to a successful answer, with a range or without."""
    total = _told_length(answer)
    return _stamp(answer.validators, -1 if total is None else total, answer.mtime_ns)


def _told_length(answer: Answer) -> int | None:
    """The file's length according to an answer; None where it tells none, or that of an encoding (8.4)."""
    if answer.is_encoded:
        return None
    return answer.length if answer.status == 200 else answer.total


def _stamp(validators: Validators, total: int, mtime_ns: int | None) -> Stamp:
    # A file that grew is another one: nobody appends over HTTP.
    return Stamp((*_comparable(validators), total), total, mtime_ns or 0)


def _comparable(validators: Validators) -> Validators:
    """ETags compare weakly (8.8.3.2): proxies that compress make strong ones weak."""
    return validators._replace(etag=validators.etag.removeprefix("W/"))


def _first(pieces: Iterator[bytes], length: int) -> Iterator[bytes]:
    if length:
        for piece in pieces:
            yield piece[:length]
            length -= len(piece)
            if length <= 0:
                return


def _chained(first: list[bytes], rest: Iterator[bytes]) -> Iterator[bytes]:
    yield from first
    first.clear()
    yield from rest
