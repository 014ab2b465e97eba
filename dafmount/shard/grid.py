"""Which chunks, and which bytes within them, hold a range of a property's flat bytes.

Owns the arithmetic of the chunk grid. Must not know how chunks are stored. Values are immutable; threads may share
them.

Facts: chunks are numbered with the rows running fastest, values within a chunk are column-major too, and every chunk
has the full chunk_shape, padded beyond the property's edges ("PackedFormat documentation, Dual-format shard layout").
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from dafmount.errors import CorruptDescriptor

_MAX_FLAT_BYTES = (1 << 63) - 1


class Piece(NamedTuple):
    """Half-open byte range `[start, stop)` of the raw chunk number `chunk`."""

    chunk: int
    start: int
    stop: int


class Run(NamedTuple):
    """A flat range that is held by the consecutive chunks `first` to `last`, the last one included.

    Decode whole chunks in order into a buffer of `buffer_bytes`, chunk `first + i` at `places[i]`: each covers the
    padding of the one before it, and the answer is the buffer's `[skip, skip + length)`. `places` is a `range` of
    chunk_bytes steps where no chunk before the last one has padding.
    """

    first: int
    last: int
    places: Sequence[int]
    skip: int
    buffer_bytes: int


@dataclass(frozen=True, slots=True)
class Grid:
    """A property of `shape` (rows, or rows and columns) in chunks of `chunk_shape`, `itemsize` bytes a value.

    Make it with `make_grid`, which checks the numbers. For strings let `itemsize` be 1: then only the counts mean
    anything.
    """

    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    itemsize: int

    grid_shape: tuple[int, ...] = field(init=False, compare=False)
    """Number of chunks along each dimension."""
    n_chunks: int = field(init=False, compare=False)
    """Number of chunks."""
    chunk_count: int = field(init=False, compare=False)
    """Number of values in a chunk, padding included."""
    chunk_bytes: int = field(init=False, compare=False)
    """Bytes of a raw chunk, padding included."""
    size: int = field(init=False, compare=False)
    """Bytes of the flat property."""

    def __post_init__(self) -> None:
        derive = partial(object.__setattr__, self)  # asked for in every read, so worked out once
        derive("grid_shape", tuple(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)))
        derive("n_chunks", math.prod(self.grid_shape))
        derive("chunk_count", math.prod(self.chunk_shape))
        derive("chunk_bytes", self.chunk_count * self.itemsize)
        derive("size", math.prod(self.shape) * self.itemsize)

    @property
    def is_sequential(self) -> bool:
        """Whether the flat values are those of chunk 0, then of chunk 1, and so on, each a prefix of its chunk."""
        return len(self.shape) == 1 or self.chunk_shape[1] == 1 or self.chunk_shape[0] == self.shape[0]

    def valid_count(self, chunk: int) -> int:
        """Number of values in a chunk that are not padding."""
        count = 1
        for n, size, n_blocks in zip(self.shape, self.chunk_shape, self.grid_shape, strict=True):
            chunk, block = divmod(chunk, n_blocks)
            count *= min(size, n - block * size)
        return count

    def flat_offset(self, chunk: int) -> int:
        """Where in the flat bytes a chunk begins; only where the grid is sequential."""
        if len(self.shape) == 1 or self.chunk_shape[1] != 1:
            return chunk * self.chunk_bytes
        column, block = divmod(chunk, self.grid_shape[0])
        return (column * self.shape[0] + block * self.chunk_shape[0]) * self.itemsize

    def run(self, offset: int, length: int) -> Run | None:
        """The consecutive chunks that hold flat bytes `[offset, offset + length)`.

        None where the grid is not sequential, or the range is empty. The range must lie within the property.
        """
        if length <= 0 or not self.is_sequential:
            return None
        chunk_bytes = self.chunk_bytes
        stop = offset + length - 1
        column_bytes = self.shape[0] * self.itemsize
        if len(self.shape) == 1 or self.chunk_shape[1] != 1 or column_bytes % chunk_bytes == 0:
            first, skip = divmod(offset, chunk_bytes)
            last = stop // chunk_bytes
            n = last - first + 1
            return Run(first, last, range(0, n * chunk_bytes, chunk_bytes), skip, n * chunk_bytes)
        return self._run_of_columns(offset, stop, column_bytes, chunk_bytes)

    def _run_of_columns(self, offset: int, stop: int, column_bytes: int, chunk_bytes: int) -> Run:
        """A run over columns whose last chunk has padding. `stop` is the last byte."""
        per_column = self.grid_shape[0]
        first_column, first_at = divmod(offset, column_bytes)
        last_column, last_at = divmod(stop, column_bytes)
        first_block, skip = divmod(first_at, chunk_bytes)
        last_block = last_at // chunk_bytes
        base = offset - skip
        places: list[int] = []
        for column in range(first_column, last_column + 1):
            start = first_block if column == first_column else 0
            end = last_block + 1 if column == last_column else per_column
            column_at = column * column_bytes - base
            places.extend(range(column_at + start * chunk_bytes, column_at + end * chunk_bytes, chunk_bytes))
        first = first_column * per_column + first_block
        return Run(first, first + len(places) - 1, places, skip, places[-1] + chunk_bytes)

    def pieces(self, offset: int, length: int) -> Sequence[Piece]:
        """Flat bytes `[offset, offset + length)` as pieces of raw chunks, in flat order and without padding.

        Joining `raw_chunk[start:stop]` of all pieces gives exactly the range, which must lie within the property and
        may cut values. With more than one column a chunk, a chunk may occur again and again.
        """
        if length <= 0:
            return []
        if len(self.shape) == 1:
            return _pieces_of_columns(offset, length, self.size, self.chunk_bytes, 1)
        column_bytes = self.shape[0] * self.itemsize
        rows_bytes = self.chunk_shape[0] * self.itemsize
        if rows_bytes == column_bytes:  # whole columns: a chunk is one stretch of flat bytes
            return _pieces_of_columns(offset, length, self.size, self.chunk_bytes, 1)
        return _pieces_of_columns(offset, length, column_bytes, rows_bytes, self.chunk_shape[1])


def make_grid(
    shape: Sequence[int], chunk_shape: Sequence[int], itemsize: int, max_chunk_bytes: int, where: str
) -> Grid:
    """A checked Grid. Empty shapes are allowed. Raises CorruptDescriptor, also for a chunk above `max_chunk_bytes`."""
    if len(shape) not in (1, 2) or len(shape) != len(chunk_shape):
        raise CorruptDescriptor(
            f"{where}: chunk_shape {list(chunk_shape)} does not suit shape {list(shape)}, expected {len(shape)} numbers"
        )
    if min(shape) < 0 or min(chunk_shape) < 1 or itemsize < 1:
        raise CorruptDescriptor(
            f"{where}: shape {list(shape)} in chunks of {list(chunk_shape)}, expected at least 0 and 1"
        )
    grid = Grid(tuple(shape), tuple(chunk_shape), itemsize)
    if grid.chunk_bytes > max_chunk_bytes:
        raise CorruptDescriptor(
            f"{where}: a chunk would take {grid.chunk_bytes} bytes, expected at most {max_chunk_bytes}"
        )
    if grid.size > _MAX_FLAT_BYTES:
        raise CorruptDescriptor(f"{where}: shape {list(shape)} would take {grid.size} bytes, more than a file can have")
    return grid


def _pieces_of_columns(offset: int, length: int, column_bytes: int, rows_bytes: int, chunk_columns: int) -> list[Piece]:
    """Pieces where columns of `column_bytes` are cut into chunks of `chunk_columns` columns, each `rows_bytes` high."""
    pieces: list[Piece] = []
    per_column = -(-column_bytes // rows_bytes)
    stop = offset + length
    while offset < stop:
        column, at = divmod(offset, column_bytes)
        end = min(column_bytes, at + stop - offset)
        block_column, chunk_column = divmod(column, chunk_columns)
        base = chunk_column * rows_bytes
        offset += end - at
        block, inside = divmod(at, rows_bytes)
        chunk = block_column * per_column + block
        top = at - inside  # where in the column the chunk begins
        while at < end:
            bottom = min(rows_bytes, end - top)
            pieces.append(Piece(chunk, base + inside, base + bottom))
            chunk += 1
            top += rows_bytes
            at, inside = top, 0
    return pieces

