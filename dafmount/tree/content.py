"""A mounted file's bytes: a literal, a slice of a source, or a packed component shown flat.

Owns how flat offsets become chunks and chunks become flat bytes. Must not know FUSE. Every content may be shared by
threads. A short result before the end of the file is a bug (the kernel would fill it with zeros): every layer raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dafmount.errors import CorruptShard
from dafmount.shard import strings
from dafmount.shard.grid import Grid, Run
from dafmount.tree.cache import Chunk, ChunkCache
from dafmount.tree.chunks import ChunkReader
from dafmount.tree.decoders import Decoders, Store
from dafmount.tree.stretches import Stretches
from dafmount.tree.units import CachedUnits, FlatBlocks

KEY_BITS = 40
"""Chunk numbers take so many bits of a cache key; above them stands the file's number."""

FIRST_BLOCK_KEY = 1 << (KEY_BITS - 1)
"""Blocks of chunks are numbered from here."""

BLOCK_BYTES = 1 << 20
"""How much is decoded at once when a component is read sequentially."""

MIN_BLOCKS = 16
"""A cache that holds fewer blocks than this gets smaller ones."""


class Content(Protocol):
    """The bytes of one file. `dafmount.source.base.ByteSource` is one already."""

    @property
    def size(self) -> int:
        """Length in bytes; may block."""

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Exactly `length` bytes at `offset`, which lie within the size; may block."""

    def read_nowait(self, offset: int, length: int) -> bytes | memoryview | None:
        """As `read`, or None where something would have to be waited for."""

    def close(self) -> None:
        """Let go of the source."""


class ReadAheadDeclined(Exception):
    """The kernel read ahead of its reader, whom it tells nothing when that fails and asks again if it is needed."""


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


class PackedNumbers:
    """A packed numeric component as its flat little-endian bytes.

    A read that continues an earlier one is answered from blocks (see FlatBlocks), any other from the very chunks it
    needs, so that random access decodes nothing else. What lies before a reader is decoded ahead (see Stretches).
    """

    def __init__(
        self,
        grid: Grid,
        reader: ChunkReader,
        cache: ChunkCache,
        file_number: int,
        *,
        block_bytes: int = BLOCK_BYTES,
        decoders: Decoders | None = None,
        store: Store | None = None,
    ) -> None:
        """With `block_bytes` 0 there are no blocks; without `decoders` nothing is decoded ahead."""
        self._grid = grid
        self._chunks = CachedUnits(reader, cache, file_number << KEY_BITS)
        self._ends: deque[int] = deque(maxlen=16)
        self._last = (0, 0, 0)
        self._blocks: FlatBlocks | None = None
        self._stretches: Stretches | None = None
        per_block = min(block_bytes, cache.limit_bytes // MIN_BLOCKS) // max(1, grid.chunk_bytes)
        if grid.is_sequential and per_block > 1:
            self._blocks = FlatBlocks(grid, reader, per_block)
            self._cached_blocks = CachedUnits(self._blocks, cache, (file_number << KEY_BITS) + FIRST_BLOCK_KEY)
            if decoders is not None and decoders.n_threads:
                self._stretches = Stretches(self._blocks, self._cached_blocks, decoders, store)

    @property
    def size(self) -> int:
        """Length in bytes, from the shape alone."""
        return self._grid.size

    def read(self, offset: int, length: int) -> bytes | memoryview:
        """Decodes only the chunks that hold the range, or their blocks."""
        near = self._from_last_block(offset, length)
        if near is not None:
            return near
        run = self._grid.run(offset, length)
        blocks = self._blocks_for(run, offset, length)
        if blocks is not None:
            if self._stretches is not None:
                self._stretches.wait(blocks, offset, length)
            return self._cut(offset, length, blocks, self._cached_blocks.get(blocks))
        needed = self._needed(run, offset, length)
        return self._join(run, offset, length, needed, self._chunks.get(needed))

    def read_nowait(self, offset: int, length: int) -> bytes | memoryview | None:
        """As `read`, or None where bytes would have to be waited for."""
        near = self._from_last_block(offset, length)
        if near is not None:
            return near
        run = self._grid.run(offset, length)
        blocks = self._blocks_for(run, offset, length)
        if blocks is not None:
            if self._stretches is not None and not self._stretches.go_on(blocks, offset, length):
                return None
            flat = self._cached_blocks.get_nowait(blocks)
            return None if flat is None else self._cut(offset, length, blocks, flat)
        needed = self._needed(run, offset, length)
        chunks = self._chunks.get_nowait(needed)
        return None if chunks is None else self._join(run, offset, length, needed, chunks)

    def close(self) -> None:
        """Let go of the source."""
        if self._stretches is not None:
            self._stretches.close()
        self._chunks.close()

    def _from_last_block(self, offset: int, length: int) -> memoryview | None:
        """A slice of the block used last, without any arithmetic of the grid: most reads end here."""
        start, stop, block = self._last
        if start <= offset and offset + length <= stop:
            flat = self._cached_blocks.peek(block)
            if flat is not None:
                self._ends.append(offset + length)
                if offset + length == stop:
                    # Read to its end: the kernel has it all, and the next block reuses warm memory.
                    self._cached_blocks.discard(block)
                return memoryview(flat)[offset - start : offset - start + length]
        return None

    def _blocks_for(self, run: Run | None, offset: int, length: int) -> range | None:
        """The blocks that answer a read, None where single chunks do."""
        if self._stretches is not None and self._stretches.leads_to(offset):
            self._ends.append(offset)
        is_next = offset in self._ends
        self._ends.append(offset + length)
        if self._blocks is None or run is None:
            return None
        blocks = range(self._blocks.of_chunk(run.first), self._blocks.of_chunk(run.last) + 1)
        return blocks if is_next or self._cached_blocks.has(blocks) else None

    def _cut(self, offset: int, length: int, blocks: range, flat: Sequence[Chunk]) -> bytes | memoryview:
        assert self._blocks is not None
        parts = []
        for block, data in zip(blocks, flat, strict=True):
            start, stop = self._blocks.span(block)
            parts.append(memoryview(data)[max(0, offset - start) : min(stop, offset + length) - start])
            self._last = (start, stop, block)
            if stop <= offset + length:
                self._cached_blocks.discard(block)
        if self._stretches is not None:
            self._stretches.answered(blocks, offset + length)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _needed(self, run: Run | None, offset: int, length: int) -> Sequence[int]:
        if run is not None:
            return range(run.first, run.last + 1)
        return sorted({piece.chunk for piece in self._grid.pieces(offset, length)})

    def _join(
        self, run: Run | None, offset: int, length: int, needed: Sequence[int], chunks: Sequence[Chunk]
    ) -> bytes:
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

    def __init__(self, grid: Grid, reader: ChunkReader, cache: ChunkCache, file_number: int) -> None:
        self._reader = reader
        self._units = TextUnits(grid, reader)
        self._texts = CachedUnits(self._units, cache, file_number << KEY_BITS)
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

    def __init__(self, grid: Grid, reader: ChunkReader) -> None:
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
