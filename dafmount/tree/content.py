"""A mounted file's bytes: a literal, a slice of a source, or a packed component shown flat.

Owns how flat offsets become chunks and chunks become flat bytes. Must not know FUSE. Every content may be shared by
threads. A short result before the end of the file is a bug (the kernel would fill it with zeros): every layer raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dafmount.errors import CorruptShard
from dafmount.shard import strings
from dafmount.shard.grid import Grid
from dafmount.tree.cache import Chunk, ChunkCache, Flight
from dafmount.tree.chunks import ShardReader, WouldWait

KEY_BITS = 40
"""Chunk numbers take so many bits of a cache key; above them stands the file's number."""


class Content(Protocol):
    """The bytes of one file. `dafmount.source.base.ByteSource` is one already."""

    @property
    def size(self) -> int:
        """Length in bytes; may block."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`, which lie within the size; may block."""

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, or None where something would have to be waited for."""

    def close(self) -> None:
        """Let go of the source."""


class Literal:
    """Bytes that were made up."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        """A slice."""
        return self._data[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """A slice."""
        return self._data[offset : offset + length]

    def close(self) -> None:
        """Nothing to let go of."""


class Units(Protocol):
    """What the cache keeps pieces of: numbered from 0, each read whole."""

    def read(self, units: Sequence[int]) -> Sequence[Chunk]:
        """The units asked for, in ascending order; may block."""

    def read_nowait(self, units: Sequence[int]) -> Sequence[Chunk]:
        """As `read`, but raises WouldWait rather than wait for bytes."""

    def close(self) -> None:
        """Let go of the source."""


class CachedUnits:
    """Units of one file through the shared cache; each decoded once however many ask."""

    def __init__(self, units: Units, cache: ChunkCache, file_number: int) -> None:
        self._units = units
        self._cache = cache
        self._base = file_number << KEY_BITS

    def get(self, units: Sequence[int]) -> list[Chunk]:
        """The units, in ascending order of their numbers; decodes or waits for those that are not cached."""
        wanted = [self._base + unit for unit in units]
        have: dict[int, Chunk] = {}
        while len(have) < len(wanted):
            claim = self._cache.claim([key for key in wanted if key not in have])
            have.update(claim.found)
            if claim.mine is not None:
                have.update(self._decode(claim.mine, self._units.read))
            for key, flight in claim.others:
                flight.done.wait()
                if key in flight.chunks:
                    have[key] = flight.chunks[key]
        return [have[key] for key in wanted]

    def get_nowait(self, units: Sequence[int]) -> list[Chunk] | None:
        """As `get`, or None where bytes or another reader would have to be waited for."""
        wanted = [self._base + unit for unit in units]
        if self._cache.busy(wanted):
            return None
        claim = self._cache.claim(wanted)
        have = claim.found
        if claim.mine is not None:
            try:
                have.update(self._decode(claim.mine, self._units.read_nowait))
            except WouldWait:
                return None
        if claim.others:
            return None
        return [have[key] for key in wanted]

    def close(self) -> None:
        """Let go of the source; decoded units stay cached."""
        self._units.close()

    def _decode(self, flight: Flight, read: Callable[[Sequence[int]], Sequence[Chunk]]) -> dict[int, Chunk]:
        decoded: dict[int, Chunk] = {}
        try:
            decoded = dict(zip(flight.keys, read([key - self._base for key in flight.keys]), strict=True))
        finally:
            self._cache.land(flight, decoded)
        return decoded


class PackedNumbers:
    """A packed numeric component as its flat little-endian bytes."""

    def __init__(self, grid: Grid, chunks: CachedUnits) -> None:
        self._grid = grid
        self._chunks = chunks

    @property
    def size(self) -> int:
        """Length in bytes, from the shape alone."""
        return self._grid.size

    def read(self, offset: int, length: int) -> bytes:
        """Decodes only the chunks that hold the range."""
        needed = self._needed(offset, length)
        return self._join(offset, length, needed, self._chunks.get(needed))

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, or None where bytes would have to be waited for."""
        needed = self._needed(offset, length)
        chunks = self._chunks.get_nowait(needed)
        return None if chunks is None else self._join(offset, length, needed, chunks)

    def close(self) -> None:
        """Let go of the source."""
        self._chunks.close()

    def _needed(self, offset: int, length: int) -> Sequence[int]:
        run = self._grid.run(offset, length)
        if run is not None:
            return range(run.first, run.last + 1)
        return sorted({piece.chunk for piece in self._grid.pieces(offset, length)})

    def _join(self, offset: int, length: int, needed: Sequence[int], chunks: Sequence[Chunk]) -> bytes:
        run = self._grid.run(offset, length)
        if run is None:
            by_number = {number: memoryview(chunk) for number, chunk in zip(needed, chunks, strict=True)}
            pieces = self._grid.pieces(offset, length)
            return b"".join([by_number[piece.chunk][piece.start : piece.stop] for piece in pieces])
        places, skip, last = run.places, run.skip, len(chunks) - 1
        if last == 0:
            return bytes(memoryview(chunks[0])[skip : skip + length])
        parts: list[Chunk] = list(chunks)
        if not isinstance(places, range):
            for at in range(last):
                parts[at] = memoryview(chunks[at])[: places[at + 1] - places[at]]
        parts[0] = memoryview(parts[0])[skip:]
        parts[last] = memoryview(chunks[last])[: skip + length - places[last]]
        return b"".join(parts)


class PackedText:
    """A packed string component as text, one value a line.

    Where a line lies follows from the raw sizes of all chunks, which are read once, when the size is first asked for;
    nothing is decoded for that (PackedFormat documentation: a raw chunk is 4 + 4 * count + the strings' bytes).
    """

    def __init__(self, grid: Grid, reader: ShardReader, cache: ChunkCache, file_number: int) -> None:
        self._reader = reader
        self._units = TextUnits(grid, reader)
        self._texts = CachedUnits(self._units, cache, file_number)
        self._starts: NDArray[np.int64] | None = None

    @property
    def size(self) -> int:
        """Length in bytes of all lines; the first call reads the shard's directory."""
        return int(self._offsets()[-1])

    def read(self, offset: int, length: int) -> bytes:
        """Decodes only the chunks that hold the range."""
        starts = self._offsets()
        units = self._needed(starts, offset, length)
        return self._join(starts, units, self._texts.get(units), offset, length)

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, or None where bytes would have to be waited for."""
        starts = self._starts
        if starts is None:
            return None
        units = self._needed(starts, offset, length)
        texts = self._texts.get_nowait(units)
        return None if texts is None else self._join(starts, units, texts, offset, length)

    def close(self) -> None:
        """Let go of the source."""
        self._texts.close()

    def _offsets(self) -> NDArray[np.int64]:
        """Where each unit's lines begin, and the size at the end."""
        if self._starts is None:
            sizes = self._units.sizes(self._reader.raw_sizes())
            starts = np.zeros(len(sizes) + 1, np.int64)
            np.cumsum(sizes, out=starts[1:])
            self._starts = starts
        return self._starts

    def _needed(self, starts: NDArray[np.int64], offset: int, length: int) -> range:
        first = int(np.searchsorted(starts, offset, side="right")) - 1
        return range(first, int(np.searchsorted(starts, offset + length, side="left")))

    def _join(
        self, starts: NDArray[np.int64], units: range, texts: Sequence[Chunk], offset: int, length: int
    ) -> bytes:
        for unit, text in zip(units, texts, strict=True):
            expected = int(starts[unit + 1] - starts[unit])
            if len(text) != expected:
                raise CorruptShard(f"{self._units.where(unit)}: {len(text)} bytes of text, expected {expected}")
        skip = offset - int(starts[units.start])
        return b"".join(texts)[skip : skip + length]


class TextUnits:
    """Lines of text in units that are neighbours in the flat file.

    A unit is a chunk; but where chunks have several columns and not all rows, it is all chunks of the same columns,
    because then the lines of one chunk are not neighbours.
    """

    def __init__(self, grid: Grid, reader: ShardReader) -> None:
        self._grid = grid
        self._reader = reader
        self._per_unit = 1 if grid.is_sequential else max(1, grid.grid_shape[0])

    def where(self, unit: int) -> str:
        """How messages call a unit."""
        return f"{self._reader.name}: chunk {unit * self._per_unit}"

    def sizes(self, raw_sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes of text of each unit, from the raw sizes of all chunks."""
        grid = self._grid
        valid = np.fromiter(map(grid.valid_count, range(grid.n_chunks)), np.int64, grid.n_chunks)
        sizes = raw_sizes - (4 + 4 * grid.chunk_count) + valid
        if len(sizes) and int(sizes.min()) < 0:
            chunk = int((sizes < 0).argmax())
            strings.text_bytes(int(raw_sizes[chunk]), grid.chunk_count, 0, f"{self._reader.name}: chunk {chunk}")
            raise CorruptShard(f"{self._reader.name}: chunk {chunk} is too small for its strings")
        summed: NDArray[np.int64] = sizes.reshape(-1, self._per_unit).sum(axis=1)
        return summed

    def read(self, units: Sequence[int]) -> Sequence[Chunk]:
        """The units' lines."""
        return self._lines(units, self._reader.read(self._chunks(units)))

    def read_nowait(self, units: Sequence[int]) -> Sequence[Chunk]:
        """As `read`, but raises WouldWait rather than wait."""
        return self._lines(units, self._reader.read_nowait(self._chunks(units)))

    def close(self) -> None:
        """Let go of the source."""
        self._reader.close()

    def _chunks(self, units: Sequence[int]) -> Sequence[int]:
        per_unit = self._per_unit
        if per_unit == 1:
            return units
        return [unit * per_unit + at for unit in units for at in range(per_unit)]

    def _lines(self, units: Sequence[int], raws: Sequence[Chunk]) -> list[Chunk]:
        grid, name, per_unit = self._grid, self._reader.name, self._per_unit
        if grid.is_sequential:
            return [
                strings.decode_strings(raw, grid.chunk_count, grid.valid_count(unit), f"{name}: chunk {unit}")
                for unit, raw in zip(units, raws, strict=True)
            ]
        return [
            self._interleave(unit, raws[at * per_unit : (at + 1) * per_unit]) for at, unit in enumerate(units)
        ]

    def _interleave(self, unit: int, raws: Sequence[Chunk]) -> bytes:
        """The lines of a column of chunks: for each of its columns the rows of every chunk, without the padding."""
        grid = self._grid
        chunk_rows, chunk_columns = grid.chunk_shape
        n_rows, n_columns = grid.shape
        columns = min(chunk_columns, n_columns - unit * chunk_columns)
        parts: list[list[bytes]] = [[] for _ in range(columns)]
        for block, raw in enumerate(raws):
            where = f"{self._reader.name}: chunk {unit * self._per_unit + block}"
            lines = strings.decode_strings(raw, grid.chunk_count, grid.chunk_count, where).split(b"\n")
            rows = min(chunk_rows, n_rows - block * chunk_rows)
            for column in range(columns):
                parts[column].extend(lines[column * chunk_rows : column * chunk_rows + rows])
        return b"".join([line + b"\n" for column in parts for line in column])
