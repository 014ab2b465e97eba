"""Raw chunks of one shard: located, fetched from a byte source, and decoded.

Owns the reading that `shard/` only plans: the tail, the parts of the directory that are needed, headers and payloads.
Must not know what the values mean or who caches them. Threads share a reader; what they learn twice is merely learnt
twice.

Only the directory entries that a request needs are read, in blocks (PackedFormat documentation, Random-access central
directory): a shard may have 10^8 chunks.
"""

from __future__ import annotations

import bisect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from dafmount.daf.catalog import Packing
from dafmount.errors import CorruptShard
from dafmount.shard import codecs, directory
from dafmount.source import ranges
from dafmount.source.base import ByteSource, Range

BLOCK_ENTRIES = 512
"""Directory entries read and parsed at once; some 50 kB."""

MAX_BLOCKS = 64
"""Parsed blocks kept for each open shard; some 15 kB each."""

WINDOW_CHUNKS = BLOCK_ENTRIES
WINDOW_BYTES = 1 << 20
"""How many chunks, and of how many stored bytes, a sequential reader fetches and checks at once."""

MAX_FETCH_BYTES = 8 << 20
"""The longest range that near chunks are joined into."""

Raw = bytes | bytearray | memoryview
ReadAt = Callable[[int, int], bytes]


class ChunkReader(Protocol):
    """Raw chunks of one shard, however they are found; see ShardReader."""

    name: str

    def read(self, chunks: Sequence[int]) -> list[Raw]: ...

    def read_nowait(self, chunks: Sequence[int]) -> list[Raw]: ...

    def read_run(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview: ...

    def read_run_nowait(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview: ...

    def raw_sizes(self) -> NDArray[np.int64]: ...

    def close(self) -> None: ...


class WouldWait(Exception):
    """Bytes would have to be waited for, and the caller did not want to wait."""


@dataclass(slots=True)
class Decoded:
    """How many chunks this process has decoded."""

    n_chunks: int = 0


DECODED = Decoded()
"""Counted without a lock, as in `dafmount.source.traffic`."""


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """What a descriptor says of a shard."""

    n_chunks: int
    packing: Packing
    itemsize: int | None
    """Bytes of a value; None for strings."""
    chunk_bytes: int | None
    """Bytes of every raw chunk; None for strings, whose chunks differ."""
    max_chunk_bytes: int
    """A raw chunk that claims more is refused."""
    verify: bool
    """Whether the CRC-32 of each chunk is checked."""

    @property
    def absent_strings(self) -> bytes:
        """The raw chunk that an absent chunk of strings stands for: the count, and that many empty strings."""
        count = math.prod(self.packing.chunk_shape)
        return count.to_bytes(4, "little") + bytes(4 * count)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What the shard's own tail says."""

    end: directory.End
    stride: directory.Stride
    entries: NDArray[np.int64] | None
    """Which entry of the directory each chunk has, -1 where it is absent; None where each has that of its number."""
    decoder: codecs.Decoder


class ShardReader:
    """Reads raw chunks of one shard."""

    def __init__(self, source: ByteSource, spec: ShardSpec, name: str) -> None:
        self.source = source
        self.spec = spec
        self.name = name
        self._opened: _Opened | None = None
        self._blocks: OrderedDict[int, directory.Chunks] = OrderedDict()
        self._window: _Window | None = None

    def read(self, chunks: Sequence[int]) -> list[Raw]:
        """The raw chunks, in the order asked for (ascending numbers)."""
        return self._read(chunks, self.source.read)

    def read_nowait(self, chunks: Sequence[int]) -> list[Raw]:
        """As `read`, but raises WouldWait rather than wait for bytes."""
        if len(chunks) == 1:
            opened = self._open(self._source_nowait)
            if opened.entries is None:
                return [self._read_one(chunks[0], chunks[0], opened, self._source_nowait)]
        return self._read(chunks, self._source_nowait)

    def raw_sizes(self) -> NDArray[np.int64]:
        """The bytes of every raw chunk, without decoding any where the codec allows it."""
        n_chunks = self.spec.n_chunks
        opened = self._open(self.source.read)  # raises where the shard cannot have so many chunks
        if opened.entries is not None:
            sizes = self._sparse_raw_sizes(opened.entries, opened)
        else:
            sizes = np.zeros(n_chunks, np.int64)
            for first in range(0, n_chunks, BLOCK_ENTRIES):
                block = self._block(first // BLOCK_ENTRIES, opened, self.source.read)
                numbers = range(first, first + len(block.crc))
                sizes[first : numbers.stop] = self._raw_sizes(numbers, block, opened.decoder)
        if n_chunks and (int(sizes.min()) < 0 or int(sizes.max()) > self.spec.max_chunk_bytes):
            raise CorruptShard(
                f"{self.name}: a chunk claims {int(sizes.max())} bytes, expected at most {self.spec.max_chunk_bytes}"
            )
        return sizes

    def close(self) -> None:
        """Let go of the source."""
        self.source.close()

    def _source_nowait(self, offset: int, length: int) -> bytes:
        data = self.source.read_nowait(offset, length)
        if data is None:
            raise WouldWait
        return data

    def read_run(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview:
        """Consecutive numeric chunks from `first` on, laid into one buffer at `places` (see `shard.grid.Run`)."""
        return self._read_run(first, places, buffer_bytes, self.source.read)

    def read_run_nowait(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview:
        """As `read_run`, but raises WouldWait rather than wait for bytes."""
        return self._read_run(first, places, buffer_bytes, self._source_nowait)

    def _read(self, chunks: Sequence[int], read_at: ReadAt) -> list[Raw]:
        opened = self._open(read_at)
        if opened.entries is not None:
            return [self._read_sparse(chunk, opened, read_at) for chunk in chunks]
        raws: list[Raw] = []
        for block, first, numbers in self._by_block(chunks, opened, read_at):
            if self.spec.chunk_bytes is None:
                raws.extend(self._read_strings(block, first, numbers, opened, read_at))
            else:
                raws.extend(self._read_numbers(self.spec.chunk_bytes, block, first, numbers, opened, read_at))
        return raws

    def _read_one(self, chunk: int, at: int, opened: _Opened, read_at: ReadAt) -> Raw:
        """A chunk by itself, which has entry `at` of the directory, as random access asks for.

        With bytes at hand two short reads cost less than arrays do.
        """
        name, stride, end = self.name, opened.stride, opened.end
        where = f"{name}: chunk {chunk}"
        line = read_at(end.directory_offset + at * stride.entry_bytes, stride.entry_bytes)
        entry = directory.parse_entry(line, stride, chunk, name)
        stop = min(entry.header_offset + entry.stored_bytes + stride.header_hint, end.directory_offset)
        data = read_at(entry.header_offset, stop - entry.header_offset)
        start = directory.data_start(data, 0, where)
        payload = memoryview(data)[start : start + entry.stored_bytes]
        if len(payload) != entry.stored_bytes:
            raise _long_header(where)
        size, limit = self.spec.chunk_bytes, self.spec.max_chunk_bytes
        raw = opened.decoder.decode(payload, entry.method, entry.crc, entry.raw_bytes, size, limit, where)
        DECODED.n_chunks += 1
        return raw

    def _read_run(self, first: int, places: Sequence[int], buffer_bytes: int, read_at: ReadAt) -> memoryview:
        assert self.spec.chunk_bytes is not None
        opened = self._open(read_at)
        out = np.empty(buffer_bytes, np.uint8).data  # unlike a bytearray not zeroed first
        if opened.entries is not None:
            for at, place in enumerate(places):
                out[place : place + self.spec.chunk_bytes] = self._read_sparse(first + at, opened, read_at)
            return out
        chunk, stop = first, first + len(places)
        while chunk < stop:
            window = self._window_at(chunk, opened, read_at)
            end = min(stop, window.stop)
            part = places[chunk - first : end - first]
            where = partial(_chunk_name, self.name, range(chunk, end))
            window.run.decode(chunk - window.first, end - window.first, out, part, where)
            DECODED.n_chunks += end - chunk
            chunk = end
        return out

    def _window_at(self, chunk: int, opened: _Opened, read_at: ReadAt) -> _Window:
        """The window that holds a chunk: the last one, or a new one that begins with it."""
        window = self._window
        if window is None or not window.first <= chunk < window.stop:
            window = self._make_window(chunk, opened, read_at)
            self._window = window if window.stop < self.spec.n_chunks else None
        return window

    def _make_window(self, first: int, opened: _Opened, read_at: ReadAt) -> _Window:
        number = first // BLOCK_ENTRIES
        block = self._block(number, opened, read_at)
        block_first = number * BLOCK_ENTRIES
        sizes = block.stored_bytes[first - block_first :][:WINDOW_CHUNKS]
        count = max(1, int(np.searchsorted(np.cumsum(sizes), WINDOW_BYTES, side="right")))
        numbers = range(first, first + min(count, len(sizes)))
        limit = opened.end.directory_offset
        data, starts, part, members = next(self._fetch(block, block_first, numbers, limit, read_at))
        if members is not None:  # far apart, or not in order: one chunk is certain
            numbers = numbers[:1]
            data, starts, part, members = next(self._fetch(block, block_first, numbers, limit, read_at))
        assert self.spec.chunk_bytes is not None
        run = opened.decoder.prepare(data, starts, part, self.spec.chunk_bytes)
        return _Window(numbers.start, numbers.stop, run)

    def _by_block(
        self, chunks: Sequence[int], opened: _Opened, read_at: ReadAt
    ) -> Iterator[tuple[directory.Chunks, int, Sequence[int]]]:
        """Ascending chunks, cut where the blocks of the directory end: block, its first chunk, the chunks in it."""
        at = 0
        while at < len(chunks):
            number = chunks[at] // BLOCK_ENTRIES
            stop = bisect.bisect_left(chunks, (number + 1) * BLOCK_ENTRIES, at)
            yield self._block(number, opened, read_at), number * BLOCK_ENTRIES, chunks[at:stop]
            at = stop

    def _read_numbers(
        self,
        size: int,
        block: directory.Chunks,
        first: int,
        numbers: Sequence[int],
        opened: _Opened,
        read_at: ReadAt,
    ) -> list[Raw]:
        out = bytearray(size * len(numbers))
        places = range(0, len(out), size)
        self._decode_into(out, places, block, first, numbers, opened, read_at)
        if len(numbers) == 1:
            return [out]
        view = memoryview(out)
        return [bytes(view[place : place + size]) for place in places]

    def _decode_into(
        self,
        out: bytearray | memoryview,
        places: Sequence[int],
        block: directory.Chunks,
        first: int,
        numbers: Sequence[int],
        opened: _Opened,
        read_at: ReadAt,
    ) -> None:
        """Decode chunks that lie in one block of the directory, which begins at chunk `first`, to `out` at `places`."""
        size, name = self.spec.chunk_bytes, self.name
        assert size is not None
        for data, starts, part, members in self._fetch(block, first, numbers, opened.end.directory_offset, read_at):
            group = numbers if members is None else [numbers[member] for member in members]
            where = partial(_chunk_name, name, group)
            targets = places if members is None else [places[member] for member in members]
            opened.decoder.decode_run(data, starts, part, out, targets, size, where)
            DECODED.n_chunks += len(targets)

    def _read_strings(
        self, block: directory.Chunks, first: int, numbers: Sequence[int], opened: _Opened, read_at: ReadAt
    ) -> list[Raw]:
        raws: dict[int, Raw] = {}
        for data, starts, part, members in self._fetch(block, first, numbers, opened.end.directory_offset, read_at):
            group = numbers if members is None else [numbers[member] for member in members]
            for number, raw in zip(group, self._decode_strings(data, starts, part, group, opened), strict=True):
                raws[number] = raw
        return [raws[number] for number in numbers]

    def _fetch(
        self, block: directory.Chunks, first: int, numbers: Sequence[int], limit: int, read_at: ReadAt
    ) -> Iterator[_Fetched]:
        """Headers and payloads of chunks, near ones together. Nothing of a chunk lies at or beyond `limit`."""
        if isinstance(numbers, range):
            picked = _slice(block, numbers.start - first, numbers.stop - first)
        else:
            picked = _take(block, np.fromiter(numbers, np.int64, len(numbers)) - first)
        starts = picked.header_offset
        stops = np.minimum(starts + picked.stored_bytes + picked.header_hint, limit)
        begin, end = int(starts[0]), int(stops[-1])
        if end - begin <= MAX_FETCH_BYTES and _is_dense(starts, stops, self.source.gap_bytes):
            data = read_at(begin, end - begin)
            yield _Fetched(data, self._data_starts(data, begin, picked, numbers), picked, None)
            return
        wanted = [Range(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        for fetch in ranges.join(wanted, gap_bytes=self.source.gap_bytes, max_bytes=MAX_FETCH_BYTES):
            begin, end = fetch.range
            data = read_at(begin, end - begin)
            part = _take(picked, np.array(fetch.members))
            group = [numbers[member] for member in fetch.members]
            yield _Fetched(data, self._data_starts(data, begin, part, group), part, fetch.members)

    def _data_starts(
        self, data: bytes, begin: int, part: directory.Chunks, numbers: Sequence[int]
    ) -> NDArray[np.int64]:
        """Where in `data` the payloads begin, each behind its own local header."""
        starts = directory.data_starts(data, part.header_offset - begin, numbers, self.name)
        over = starts + part.stored_bytes > len(data)
        if over.any():
            worst = int(over.argmax())
            raise _long_header(f"{self.name}: chunk {numbers[worst]}")
        return starts

    def _decode_strings(
        self, data: bytes, starts: NDArray[np.int64], part: directory.Chunks, numbers: Sequence[int], opened: _Opened
    ) -> list[Raw]:
        DECODED.n_chunks += len(numbers)
        view = memoryview(data)
        raws: list[Raw] = []
        for at, number in enumerate(numbers):
            start, stored = int(starts[at]), int(part.stored_bytes[at])
            raws.append(
                opened.decoder.decode(
                    view[start : start + stored],
                    int(part.method[at]),
                    int(part.crc[at]),
                    int(part.raw_bytes[at]),
                    None,
                    self.spec.max_chunk_bytes,
                    f"{self.name}: chunk {number}",
                )
            )
        return raws

    def _read_sparse(self, chunk: int, opened: _Opened, read_at: ReadAt) -> Raw:
        """A chunk of a shard whose directory leaves the absent chunks out."""
        assert opened.entries is not None
        at = int(opened.entries[chunk])
        if at < 0:
            return bytes(self.spec.chunk_bytes) if self.spec.chunk_bytes is not None else self.spec.absent_strings
        return self._read_one(chunk, at, opened, read_at)

    def _block(self, number: int, opened: _Opened, read_at: ReadAt) -> directory.Chunks:
        block = self._blocks.get(number)
        if block is not None:
            return block
        first = number * BLOCK_ENTRIES
        n = min(BLOCK_ENTRIES, self.spec.n_chunks - first)
        stride = opened.stride.entry_bytes
        data = read_at(opened.end.directory_offset + first * stride, n * stride)
        block = directory.parse_entries(data, opened.stride, first, n, self.name)
        self._blocks[number] = block
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)
        return block

    def _sparse_raw_sizes(self, entries: NDArray[np.int64], opened: _Opened) -> NDArray[np.int64]:
        """As `raw_sizes`, of a shard whose directory leaves the absent chunks out; see `_Opened.entries`."""
        absent_bytes = self.spec.chunk_bytes
        sizes = np.full(len(entries), len(self.spec.absent_strings) if absent_bytes is None else absent_bytes, np.int64)
        listed = np.flatnonzero(entries >= 0)
        stride = opened.stride.entry_bytes
        for at in range(0, len(listed), BLOCK_ENTRIES):
            numbers = listed[at : at + BLOCK_ENTRIES].tolist()
            data = self.source.read(opened.end.directory_offset + at * stride, len(numbers) * stride)
            try:
                block = directory.parse_entries(data, opened.stride, at, len(numbers), self.name)
            except CorruptShard:  # it takes the entry's number for the chunk's
                for place, number in enumerate(numbers):
                    directory.parse_entry(data[place * stride :][:stride], opened.stride, number, self.name)
                raise
            sizes[numbers] = self._raw_sizes(numbers, block, opened.decoder)
        return sizes

    def _raw_sizes(
        self, numbers: Sequence[int], block: directory.Chunks, decoder: codecs.Decoder
    ) -> NDArray[np.int64]:
        """Raw sizes of all chunks of a block, which are `numbers`: from the directory, or from the heads of blosc
        buffers."""
        if decoder.zip_method != codecs.METHOD_STORED:
            return block.raw_bytes
        head_bytes = block.header_hint + codecs.HEAD_BYTES
        wanted = [Range(start, min(start + head_bytes, self.source.size)) for start in block.header_offset.tolist()]
        sizes = np.zeros(len(wanted), np.int64)
        fetches = ranges.join(wanted, gap_bytes=self.source.gap_bytes, max_bytes=MAX_FETCH_BYTES)
        datas = self.source.read_ranges([fetch.range for fetch in fetches])
        for fetch, data in zip(fetches, datas, strict=True):
            for member in fetch.members:
                at = wanted[member].start - fetch.range.start
                where = f"{self.name}: chunk {numbers[member]}"
                at += directory.data_start(data, at, where)
                head = data[at : at + codecs.HEAD_BYTES]
                size = decoder.raw_size(head, int(block.stored_bytes[member]), int(block.raw_bytes[member]), where)
                if size is None:
                    raws = self.read([numbers[member]])
                    size = len(raws[0])
                sizes[member] = size
        return sizes

    def _open(self, read_at: ReadAt) -> _Opened:
        if self._opened is None:
            self._opened = self._read_tail(read_at)
        return self._opened

    def _read_tail(self, read_at: ReadAt) -> _Opened:
        spec, size = self.spec, self.source.size
        tail_bytes = min(directory.TAIL_BYTES, size)
        end = directory.parse_end(read_at(size - tail_bytes, tail_bytes), size, self.name)
        first = read_at(end.directory_offset, min(4096, end.directory_bytes))
        n_listed = self._n_listed(first, end, read_at)
        stride = directory.parse_stride(first, end, n_listed, self.name)
        entries = self._entries(n_listed, read_at) if n_listed < spec.n_chunks else None
        codec_json = None
        if codecs.needs_codec_json(spec.packing.compression, spec.itemsize):
            codec_json = self._codec_json(end, stride, n_listed, read_at)
        decoder = codecs.make_decoder(spec.packing.compression, spec.itemsize, codec_json, spec.verify, self.name)
        return _Opened(end, stride, entries, decoder)

    def _n_listed(self, first_entry: bytes, end: directory.End, read_at: ReadAt) -> int:
        """How many chunks the directory lists: all, or those that the Zarr index does not call absent."""
        spec, n_chunks = self.spec, self.spec.n_chunks
        # Only shards of stored chunks end with codec.json, which may stand where an absent chunk is missing.
        is_stored = codecs.find_codec(spec.packing.compression, self.name).zip_method == codecs.METHOD_STORED
        n_expected = n_chunks + 1 if is_stored else n_chunks
        if end.n_entries >= n_expected or spec.packing.packed_format != "indexed+zipped":
            return n_chunks
        place = directory.last_entry_range(first_entry, end)
        ends_with_codec_json = place is not None and directory.is_codec_json(read_at(*place))
        return end.n_entries - ends_with_codec_json

    def _entries(self, n_listed: int, read_at: ReadAt) -> NDArray[np.int64]:
        """Which entry of the directory each chunk has, -1 for one that is absent."""
        n_chunks, size = self.spec.n_chunks, self.source.size
        length = directory.index_bytes(n_chunks)
        if length > size:
            raise CorruptShard(f"{self.name}: {size} bytes cannot hold the index of {n_chunks} chunks")
        is_present = directory.parse_index(read_at(0, length), n_chunks, size, self.name).offset >= 0
        n_present = int(is_present.sum())
        if n_present != n_listed:
            raise CorruptShard(
                f"{self.name}: its directory lists {n_listed} chunks, its Zarr index {n_present} of {n_chunks}"
            )
        return np.where(is_present, np.cumsum(is_present) - 1, -1)

    def _codec_json(
        self, end: directory.End, stride: directory.Stride, n_listed: int, read_at: ReadAt
    ) -> bytes | None:
        place = directory.codec_json_entry_range(end, stride, n_listed)
        if place is None:
            return None
        entry = directory.parse_codec_json_entry(read_at(*place), end, self.name)
        header = read_at(entry.header_offset, min(entry.header_hint, end.directory_offset - entry.header_offset))
        start = entry.header_offset + directory.data_start(header, 0, f"{self.name}: codec.json")
        if start + entry.stored_bytes > end.directory_offset:
            raise CorruptShard(f"{self.name}: codec.json has {entry.stored_bytes} bytes at {start}, beyond the chunks")
        return read_at(start, entry.stored_bytes)


class _Window(NamedTuple):
    """Stored chunks `first` to `stop` of a component that is read sequentially, at hand for the next reads."""

    first: int
    stop: int
    run: codecs.PreparedRun


class _Fetched(NamedTuple):
    """Bytes that were read together, and the chunks in them."""

    data: bytes
    starts: NDArray[np.int64]
    """Where in `data` each chunk's payload begins."""
    chunks: directory.Chunks
    members: Sequence[int] | None
    """Which of the chunks asked for these are; None: all of them, in order."""


def _is_dense(starts: NDArray[np.int64], stops: NDArray[np.int64], gap_bytes: int) -> bool:
    """Whether ranges follow each other in ascending order without a gap worth skipping."""
    return bool(((starts[1:] >= starts[:-1]) & (starts[1:] - stops[:-1] <= gap_bytes)).all())


def _chunk_name(name: str, numbers: Sequence[int], at: int) -> str:
    return f"{name}: chunk {numbers[at]}"


def _slice(chunks: directory.Chunks, start: int, stop: int) -> directory.Chunks:
    """Consecutive chunks of a block, without copying."""
    return directory.Chunks(
        chunks.method[start:stop],
        chunks.crc[start:stop],
        chunks.stored_bytes[start:stop],
        chunks.raw_bytes[start:stop],
        chunks.header_offset[start:stop],
        chunks.header_hint,
    )


def _long_header(where: str) -> CorruptShard:
    return CorruptShard(f"{where} has a local header that is longer than its directory entry")


def _take(chunks: directory.Chunks, places: NDArray[np.int64]) -> directory.Chunks:
    """Some of the chunks of a block."""
    return directory.Chunks(
        chunks.method[places],
        chunks.crc[places],
        chunks.stored_bytes[places],
        chunks.raw_bytes[places],
        chunks.header_offset[places],
        chunks.header_hint,
    )
