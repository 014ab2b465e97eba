"""A far source of which some ranges were fetched together, because they will be asked for one by one.

Owns those ranges, bounded by their bytes. Knows nothing of ZIP or HTTP. Threads may share it; its lock is never held
while anything is fetched.
"""

from __future__ import annotations

import bisect
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from dafmount.source.base import ByteSource, Range, Stamp
from dafmount.source.fetchers import Fetchers


class FarSource(ByteSource, Protocol):
    """What `Warm` stands in front of."""

    @property
    def fetchers(self) -> Fetchers: ...

    def stamp(self) -> Stamp: ...

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None: ...


class Warm:
    """A byte source that answers from what `warm` fetched, and else from `source`."""

    def __init__(self, source: FarSource, limit_bytes: int) -> None:
        """Keeps at most `limit_bytes`, those fetched last."""
        self._source = source
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._blocks: dict[int, bytes] = {}
        self._oldest_first: deque[int] = deque()
        self._kept_bytes = 0

    @property
    def name(self) -> str:
        """The source's."""
        return self._source.name

    @property
    def size(self) -> int:
        """The source's."""
        return self._source.size

    @property
    def gap_bytes(self) -> int:
        """The source's."""
        return self._source.gap_bytes

    @property
    def fetchers(self) -> Fetchers:
        """The source's."""
        return self._source.fetchers

    def warm(self, ranges: Sequence[Range]) -> None:
        """Fetch those ranges that are not here, at the same time; no more of them than are kept."""
        wanted, n_bytes = [], 0
        for start, stop in sorted(set(ranges)):
            n_bytes += stop - start
            if n_bytes > self._limit_bytes:
                break
            if self._kept(start, stop - start) is None:
                wanted.append(Range(start, stop))
        for (start, _), data in zip(wanted, self._source.read_ranges(wanted), strict=True):
            self._keep(start, data)

    def read(self, offset: int, length: int) -> bytes:
        """See ByteSource."""
        kept = self._kept(offset, length)
        return self._source.read(offset, length) if kept is None else kept

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """See ByteSource."""
        kept = self._kept(offset, length)
        return self._source.read_nowait(offset, length) if kept is None else kept

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        """See Filling."""
        kept = self._kept(offset, len(buffer))
        if kept is None:
            self._source.read_into(offset, buffer, arrived)
            return
        buffer[:] = kept
        arrived(len(buffer))

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """See ByteSource."""
        return self._source.read_ranges(ranges)

    def stamp(self) -> Stamp:
        """The source's."""
        return self._source.stamp()

    def close(self) -> None:
        """Closes the source."""
        self._source.close()

    def _kept(self, offset: int, length: int) -> bytes | None:
        if not self._starts:
            return None
        with self._lock:
            at = bisect.bisect_right(self._starts, offset) - 1
            if at < 0:
                return None
            start = self._starts[at]
            block = self._blocks[start]
        return block[offset - start : offset - start + length] if offset + length <= start + len(block) else None

    def _keep(self, start: int, data: bytes) -> None:
        with self._lock:
            if start in self._blocks:
                return
            bisect.insort(self._starts, start)
            self._blocks[start] = data
            self._oldest_first.append(start)
            self._kept_bytes += len(data)
            while self._kept_bytes > self._limit_bytes:
                oldest = self._oldest_first.popleft()
                self._kept_bytes -= len(self._blocks.pop(oldest))
                self._starts.remove(oldest)
