"""Packed components of a far source: what a read needs is fetched at once, and what will be read next before it is.

Owns when a reader of flat bytes is taken to go on, and turns that into chunks to fetch. Decoding and caching are those
of the contents it wraps. Must not know FUSE or HTTP. Threads may share it; no lock is held while anything is fetched.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dafmount.shard.grid import Grid
from dafmount.source.ahead import MAX_PIECE_BYTES, MAX_WINDOW_BYTES, Ahead, Streams, piece_bytes
from dafmount.source.fetchers import Fetchers, Task
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import ShardSpec
from dafmount.tree.content import Content, PackedNumbers, PackedText, ReadAheadDeclined
from dafmount.tree.index_chunks import IndexedShardReader

COLUMN_READ_BYTES = 128 * 1024
"""The kernel cuts reads to this length: one as long that begins with a column is taken for the whole column's."""

MIN_DECLINED_BYTES = 64 * 1024
"""What the kernel reads ahead is at least as long where it reads ahead at all."""

MAX_COLUMN_BYTES = 4 << 20
"""Longer columns are fetched step by step, as any sequential reading."""

_PAGE_BYTES = 4096
_MAX_PLANS = 32



def far_content(source: Ahead, grid: Grid, spec: ShardSpec, cache: ChunkCache, number: int) -> Content:
    """The flat bytes of a packed component, given its shard; closing them closes `source`."""
    # Chunks are read twice: by requests that begin or end within one, and by different ways of decoding them.
    source.keep_what_was_read()
    reader = IndexedShardReader(source, grid, spec, source.name)
    if spec.itemsize is None:
        return PackedText(grid, reader, cache, number)
    numbers = PackedNumbers(grid, reader, cache, number, block_bytes=_block_chunks(grid) * grid.chunk_bytes)
    return FarNumbers(numbers, grid, reader, source.fetchers)


def _block_chunks(grid: Grid) -> int:
    """Chunks decoded together in sequential reading: not more than a request of the kernel's, none of the next column.

    Where bytes are near a block may reach beyond what a reader asked for.
    """
    if len(grid.shape) > 1 and grid.shape[0] * grid.itemsize % _PAGE_BYTES:
        return 1  # a page holds the end of a column and the beginning of the next
    n_rows = grid.grid_shape[0]
    most = max(1, COLUMN_READ_BYTES // max(1, grid.chunk_bytes))
    return max((n for n in range(1, most + 1) if n_rows % n == 0), default=1)


class FarFile:
    """A file of a far source as it is, handed out without copies."""

    def __init__(self, source: Ahead) -> None:
        self._source = source

    @property
    def size(self) -> int:
        """Length in bytes; may have to ask."""
        return self._source.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes at `offset`."""
        return self._source.view(offset, length)

    def read_nowait(self, offset: int, length: int) -> bytes | memoryview | None:
        """As `read`, but where the bytes are not here it begins to fetch them and returns None."""
        return self._source.view_nowait(offset, length)

    def close(self) -> None:
        """Let go of the source."""
        self._source.close()


class _Plan(NamedTuple):
    """Flat bytes whose chunks are being asked for; done once all requests for them are under way."""

    start: int
    stop: int
    task: Task[None]


class FarNumbers:
    """A packed numeric component of a far source as its flat bytes."""

    def __init__(self, numbers: PackedNumbers, grid: Grid, reader: IndexedShardReader, fetchers: Fetchers) -> None:
        self._numbers = numbers
        self._grid = grid
        self._reader = reader
        self._fetchers = fetchers
        self._column_bytes = grid.shape[0] * grid.itemsize if len(grid.shape) > 1 else 0
        self._lock = threading.Lock()
        self._streams = Streams(min(MAX_WINDOW_BYTES, fetchers.limit_bytes // 2), self._column_bytes)
        self._plans: deque[_Plan] = deque(maxlen=_MAX_PLANS)

    @property
    def size(self) -> int:
        """Length in bytes, from the shape alone."""
        return self._numbers.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes at `offset`."""
        if not self._is_planned(offset, length):
            self._plan_needed(offset, length)
        self._go_ahead(offset, length)
        self._wait_for_plans(offset, offset + length)
        return self._numbers.read(offset, length)

    def read_nowait(self, offset: int, length: int) -> bytes | memoryview | None:
        """As `read`, but where bytes are not here it begins to fetch them and returns None.

        Raises ReadAheadDeclined where a reader of one column has come to its end and the next one is not here: after
        each column the kernel reads ahead as much as a fourth of it, which would be fetched for nobody. Should the
        reader go on, the kernel asks again, page by page, which shows that it does. So it does too where somebody looks
        at the first element of a column in a mapped file, and the kernel wants as much before it as after it.
        """
        data = self._numbers.read_nowait(offset, length)
        if data is None and not self._is_planned(offset, length):
            if self._is_beyond_column(offset, length):
                raise ReadAheadDeclined
            self._plan_needed(offset, length)
            if self._is_around_column(offset, length):
                raise ReadAheadDeclined
        self._go_ahead(offset, length)
        return data

    def close(self) -> None:
        """Let go of the source."""
        self._numbers.close()

    def _plan_needed(self, offset: int, length: int) -> None:
        stop = offset + length
        start = self._column_start(offset, length)
        if start is not None and self._is_around_column(offset, length):
            offset = start // _PAGE_BYTES * _PAGE_BYTES
        if start is not None and self._column_bytes <= MAX_COLUMN_BYTES:
            # The last page is read as a whole.
            stop = max(stop, -(-(start + self._column_bytes) // _PAGE_BYTES) * _PAGE_BYTES)
        self._plan(offset, stop, max(MAX_PIECE_BYTES, stop - offset), is_needed=True)

    def _go_ahead(self, offset: int, length: int) -> None:
        with self._lock:
            ahead = self._streams.note(offset, length, self.size, self._column_start(offset, length))
        if ahead is not None:
            self._plan(ahead.start, ahead.stop, piece_bytes(ahead, self._fetchers), is_needed=False)

    def _is_beyond_column(self, offset: int, length: int) -> bool:
        """Whether a read leads out of the only column that its reader has read so far."""
        if not self._column_bytes or length < MIN_DECLINED_BYTES:
            return False
        with self._lock:
            stop = self._streams.record_stop(offset)
            is_beyond = stop is not None and offset + length >= stop + _PAGE_BYTES
            if is_beyond:
                self._streams.decline(offset, length)
        return is_beyond

    def _is_around_column(self, offset: int, length: int) -> bool:
        """Whether a column begins in the middle of what is read, and is not over soon."""
        if not MIN_DECLINED_BYTES <= length <= 2 * self._column_bytes:
            return False
        start = self._column_start(offset, length)
        return start is not None and start - offset >= length // 2

    def _column_start(self, offset: int, length: int) -> int | None:
        """Where the column begins that a read is taken to be the first part of; None for other reads."""
        column_bytes = self._column_bytes
        if not column_bytes or length < min(COLUMN_READ_BYTES, column_bytes):
            return None
        # A read begins with the page that holds the first byte wanted; for a mapped file, half its length before that.
        for first in (offset, offset + length // 2):
            start = -(-first // column_bytes) * column_bytes
            if start - first < _PAGE_BYTES and start < offset + length:
                return start
        return None

    def _plan(self, start: int, stop: int, piece_bytes: int, *, is_needed: bool) -> None:
        chunks = self._chunks(start, min(stop, self.size))
        task = self._fetchers.submit(lambda: self._reader.prefetch(chunks, piece_bytes, is_needed=is_needed))
        with self._lock:
            self._plans.append(_Plan(start, stop, task))

    def _chunks(self, start: int, stop: int) -> Sequence[int]:
        run = self._grid.run(start, stop - start)
        if run is not None:
            return range(run.first, run.last + 1)
        return sorted({piece.chunk for piece in self._grid.pieces(start, stop - start)})

    def _is_planned(self, offset: int, length: int) -> bool:
        with self._lock:
            return any(plan.start <= offset and offset + length <= plan.stop for plan in self._plans)

    def _wait_for_plans(self, start: int, stop: int) -> None:
        """Until all requests that a range needs are under way; raises what kept them from it."""
        with self._lock:
            plans = [plan for plan in self._plans if plan.start < stop and start < plan.stop]
        for plan in plans:
            try:
                plan.task.result()
            except BaseException:
                with self._lock:
                    if plan in self._plans:
                        self._plans.remove(plan)
                raise
