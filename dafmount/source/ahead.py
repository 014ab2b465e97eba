"""Sequential reading of a far source: noticed, and fetched ahead in growing steps.

Owns which reads follow one another and the bytes that have arrived but were not read. Knows nothing of where they come
from. Threads may share both classes; no lock is held while anything is fetched.
"""

from __future__ import annotations

import bisect
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from dafmount.errors import ShortRead
from dafmount.source.base import ByteSource, Range
from dafmount.source.fetchers import Fetchers, Task
from dafmount.source.names import shown

MAX_WINDOW_BYTES = 32 << 20
"""The farthest that a single reader is fetched ahead."""

MAX_PIECE_BYTES = 4 << 20
"""The most that is fetched by one request of several at the same time."""

MIN_PIECE_BYTES = 256 << 10

GROWTH = 3
"""Bytes fetched ahead for each that was read: four steps, each as long as the server takes to answer, from the first
request to the longest window. What a reader leaves who stops is no more than this."""

_OUT_OF_ORDER_BYTES = 64 << 10
"""The kernel's own reading ahead comes in requests at least this long, which may overtake each other."""

_MAX_STREAMS = 8
_PAGE_BYTES = 4096
_NO_STOP = 1 << 63


class _Stream:
    """A reader that goes forward."""

    __slots__ = ("declined", "first", "planned", "position", "start")

    def __init__(self, start: int, position: int) -> None:
        self.start = start
        self.first = position
        self.position = position
        self.planned = position
        self.declined = -1


class Streams:
    """Tells sequential from random reads. Not for several threads at once."""

    def __init__(self, max_window_bytes: int = MAX_WINDOW_BYTES, record_bytes: int = 0) -> None:
        """A reader of what consists of records is not taken to go beyond one before it has done so once; 0: of none."""
        self._max_window_bytes = max_window_bytes
        self._record_bytes = record_bytes
        self._streams: OrderedDict[_Stream, None] = OrderedDict()

    def note(self, offset: int, length: int, size: int, start: int | None = None) -> Range | None:
        """What to fetch ahead after a read that lies within `size`: nothing unless it continues another one.

        The window is `GROWTH` times as long as what was read in one go so far, up to the limit. It is renewed when
        half of it is used, so that requests are long. Noting the same read twice changes nothing. `start` is where a
        read really begins that the kernel let begin earlier.
        """
        stop = offset + length
        stream = self._stream_of(offset, length)
        if stream is None:
            self._streams[_Stream(offset if start is None else start, stop)] = None
            while len(self._streams) > _MAX_STREAMS:
                self._streams.popitem(last=False)
            return None
        self._streams.move_to_end(stream)
        stream.position = max(stream.position, stop)
        if stream.position == stream.first:
            return None
        stream.planned = max(stream.planned, stream.position)
        window = min(self._max_window_bytes, GROWTH * (stream.position - stream.start))
        if stream.planned - stream.position > window // 2:
            return None
        wanted = Range(stream.planned, min(stream.position + window, size, self._record_stop(stream)))
        if wanted.start >= wanted.stop:
            return None
        stream.planned = wanted.stop
        return wanted

    def record_stop(self, offset: int) -> int | None:
        """Where the record ends that a reader who has come to `offset` has not left yet; None where there is none."""
        for stream in reversed(self._streams):
            if offset in (stream.position, stream.declined):
                stop = self._record_stop(stream)
                return stop if stop < _NO_STOP else None
        return None

    def decline(self, offset: int, length: int) -> None:
        """A read of one that has come to `offset` was not answered; the next may be beyond it all the same."""
        for stream in self._streams:
            if offset in (stream.position, stream.declined):
                stream.declined = offset + length

    def _record_stop(self, stream: _Stream) -> int:
        """Where the record ends that all reads of a stream were in; they may begin and end with a page of others."""
        if not self._record_bytes:
            return _NO_STOP
        stop = ((stream.start + _PAGE_BYTES - 1) // self._record_bytes + 1) * self._record_bytes
        return stop if stream.position < stop + _PAGE_BYTES else _NO_STOP

    def _stream_of(self, offset: int, length: int) -> _Stream | None:
        slack = length if length >= _OUT_OF_ORDER_BYTES else 0
        for stream in reversed(self._streams):
            is_next = stream.position <= offset <= stream.position + slack
            is_latest = offset + length == stream.position and offset >= stream.start
            was_overtaken = slack > 0 and stream.start <= offset < stream.position <= offset + 3 * slack
            if is_next or is_latest or was_overtaken:
                return stream
        return None


class _Arriving:
    """Bytes that are being read from a source, of which the first may be used before the last are here."""

    __slots__ = ("_changed", "_is_over", "_n_bytes", "_view", "n_arrived", "task")

    def __init__(self, n_bytes: int) -> None:
        self._n_bytes = n_bytes
        self.n_arrived = 0
        self.task: Task[None]
        """Fills it; set by whoever makes one."""
        self._view = memoryview(b"")
        self._changed = threading.Condition()
        self._is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether all of them are here."""
        return self.n_arrived == self._n_bytes

    def fill(self, source: ByteSource, start: int) -> None:
        """Read all of them, once."""
        try:
            read_into: Callable[[int, memoryview, Callable[[int], None]], None] | None
            read_into = getattr(source, "read_into", None)
            if read_into is None:
                self.set(source.read(start, self._n_bytes))
                return
            # Unlike a bytearray it is not set to zero, which would hold up all other threads.
            self._view = np.empty(self._n_bytes, np.uint8).data
            read_into(start, self._view, self._note)
            self._view = self._view.toreadonly()
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def set(self, data: bytes) -> None:
        """They are here already."""
        self._view = memoryview(data)
        self._note(len(data))

    def wait_for(self, n_bytes: int) -> memoryview:
        """The first `n_bytes` and perhaps more; raises what reading them raised. May do the reading."""
        if self.n_arrived < n_bytes:
            if n_bytes == self._n_bytes:
                self.task.run()
            elif not self.task.has_begun:
                # All fetchers are busy, and doing it here would take until the last byte has come.
                threading.Thread(target=self.task.run, name="fetcher", daemon=True).start()
            with self._changed:
                while self.n_arrived < n_bytes and not self._is_over:
                    self._changed.wait()
            if self.n_arrived < n_bytes:
                self.task.result()
        return self._view

    def _note(self, n_bytes: int) -> None:
        with self._changed:
            self.n_arrived = n_bytes
            self._changed.notify_all()


class _Segment:
    """Bytes on their way, or here and not all read."""

    __slots__ = ("arriving", "is_held", "n_served", "start", "stop")

    def __init__(self, start: int, stop: int) -> None:
        self.start = start
        self.stop = stop
        self.n_served = 0
        self.is_held = False
        """Whether its bytes count as held, so that they are given up when the room is needed."""
        self.arriving: _Arriving | None = None
        """None once it was given up."""

    @property
    def is_done(self) -> bool:
        arriving = self.arriving
        return arriving is not None and arriving.task.is_done

    def give_up(self) -> None:
        self.arriving = None


class Ahead:
    """A byte source that fetches from `source` what its reads need, once, and what sequential reads will need."""

    def __init__(self, source: ByteSource, fetchers: Fetchers, *, is_sequential: bool = True) -> None:
        """With `is_sequential` false nothing but what `prefetch` is told is fetched ahead."""
        self._source = source
        self.fetchers = fetchers
        self._streams = Streams(min(MAX_WINDOW_BYTES, fetchers.limit_bytes // 2)) if is_sequential else None
        self._lock = threading.Lock()
        self._segments: list[_Segment] = []
        self._keeps_what_was_read = False

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def size(self) -> int:
        """The source's; may have to ask."""
        return self._source.size

    @property
    def gap_bytes(self) -> int:
        """The source's."""
        return self._source.gap_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises what the source raises."""
        return bytes(self.view(offset, length))

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but where the bytes are not here it begins to fetch them and returns None."""
        view = self.view_nowait(offset, length)
        return None if view is None else bytes(view)

    def view(self, offset: int, length: int) -> bytes | memoryview:
        """As `read`, without a copy where there need be none."""
        if not length:
            return self._source.read(offset, 0)
        self._begin(offset, length, self.size)
        return self._collect(Range(offset, offset + length))

    def view_nowait(self, offset: int, length: int) -> bytes | memoryview | None:
        """As `read_nowait`, without a copy where there need be none."""
        if not length:
            return b""
        near = self._source.read_nowait(offset, length)
        if near is not None:
            return near
        if self._streams is not None:
            size = known_size(self._source)
            if size is None:
                return None
            self._begin(offset, length, size)
        return self._view_here(offset, length)

    def read_here(self, offset: int, length: int) -> bytes | None:
        """The bytes if they have arrived; begins nothing."""
        view = self._view_here(offset, length)
        return None if view is None else bytes(view)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """All at the same time, nothing ahead; what is here or on its way is not fetched again."""
        for wanted in ranges:
            self._fetch(wanted, max(MAX_PIECE_BYTES, wanted.stop - wanted.start), is_needed=True)
        return [bytes(self._collect(wanted)) for wanted in ranges]

    def read_anew(self, wanted: Range) -> bytes:
        """A range by one request, though parts of it may be here."""
        return self._source.read(wanted.start, wanted.stop - wanted.start)

    def prefetch(self, wanted: Range, *, is_needed: bool) -> None:
        """Begins to fetch a range by one request; unless `is_needed`, only if there is room for it."""
        self._fetch(wanted, wanted.stop - wanted.start, is_needed=is_needed)

    def keep_what_was_read(self) -> None:
        """From now on bytes that were read stay here as long as there is room: for readers that come back to them."""
        self._keeps_what_was_read = True

    def seed(self, start: int, data: bytes) -> None:
        """Bytes that are here already."""
        segment = _Segment(start, start + len(data))
        segment.is_held = bool(data) and self.fetchers.hold(segment, len(data))
        if segment.is_held:
            arriving = _Arriving(len(data))
            arriving.task = Task(lambda: arriving.set(data))
            arriving.task.run()
            with self._lock:
                bisect.insort(self._segments, segment, key=_start)
                segment.arriving = arriving

    def close(self) -> None:
        """Lets go of what was fetched, and of the source."""
        with self._lock:
            segments, self._segments = self._segments, []
        for segment in segments:
            self.fetchers.let_go(segment)
        self._source.close()

    def _begin(self, offset: int, length: int, size: int) -> None:
        """Fetch what a read needs, then what those after it will."""
        stop = offset + length
        if offset < 0 or length < 0 or stop > size:
            raise ShortRead(f"{shown(self.name)}: asked for {length} bytes at byte {offset}, it has {size}")
        ahead = None
        if self._streams is not None:
            with self._lock:
                ahead = self._streams.note(offset, length, size)
        self._fetch(Range(offset, stop), max(length, MAX_PIECE_BYTES), is_needed=True)
        if ahead is not None:
            self._fetch(ahead, piece_bytes(ahead, self.fetchers), is_needed=False)

    def _view_here(self, offset: int, length: int) -> bytes | memoryview | None:
        found: list[tuple[_Segment, _Arriving]] = []
        position, stop = offset, offset + length
        while position < stop:
            with self._lock:
                segment, arriving = self._find(position)
            if segment is None or arriving is None:
                return None
            if arriving.n_arrived < min(stop, segment.stop) - segment.start:
                return None
            found.append((segment, arriving))
            position = segment.stop
        parts: list[memoryview] = []
        position = offset
        for segment, arriving in found:
            parts.append(self._part(segment, arriving, position, stop))
            position = segment.stop
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fetch(self, wanted: Range, piece_bytes: int, *, is_needed: bool) -> None:
        """Begin to fetch those parts of a range that are neither here nor on their way."""
        for missing in self._missing(wanted):
            start = missing.start
            while start < missing.stop:
                stop = min(start + piece_bytes, missing.stop)
                segment = _Segment(start, stop)
                segment.is_held = self.fetchers.hold(segment, stop - start)
                if not segment.is_held and not is_needed:
                    return
                self._add(segment)
                start = stop

    def _missing(self, wanted: Range) -> list[Range]:
        missing = []
        position = wanted.start
        with self._lock:
            while position < wanted.stop:
                segment, arriving = self._find(position)
                if segment is not None and arriving is not None and arriving.task.has_failed:
                    self._segments.remove(segment)  # whoever read it was told; whoever comes now may be luckier
                    self.fetchers.let_go(segment)
                    continue
                if segment is not None:
                    position = segment.stop
                    continue
                at = bisect.bisect_right(self._segments, position, key=_start)
                stop = min(wanted.stop, self._segments[at].start) if at < len(self._segments) else wanted.stop
                missing.append(Range(position, stop))
                position = stop
        return missing

    def _add(self, segment: _Segment) -> None:
        arriving = _Arriving(segment.stop - segment.start)
        with self._lock:
            arriving.task = self.fetchers.submit(lambda: arriving.fill(self._source, segment.start))
            segment.arriving = arriving
            bisect.insort(self._segments, segment, key=_start)

    def _collect(self, wanted: Range) -> bytes | memoryview:
        parts = []
        position = wanted.start
        while position < wanted.stop:
            segment, arriving = self._segment_at(position, wanted.stop)
            part = self._part(segment, arriving, position, wanted.stop)
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _segment_at(self, position: int, stop: int) -> tuple[_Segment, _Arriving]:
        while True:
            with self._lock:
                segment, arriving = self._find(position)
            if segment is not None and arriving is not None:
                return segment, arriving
            self._fetch(Range(position, stop), stop - position, is_needed=True)

    def _part(self, segment: _Segment, arriving: _Arriving, position: int, stop: int) -> memoryview:
        """The bytes of a segment from `position` to `stop` or its end; waits for them."""
        stop = min(stop, segment.stop)
        try:
            part = arriving.wait_for(stop - segment.start)[position - segment.start : stop - segment.start]
        except BaseException:
            self._drop(segment)
            raise
        with self._lock:
            segment.n_served += len(part)
            is_used_up = arriving.is_complete and segment.n_served >= segment.stop - segment.start
            is_used_up &= not (segment.is_held and self._keeps_what_was_read)
        if is_used_up:
            self._drop(segment)
        return part

    def _find(self, position: int) -> tuple[_Segment | None, _Arriving | None]:
        """The segment that holds a position, and its bytes; those that were given up are taken out. Needs the lock."""
        segments = self._segments
        at = bisect.bisect_right(segments, position, key=_start) - 1
        while at >= 0:
            segment, arriving = segments[at], segments[at].arriving
            if arriving is not None:
                return (segment, arriving) if position < segment.stop else (None, None)
            del segments[at]
            at -= 1
        return None, None

    def _drop(self, segment: _Segment) -> None:
        with self._lock:
            if segment in self._segments:
                self._segments.remove(segment)
        self.fetchers.let_go(segment)


def piece_bytes(ahead: Range, fetchers: Fetchers) -> int:
    """How much of what is fetched ahead to ask for by one request: all of a window, of which this is half or more, is
    under way at the same time."""
    return max(MIN_PIECE_BYTES, min(MAX_PIECE_BYTES, 2 * (ahead.stop - ahead.start) // fetchers.n_threads))


def known_size(source: ByteSource) -> int | None:
    """The size of a source if it need not be asked for."""
    if hasattr(source, "known_size"):
        size: int | None = source.known_size
        return size
    return source.size


def _start(segment: _Segment) -> int:
    return segment.start
