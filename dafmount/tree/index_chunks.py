"""Raw chunks of a shard that is far away, found with few and short requests.

Owns the way over the Zarr index at the start of an "indexed+zipped" shard: 16 bytes a chunk instead of the 90 of the
ZIP directory, and no end record or first entry to read before. What the index lacks, method, CRC-32 and sizes, is in
the local header before each chunk, which is fetched with it and must bear the chunk's own name; where anything
disagrees the ZIP directory decides, through the usual reader. Must not know what the values mean or who caches them.
Threads share a reader; what they learn twice is merely learnt twice.

Facts: "PackedFormat documentation, Dual-format shard layout"; PKWARE's APPNOTE 4.3.7 and 4.5.3; the Zarr v3
`sharding_indexed` codec (ZEP 2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dafmount.errors import Corrupt, CorruptShard
from dafmount.shard import codecs, directory
from dafmount.shard.grid import Grid
from dafmount.shard.names import chunk_names
from dafmount.source import ranges
from dafmount.source.ahead import Ahead
from dafmount.source.base import Range
from dafmount.tree.chunks import Raw, ShardReader, ShardSpec, WouldWait

log = logging.getLogger(__name__)

PART_CHUNKS = 256
"""Entries of the index that are read together: 4 KiB, mostly a few columns."""

RUN_OF_PARTS = 64
"""The most parts read together, where those before were read already."""

SMALL_INDEX_BYTES = 64 * 1024
"""An index up to this size is read as a whole at once."""

MAX_INDEX_BYTES = 4 << 20
"""An index up to this size is read as a whole once `MAX_PARTS` parts of it were needed."""

MAX_PARTS = 2

SMALL_SHARD_BYTES = 4 << 20
"""A shard up to this size is fetched as a whole when all its chunks' sizes are asked for."""

MAX_FETCH_BYTES = 8 << 20
"""The longest range that near chunks are joined into."""

_LOCAL_HEADER = np.dtype(
    {
        "names": ["signature", "flags", "method", "crc", "stored", "raw", "name_bytes", "extra_bytes"],
        "formats": ["<u4", "<u2", "<u2", "<u4", "<u4", "<u4", "<u2", "<u2"],
        "offsets": [0, 6, 8, 14, 18, 22, 26, 28],
        "itemsize": directory.LOCAL_HEADER_BYTES,
    }
)
_SIGNATURE = 0x04034B50
_FLAGS_THAT_HIDE = 0x0009  # encrypted, or sizes that follow the data (APPNOTE 4.4.4)
_ZIP64 = np.dtype([("kind", "<u2"), ("size", "<u2"), ("raw", "<u8"), ("stored", "<u8")])
_SENTINEL_32 = 0xFFFFFFFF

_ReadIndex = Callable[[Range], bytes]


class _Disagreement(Exception):
    """Index and local header do not fit."""


class IndexedShardReader:
    """As ShardReader, for a shard that is read through `Ahead`."""

    def __init__(self, source: Ahead, grid: Grid, spec: ShardSpec, name: str) -> None:
        self.source = source
        self.spec = spec
        self.name = name
        self._grid = grid
        self._by_directory = ShardReader(source, spec, name)
        self._index: _Index | None = None
        codec = spec.packing.compression
        is_indexed = spec.packing.packed_format == "indexed+zipped"
        if is_indexed and not codecs.needs_codec_json(codec, spec.itemsize):
            self._index = _Index(source, spec.n_chunks, name)
            self._decoder = codecs.make_decoder(codec, spec.itemsize, None, spec.verify, name)
            self._is_gzip = codec == "gzip"
            self._name_bytes = len(self._names([0])[0]) if spec.n_chunks else 0
            self._before = directory.LOCAL_HEADER_BYTES + (0 if self._is_gzip else self._name_bytes + _ZIP64.itemsize)
            """Bytes of a local header that lie before what the index points at; for gzip that is the header's name."""

    def read(self, chunks: Sequence[int]) -> list[Raw]:
        """The raw chunks, in the order asked for (ascending numbers)."""
        return self._read(chunks, is_waiting=True)

    def read_nowait(self, chunks: Sequence[int]) -> list[Raw]:
        """As `read`, but raises WouldWait rather than wait for bytes."""
        return self._read(chunks, is_waiting=False)

    def read_run(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview:
        """Consecutive numeric chunks from `first` on, laid into one buffer at `places` (see `shard.grid.Run`)."""
        return self._read_run(first, places, buffer_bytes, is_waiting=True)

    def read_run_nowait(self, first: int, places: Sequence[int], buffer_bytes: int) -> memoryview:
        """As `read_run`, but raises WouldWait rather than wait for bytes."""
        return self._read_run(first, places, buffer_bytes, is_waiting=False)

    def raw_sizes(self) -> NDArray[np.int64]:
        """The bytes of every raw chunk, which only the directory or the chunks' heads tell."""
        size = self.source.size
        if size <= SMALL_SHARD_BYTES:
            self.source.prefetch(Range(0, size), is_needed=False)
        return self._by_directory.raw_sizes()

    def prefetch(self, chunks: Sequence[int], piece_bytes: int, *, is_needed: bool) -> None:
        """Begins to fetch chunks, at most about `piece_bytes` by one request; waits only for the index."""
        if self._index is None:
            return  # the directory's reader fetches when it reads
        try:
            starts, stops = self._places(chunks, self._index.read(chunks))
        except (_Disagreement, Corrupt):
            return  # whoever reads the chunks finds out
        pairs = zip(starts.tolist(), stops.tolist(), strict=True)
        wanted = [Range(start, stop) for start, stop in pairs if start < stop]
        for fetch in ranges.join(wanted, gap_bytes=self.source.gap_bytes, max_bytes=piece_bytes):
            self.source.prefetch(fetch.range, is_needed=is_needed)

    def close(self) -> None:
        """Let go of the source."""
        self.source.close()

    def _read(self, chunks: Sequence[int], *, is_waiting: bool) -> list[Raw]:
        index = self._index
        if index is None:
            return self._by_directory.read(chunks) if is_waiting else self._by_directory.read_nowait(chunks)
        try:
            found: dict[int, Raw] = {}
            for data, starts, part, numbers in self._fetched(chunks, index, is_waiting=is_waiting):
                found.update(zip(numbers, self._decoded(data, starts, part, numbers), strict=True))
        except _Disagreement as reason:
            self._give_up_index(reason)
            return self._read(chunks, is_waiting=is_waiting)
        return [found[chunk] if chunk in found else self._absent() for chunk in chunks]

    def _read_run(self, first: int, places: Sequence[int], buffer_bytes: int, *, is_waiting: bool) -> memoryview:
        index, size = self._index, self.spec.chunk_bytes
        if index is None or size is None:
            if is_waiting:
                return self._by_directory.read_run(first, places, buffer_bytes)
            return self._by_directory.read_run_nowait(first, places, buffer_bytes)
        out = bytearray(buffer_bytes)
        chunks = range(first, first + len(places))
        n_decoded = 0
        try:
            for data, starts, part, numbers in self._fetched(chunks, index, is_waiting=is_waiting):
                targets = places if numbers is chunks else [places[number - first] for number in numbers]
                where = partial(_chunk_name, self.name, numbers)
                self._decoder.decode_run(data, starts, part, out, targets, size, where)
                n_decoded += len(numbers)
        except _Disagreement as reason:
            self._give_up_index(reason)
            return self._read_run(first, places, buffer_bytes, is_waiting=is_waiting)
        if n_decoded < len(chunks):
            # Those that are absent do not cover the padding of the ones before them.
            for place, raw in zip(places, self._read(chunks, is_waiting=is_waiting), strict=True):
                out[place : place + size] = raw
        return memoryview(out)

    def _absent(self) -> Raw:
        return self.spec.absent_strings if self.spec.chunk_bytes is None else bytes(self.spec.chunk_bytes)

    def _give_up_index(self, reason: _Disagreement) -> None:
        log.warning("%s: its Zarr index is not used: %s", self.name, reason)
        self._index = None

    # Where chunks lie.

    def _names(self, numbers: Sequence[int]) -> NDArray[np.uint8]:
        return chunk_names(np.fromiter(numbers, np.int64, len(numbers)), self._grid.grid_shape, is_gzip=self._is_gzip)

    def _places(self, chunks: Sequence[int], pairs: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where headers begin and payloads end; an absent chunk takes no room."""
        offset = pairs[:, 0]
        starts = offset - self._before
        stops = offset + pairs[:, 1]
        if len(offset) and int(starts.min()) < 0:
            is_absent = offset < 0
            starts[is_absent] = stops[is_absent] = 0
            if (starts < 0).any():
                worst = chunks[int((starts < 0).argmax())]
                raise _Disagreement(f"chunk {worst} begins where there is no room for its local header")
        if len(stops) and int(stops.max()) > self.source.size:
            raise _Disagreement(f"chunk {chunks[int(stops.argmax())]} ends beyond the shard")
        return starts, stops

    def _fetched(
        self, chunks: Sequence[int], index: _Index, *, is_waiting: bool
    ) -> Iterator[tuple[bytes, NDArray[np.int64], directory.Chunks, Sequence[int]]]:
        """Bytes, where in them payloads begin, what their headers say, and of which chunks; without absent chunks."""
        pairs = index.read(chunks) if is_waiting else index.read_nowait(chunks)
        starts, stops = self._places(chunks, pairs)
        if _is_one_run(starts, stops, self.source.gap_bytes):
            begin = int(starts[0])
            data = self._bytes([Range(begin, int(stops[-1]))], is_waiting=is_waiting)[0]
            yield data, *self._headers(data, starts - begin, pairs[:, 1], chunks, index), chunks
            return
        present = np.flatnonzero(starts < stops)
        wanted = [Range(starts[at], stops[at]) for at in present.tolist()]
        fetches = ranges.join(wanted, gap_bytes=self.source.gap_bytes, max_bytes=MAX_FETCH_BYTES)
        datas = self._bytes([fetch.range for fetch in fetches], is_waiting=is_waiting)
        for fetch, data in zip(fetches, datas, strict=True):
            members = present[list(fetch.members)]
            numbers = [chunks[member] for member in members.tolist()]
            headers = starts[members] - fetch.range.start
            yield data, *self._headers(data, headers, pairs[members, 1], numbers, index), numbers

    def _bytes(self, wanted: Sequence[Range], *, is_waiting: bool) -> list[bytes]:
        if is_waiting:
            return self.source.read_ranges(wanted)
        datas = []
        for start, stop in wanted:
            data = self.source.read_here(start, stop - start)
            if data is None:
                raise WouldWait
            datas.append(data)
        return datas

    def _headers(
        self,
        data: bytes,
        starts: NDArray[np.int64],
        length: NDArray[np.int64],
        numbers: Sequence[int],
        index: _Index,
    ) -> tuple[NDArray[np.int64], directory.Chunks]:
        """Where payloads begin, and what the local headers at `starts` say; raises _Disagreement."""
        octets = np.frombuffer(data, np.uint8)
        fields = _gather(octets, starts, directory.LOCAL_HEADER_BYTES).view(_LOCAL_HEADER)[:, 0]
        n_name = self._name_bytes
        n_extra = 0 if self._is_gzip else _ZIP64.itemsize
        is_wrong = (fields["signature"] != _SIGNATURE) | (fields["flags"] & _FLAGS_THAT_HIDE != 0)
        is_wrong |= (fields["name_bytes"] != n_name) | (fields["extra_bytes"] != n_extra)
        name_starts = starts + directory.LOCAL_HEADER_BYTES
        if not index.is_verified:
            is_wrong |= (_gather(octets, name_starts, n_name) != self._names(numbers)).any(axis=1)
        if self._is_gzip:
            raw, stored = fields["raw"].astype(np.int64), fields["stored"].astype(np.int64)
            is_wrong |= stored + n_name + codecs.GZIP_TRAILER_BYTES != length
        else:
            extra = _gather(octets, name_starts + n_name, n_extra).view(_ZIP64)[:, 0]
            raw, stored = extra["raw"].astype(np.int64), extra["stored"].astype(np.int64)
            is_wrong |= (fields["raw"] != _SENTINEL_32) | (fields["stored"] != _SENTINEL_32)
            is_wrong |= (extra["kind"] != 1) | (extra["size"] != 16) | (stored != length)
        if is_wrong.any():
            raise _Disagreement(f"the local header of chunk {numbers[int(is_wrong.argmax())]} is not what it leads to")
        data_starts = name_starts + (n_name + n_extra)
        crc, method = fields["crc"].astype(np.uint32), fields["method"].astype(np.uint16)
        return data_starts, directory.Chunks(method, crc, stored, raw, starts, 0)

    # Decoding.

    def _decoded(
        self, data: bytes, starts: NDArray[np.int64], part: directory.Chunks, numbers: Sequence[int]
    ) -> list[Raw]:
        size = self.spec.chunk_bytes
        if size is None:
            return self._decoded_strings(data, starts, part, numbers)
        out = bytearray(size * len(numbers))
        places = range(0, len(out), size)
        self._decoder.decode_run(data, starts, part, out, places, size, partial(_chunk_name, self.name, numbers))
        if len(numbers) == 1:
            return [out]
        view = memoryview(out)
        return [bytes(view[place : place + size]) for place in places]

    def _decoded_strings(
        self, data: bytes, starts: NDArray[np.int64], part: directory.Chunks, numbers: Sequence[int]
    ) -> list[Raw]:
        view = memoryview(data)
        limit = self.spec.max_chunk_bytes
        rows = zip(starts.tolist(), part.stored_bytes.tolist(), part.method.tolist(), part.crc.tolist(), strict=True)
        return [
            self._decoder.decode(
                view[start : start + stored],
                method,
                crc,
                int(part.raw_bytes[at]),
                None,
                limit,
                f"{self.name}: chunk {numbers[at]}",
            )
            for at, (start, stored, method, crc) in enumerate(rows)
        ]


class _Index:
    """The Zarr index of a shard, read in parts, or whole where that is cheaper.

    Only the whole has a checksum; an entry of a part is trusted as far as it leads to the header of its chunk.
    """

    def __init__(self, source: Ahead, n_chunks: int, name: str) -> None:
        self._source = source
        self._n_chunks = n_chunks
        self._name = name
        self._whole: NDArray[np.int64] | None = None
        self._parts: dict[int, NDArray[np.int64]] = {}

    @property
    def is_verified(self) -> bool:
        """Whether all entries were found to have the checksum that their writer gave them."""
        return self._whole is not None

    def read(self, chunks: Sequence[int]) -> NDArray[np.int64]:
        """Offset and length of each chunk, a row each, -1 for those absent; raises _Disagreement."""
        return self._read(chunks, self._read_waiting)

    def read_nowait(self, chunks: Sequence[int]) -> NDArray[np.int64]:
        """As `read`, but raises WouldWait rather than wait for bytes."""
        return self._read(chunks, self._read_here)

    def _read_waiting(self, wanted: Range) -> bytes:
        if self._parts and wanted.start == 0 and wanted.stop == directory.index_bytes(self._n_chunks):
            return self._source.read_anew(wanted)
        return self._source.read_ranges([wanted])[0]

    def _read_here(self, wanted: Range) -> bytes:
        data = self._source.read_here(wanted.start, wanted.stop - wanted.start)
        if data is None:
            raise WouldWait
        return data

    def _read(self, chunks: Sequence[int], read: _ReadIndex) -> NDArray[np.int64]:
        if self._whole is not None:
            return _rows(self._whole, chunks)
        numbers = np.fromiter(chunks, np.int64, len(chunks))
        needed = np.unique(numbers // PART_CHUNKS).tolist()
        missing = [part for part in needed if part not in self._parts]
        if missing:
            whole_bytes = directory.index_bytes(self._n_chunks)
            n_parts = len(self._parts) + len(missing)
            if whole_bytes <= SMALL_INDEX_BYTES or (n_parts > MAX_PARTS and whole_bytes <= MAX_INDEX_BYTES):
                self._read_whole(Range(0, whole_bytes), read)
            else:
                self._read_parts(missing, read)
        if self._whole is not None:
            return _rows(self._whole, chunks)
        rows = [self._parts[part][numbers[numbers // PART_CHUNKS == part] - part * PART_CHUNKS] for part in needed]
        return np.concatenate(rows) if rows else np.zeros((0, 2), np.int64)

    def _read_whole(self, wanted: Range, read: _ReadIndex) -> None:
        try:
            index = directory.parse_index(read(wanted), self._n_chunks, 1 << 62, self._name)
        except CorruptShard as error:
            raise _Disagreement(str(error)) from error
        self._whole = np.stack((index.offset, index.length), axis=1)
        self._parts.clear()

    def _read_parts(self, missing: Sequence[int], read: _ReadIndex) -> None:
        n_parts = -(-self._n_chunks // PART_CHUNKS)
        first, last = missing[0], missing[-1]
        before = 0
        while before < RUN_OF_PARTS and first - 1 - before in self._parts:
            before += 1
        last = max(last, min(first + min(2 * before, RUN_OF_PARTS), n_parts) - 1)
        start, stop = first * PART_CHUNKS, min((last + 1) * PART_CHUNKS, self._n_chunks)
        block = read(Range(start * directory.INDEX_ENTRY_BYTES, stop * directory.INDEX_ENTRY_BYTES))
        pairs = np.frombuffer(block, "<u8").reshape(-1, 2)
        is_absent = (pairs == np.uint64(0xFFFFFFFFFFFFFFFF)).all(axis=1)
        if ((pairs >= np.uint64(1 << 62)).any(axis=1) & ~is_absent).any():
            raise _Disagreement("an entry points beyond what a file can hold")
        signed = pairs.view(np.int64)
        for part in range(first, last + 1):
            at = (part - first) * PART_CHUNKS
            self._parts[part] = signed[at : at + PART_CHUNKS]


def _rows(pairs: NDArray[np.int64], chunks: Sequence[int]) -> NDArray[np.int64]:
    if isinstance(chunks, range) and chunks.step == 1:
        return pairs[chunks.start : chunks.stop]
    found: NDArray[np.int64] = pairs[np.fromiter(chunks, np.int64, len(chunks))]
    return found


def _is_one_run(starts: NDArray[np.int64], stops: NDArray[np.int64], gap_bytes: int) -> bool:
    """Whether chunks, none of them absent, lie one after the other, so that one request gets them all."""
    if not len(starts) or int(stops[-1]) - int(starts[0]) > MAX_FETCH_BYTES or not (starts < stops).all():
        return False
    gaps = starts[1:] - stops[:-1]
    return not len(gaps) or (int(gaps.min()) >= 0 and int(gaps.max()) <= gap_bytes)


def _gather(octets: NDArray[np.uint8], starts: NDArray[np.int64], length: int) -> NDArray[np.uint8]:
    """`length` bytes from each of `starts` on, a row each; raises _Disagreement where they are not there."""
    if len(starts) and (int(starts.min()) < 0 or int(starts.max()) + length > len(octets)):
        raise _Disagreement("a local header lies outside of what it leads to")
    gathered: NDArray[np.uint8] = octets[starts[:, None] + np.arange(length)]
    return gathered


def _chunk_name(name: str, numbers: Sequence[int], at: int) -> str:
    return f"{name}: chunk {numbers[at]}"
