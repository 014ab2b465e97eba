"""The chunks of a shard, a block at a time: directory entries, index, local headers, data, padding.

Owns what a sound chunk must be. Must not know Daf's names. `check_block` may run in any thread, several at once: what
it finds is its result.

Facts: "PackedFormat documentation" for the layout of the shard and its padding; PKWARE's APPNOTE 6.3 for the records.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dafmount.check.values import first_untrue
from dafmount.daf.catalog import Packing
from dafmount.daf.eltype import itemsize
from dafmount.errors import Corrupt, CorruptShard, UnsupportedFormat
from dafmount.shard import codecs, directory, strings
from dafmount.shard.grid import Grid
from dafmount.shard.names import chunk_names
from dafmount.source import ranges
from dafmount.source.base import ByteSource, Range

BLOCK_CHUNKS = 512
BLOCK_BYTES = 4 << 20
"""A task has at most so many chunks, and about so many raw bytes where chunks are small enough."""

MAX_FETCH_BYTES = 8 << 20
ABSENT = np.uint64(0xFFFFFFFFFFFFFFFF)
_SENTINEL_32 = 0xFFFFFFFF
_LOCAL_SIGNATURE = np.frombuffer(b"PK\x03\x04", np.uint8)
_LOCAL_ZIP64 = np.frombuffer(struct.pack("<HH", 1, 16), np.uint8)
_LOCAL_ZIP64_BYTES = 20
_STRING_BYTES = 16
"""What a string is taken to have when blocks are planned."""

_MUST_NOT_BE_SET = 0x0001 | 0x0008
"""Flags of an encrypted entry, and of one whose sizes follow it."""

READ_ERRORS = (Corrupt, UnsupportedFormat, OSError)


@dataclass(frozen=True, slots=True)
class Shard:
    """A packed component to check."""

    source: ByteSource
    grid: Grid
    packing: Packing
    eltype: str
    max_chunk_bytes: int

    @property
    def name(self) -> str:
        """How messages call it."""
        return self.source.name

    @property
    def itemsize(self) -> int | None:
        """Bytes of a value; None for strings."""
        return itemsize(self.eltype, self.name)

    @property
    def is_indexed(self) -> bool:
        """Whether a Zarr index leads the shard."""
        return self.packing.packed_format == "indexed+zipped"

    @property
    def is_gzip(self) -> bool:
        """Whether the chunks are gzip streams, of which the header is the name."""
        return codecs.find_codec(self.packing.compression).zip_method == codecs.METHOD_DEFLATE

    @property
    def block_chunks(self) -> int:
        """Chunks of a task."""
        chunk_bytes = self.grid.chunk_bytes if self.itemsize else self.grid.chunk_count * _STRING_BYTES
        return max(1, min(BLOCK_CHUNKS, BLOCK_BYTES // chunk_bytes))


class Block(NamedTuple):
    """Consecutive chunks, and where their entries lie among those of the directory."""

    first: int
    n: int
    first_entry: int
    n_entries: int


class Outcome(NamedTuple):
    """What became of a block."""

    block: Block
    read_bytes: int
    faults: list[tuple[int | None, str]]
    raw: bytearray
    """The raw chunks of numbers, one after the other; empty where nobody wants their values."""
    is_good: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OpenedShard:
    """A shard whose tail was read."""

    shard: Shard
    end: directory.End
    stride: directory.Stride
    decoder: codecs.Decoder
    n_present: int
    present_counts: list[int] = field(repr=False)
    """Chunks that are not absent, of each block."""
    has_gzip_names: bool
    """Whether names are gzip headers; those of a "zipped" shard need not be."""
    keeps_values: bool
    is_quick: bool


class _Chunks(NamedTuple):
    """Chunks whose directory entries could be read."""

    numbers: NDArray[np.int64]
    entries: NDArray[np.uint8]
    chunks: directory.Chunks
    indexed: NDArray[np.uint64] | None

    def take(self, places: NDArray[np.int64]) -> _Chunks:
        """Some of them."""
        c = self.chunks
        taken = directory.Chunks(
            c.method[places],
            c.crc[places],
            c.stored_bytes[places],
            c.raw_bytes[places],
            c.header_offset[places],
            c.header_hint,
        )
        indexed = None if self.indexed is None else self.indexed[places]
        return _Chunks(self.numbers[places], self.entries[places], taken, indexed)


def check_block(opened: OpenedShard, block: Block) -> Outcome:
    """Everything about the chunks of a block; never raises for what is wrong with the shard."""
    check = _BlockCheck(opened, block)
    try:
        check.run()
    except READ_ERRORS as error:
        check.is_good[:] = False
        check.fault(None, error)
    return Outcome(block, check.read_bytes, check.faults, check.raw, check.is_good)


class _BlockCheck:
    """The check of one block, in one thread."""

    def __init__(self, opened: OpenedShard, block: Block) -> None:
        self._opened = opened
        self._shard = opened.shard
        self._block = block
        self.faults: list[tuple[int | None, str]] = []
        self.read_bytes = 0
        self.is_good = np.zeros(block.n, np.bool_)
        keeps = self._shard.itemsize is not None and not opened.is_quick
        self.raw = bytearray(block.n * self._shard.grid.chunk_bytes if keeps else 0)

    def run(self) -> None:
        """Directory and index, then the chunks in the order in which they lie in the file."""
        listed = self._listed()
        self._check_names(listed)
        if not self._opened.is_quick:
            for fetch in self._plan(listed):
                self._check_fetch(fetch, listed.take(np.array(fetch.members)))
        elif listed.indexed is not None:
            self._check_index_lengths(listed)
        if self._shard.itemsize is not None and not self._opened.is_quick:
            self._check_numbers()
        if not self._opened.keeps_values:
            self.raw = bytearray()

    def fault(self, chunk: int | None, message: str | Exception) -> None:
        """Something is wrong, with one chunk if `chunk` is given."""
        self.faults.append((chunk, str(message)))

    # Directory and index.

    def _listed(self) -> _Chunks:
        block, opened, shard = self._block, self._opened, self._shard
        numbers = np.arange(block.first, block.first + block.n, dtype=np.int64)
        pairs = self._read_index(block.first, block.n)
        if block.n_entries < block.n:
            assert pairs is not None
            is_absent = absent_chunks(pairs)
            self.is_good |= is_absent  # they read as zeros
            numbers, pairs = numbers[~is_absent], pairs[~is_absent]
        stride = opened.stride.entry_bytes
        data = self._read(opened.end.directory_offset + block.first_entry * stride, block.n_entries * stride)
        entries = np.frombuffer(data, np.uint8).reshape(block.n_entries, stride)
        try:
            chunks = directory.parse_entries(data, opened.stride, block.first, block.n_entries, shard.name)
        except CorruptShard:
            return self._listed_one_by_one(numbers, entries, pairs)
        return _Chunks(numbers, entries, chunks, pairs)

    def _listed_one_by_one(
        self, numbers: NDArray[np.int64], entries: NDArray[np.uint8], pairs: NDArray[np.uint64] | None
    ) -> _Chunks:
        good: list[int] = []
        found: list[directory.Entry] = []
        for at, number in enumerate(numbers.tolist()):
            try:
                entry = directory.parse_entry(entries[at].tobytes(), self._opened.stride, number, self._shard.name)
            except CorruptShard as error:
                self.fault(number, error)
                continue
            good.append(at)
            found.append(entry)
        places = np.array(good, np.int64)
        chunks = directory.Chunks(
            np.array([entry.method for entry in found], np.uint16),
            np.array([entry.crc for entry in found], np.uint32),
            np.array([entry.stored_bytes for entry in found], np.int64),
            np.array([entry.raw_bytes for entry in found], np.int64),
            np.array([entry.header_offset for entry in found], np.int64),
            self._opened.stride.header_hint,
        )
        return _Chunks(numbers[places], entries[places], chunks, None if pairs is None else pairs[places])

    def _read_index(self, first: int, n: int) -> NDArray[np.uint64] | None:
        if not self._shard.is_indexed:
            return None
        size = directory.INDEX_ENTRY_BYTES
        return index_pairs(self._read(first * size, n * size))

    def _check_names(self, listed: _Chunks) -> None:
        stride = self._opened.stride
        expected_bytes = name_bytes(self._shard.grid, is_gzip_name=self._opened.has_gzip_names)
        if len(listed.numbers) and stride.name_bytes == expected_bytes:
            expected = self._expected_names(listed)
            found = _names_of(listed, stride)
            for at in np.flatnonzero((found != expected).any(axis=1)).tolist():
                self.fault(
                    int(listed.numbers[at]),
                    f"the directory calls it {found[at].tobytes()!r}, expected {expected[at].tobytes()!r}",
                )
        flags = np.ascontiguousarray(listed.entries[:, 8:10]).view("<u2").reshape(-1)
        for at in np.flatnonzero(flags & _MUST_NOT_BE_SET).tolist():
            self.fault(
                int(listed.numbers[at]),
                f"the directory gives it the ZIP flags {int(flags[at]):#06x}, expected neither bit 0 nor bit 3",
            )
        if self._shard.is_indexed:
            least = directory.index_bytes(self._shard.grid.n_chunks)
            for at in np.flatnonzero(listed.chunks.header_offset < least).tolist():
                self.fault(
                    int(listed.numbers[at]),
                    f"begins at byte {listed.chunks.header_offset[at]}, within the Zarr index of {least} bytes",
                )

    def _expected_names(self, listed: _Chunks) -> NDArray[np.uint8]:
        return chunk_names(listed.numbers, self._shard.grid.grid_shape, is_gzip=self._opened.has_gzip_names)

    def _check_index_lengths(self, listed: _Chunks) -> None:
        assert listed.indexed is not None
        lengths = listed.chunks.stored_bytes.astype(np.uint64) + np.uint64(self._more_in_index)
        for at in np.flatnonzero(listed.indexed[:, 1] != lengths).tolist():
            self.fault(
                int(listed.numbers[at]),
                f"the Zarr index gives it {listed.indexed[at, 1]} bytes, expected {lengths[at]}",
            )

    @property
    def _more_in_index(self) -> int:
        """Bytes that a chunk has in the Zarr index in addition to those in the directory."""
        return codecs.GZIP_HEADER_BYTES + codecs.GZIP_TRAILER_BYTES if self._shard.is_gzip else 0

    # Headers and payloads.

    def _read(self, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return self._shard.source.read(offset, length)

    def _plan(self, listed: _Chunks) -> list[ranges.Fetch]:
        trailer = codecs.GZIP_TRAILER_BYTES if self._shard.is_gzip else 0
        starts = listed.chunks.header_offset
        stops = starts + listed.chunks.stored_bytes + (listed.chunks.header_hint + trailer)
        stops = np.minimum(stops, self._opened.end.directory_offset)
        wanted = [Range(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
        return ranges.join(wanted, gap_bytes=self._shard.source.gap_bytes, max_bytes=MAX_FETCH_BYTES)

    def _check_fetch(self, fetch: ranges.Fetch, part: _Chunks) -> None:
        try:
            data = self._read(fetch.range.start, fetch.range.stop - fetch.range.start)
        except READ_ERRORS as error:
            for number in part.numbers.tolist():
                self.fault(number, error)
            return
        block = np.frombuffer(data, np.uint8)
        at = part.chunks.header_offset - fetch.range.start
        starts, is_header = self._check_headers(block, at, part)
        fits = is_header & (starts + part.chunks.stored_bytes <= len(data))
        for place in np.flatnonzero(is_header & ~fits).tolist():
            self.fault(int(part.numbers[place]), "its local header is longer than its directory entry lets expect")
        places = np.flatnonzero(fits)
        part, starts = part.take(places), starts[places]
        self._check_index(part, starts + fetch.range.start)
        if self._shard.is_gzip:
            self._check_trailers(data, part, starts)
        if self._shard.itemsize is None:
            self._decode_strings(data, part, starts)
        else:
            self._decode_numbers(data, part, starts)

    def _check_headers(
        self, block: NDArray[np.uint8], at: NDArray[np.int64], part: _Chunks
    ) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where the data begin, and whether there is a local header at all. Compares headers with the directory."""
        name_bytes = self._opened.stride.name_bytes
        head_bytes = directory.LOCAL_HEADER_BYTES + name_bytes
        padded = np.concatenate((block, np.zeros(head_bytes + _LOCAL_ZIP64_BYTES, np.uint8)))
        heads = padded[at[:, None] + np.arange(head_bytes + _LOCAL_ZIP64_BYTES)]
        lengths = np.ascontiguousarray(heads[:, 26:30]).view("<u2").astype(np.int64)
        is_header = (heads[:, :4] == _LOCAL_SIGNATURE).all(axis=1)
        chunks = part.chunks
        agrees = (
            (heads[:, 6:10] == part.entries[:, 8:12]).all(axis=1)  # flags and method
            & (heads[:, 14:18] == part.entries[:, 16:20]).all(axis=1)  # CRC
            & (lengths[:, 0] == name_bytes)
            & (heads[:, directory.LOCAL_HEADER_BYTES : head_bytes] == _names_of(part, self._opened.stride)).all(axis=1)
        )
        sizes = np.ascontiguousarray(heads[:, 18:26]).view("<u4").astype(np.int64)
        is_plain = (sizes[:, 0] == chunks.stored_bytes) & (sizes[:, 1] == chunks.raw_bytes)
        zip64 = np.ascontiguousarray(heads[:, head_bytes:])
        numbers = np.ascontiguousarray(zip64[:, 4:]).view("<u8")
        is_zip64 = (
            (sizes == _SENTINEL_32).all(axis=1)
            & (lengths[:, 1] >= _LOCAL_ZIP64_BYTES)
            & (zip64[:, :4] == _LOCAL_ZIP64).all(axis=1)
            & (numbers[:, 0] == chunks.raw_bytes.astype(np.uint64))
            & (numbers[:, 1] == chunks.stored_bytes.astype(np.uint64))
        )
        agrees &= is_plain | is_zip64
        for place in np.flatnonzero(~(is_header & agrees)).tolist():
            self._say_header(int(part.numbers[place]), heads[place].tobytes(), part.entries[place].tobytes())
        return at + directory.LOCAL_HEADER_BYTES + lengths.sum(axis=1), is_header

    def _say_header(self, number: int, head: bytes, entry: bytes) -> None:
        """What distinguishes a local header from its directory entry."""
        try:
            directory.data_start(head, 0, self._called(number))
        except CorruptShard as error:
            self.fault(number, error)
            return
        faults = header_faults(head, entry, "chunk")
        for fault in faults or ["its local header and its directory entry differ"]:
            self.fault(number, fault)

    def _check_index(self, part: _Chunks, data_offset: NDArray[np.int64]) -> None:
        if part.indexed is None:
            return
        header = codecs.GZIP_HEADER_BYTES if self._shard.is_gzip else 0
        offset = (data_offset - header).astype(np.uint64)
        length = part.chunks.stored_bytes.astype(np.uint64) + np.uint64(self._more_in_index)
        for at in np.flatnonzero((part.indexed[:, 0] != offset) | (part.indexed[:, 1] != length)).tolist():
            found = part.indexed[at].tolist()
            what = "calls it absent" if found == [int(ABSENT)] * 2 else f"puts its {found[1]} bytes at {found[0]}"
            self.fault(int(part.numbers[at]), f"the Zarr index {what}, expected {length[at]} at {offset[at]}")

    def _check_trailers(self, data: bytes, part: _Chunks, starts: NDArray[np.int64]) -> None:
        """The dead bytes after a gzip chunk, which end the stream that Zarr reads."""
        chunks = part.chunks
        for at, (start, stored) in enumerate(zip(starts.tolist(), chunks.stored_bytes.tolist(), strict=True)):
            found = data[start + stored : start + stored + codecs.GZIP_TRAILER_BYTES]
            expected = struct.pack("<II", int(chunks.crc[at]), int(chunks.raw_bytes[at]) & _SENTINEL_32)
            if found != expected and self._shard.is_indexed:
                self.fault(int(part.numbers[at]), f"its gzip trailer is {found.hex()}, expected {expected.hex()}")

    # Chunks.

    def _decode_numbers(self, data: bytes, part: _Chunks, starts: NDArray[np.int64]) -> None:
        size, decoder = self._shard.grid.chunk_bytes, self._opened.decoder
        numbers, rows = part.numbers.tolist(), part.numbers - self._block.first
        places = (rows * size).tolist()
        try:
            decoder.decode_run(data, starts, part.chunks, self.raw, places, size, lambda at: self._called(numbers[at]))
            self.is_good[rows] = True
            return
        except (CorruptShard, UnsupportedFormat):
            pass  # which ones, and what is wrong with each
        for at, row in enumerate(rows.tolist()):
            one = part.take(np.array([at])).chunks
            called = self._called(numbers[at])
            try:
                decoder.decode_run(
                    data, starts[at : at + 1], one, self.raw, places[at : at + 1], size, partial(_same_name, called)
                )
                self.is_good[row] = True
            except (CorruptShard, UnsupportedFormat) as error:
                self.fault(numbers[at], error)

    def _called(self, number: int) -> str:
        return f"{self._shard.name}: chunk {number}"

    def _decode_strings(self, data: bytes, part: _Chunks, starts: NDArray[np.int64]) -> None:
        view, chunks = memoryview(data), part.chunks
        for at, number in enumerate(part.numbers.tolist()):
            start = int(starts[at])
            where = self._called(number)
            try:
                raw = self._opened.decoder.decode(
                    view[start : start + int(chunks.stored_bytes[at])],
                    int(chunks.method[at]),
                    int(chunks.crc[at]),
                    int(chunks.raw_bytes[at]),
                    None,
                    self._shard.max_chunk_bytes,
                    where,
                )
                self._check_strings(number, raw, where)
            except (CorruptShard, UnsupportedFormat) as error:
                self.fault(number, error)

    def _check_strings(self, number: int, raw: bytes | bytearray, where: str) -> None:
        grid = self._shard.grid
        if grid.is_sequential:
            lines = strings.decode_strings(raw, grid.chunk_count, grid.valid_count(number), where)
        else:
            lines = strings.decode_strings(raw, grid.chunk_count, grid.chunk_count, where)
            rows, columns = _valid_shape(grid, number)
            filled = np.array([line != b"" for line in lines.split(b"\n")[:-1]])
            if _has_padding(filled.reshape(grid.chunk_shape[1], grid.chunk_shape[0]), rows, columns):
                raise CorruptShard(f"{where}: strings beyond the property's end are not empty")
        try:
            lines.decode("utf-8")
        except UnicodeDecodeError as error:
            line = lines.count(b"\n", 0, error.start)
            raise CorruptShard(f"{where}: string {line} is no valid UTF-8: {error.reason}") from error

    def _check_numbers(self) -> None:
        """Padding, and the bytes of Bools."""
        grid, width = self._shard.grid, self._shard.itemsize or 1
        raw = np.frombuffer(self.raw, np.uint8).reshape(self._block.n, grid.chunk_bytes)
        numbers = np.arange(self._block.first, self._block.first + self._block.n, dtype=np.int64)
        for row in np.flatnonzero(self.is_good & _at_edge(grid, numbers)).tolist():
            rows, columns = _valid_shape(grid, int(numbers[row]))
            chunk = raw[row].reshape(-1, grid.chunk_shape[0] * width)
            if _has_padding(chunk, rows * width, columns):
                self.fault(int(numbers[row]), "the padding beyond the property's end is not all zeros")
        if self._shard.eltype == "Bool" and first_untrue(raw.reshape(-1)) is not None:
            for row in range(self._block.n):
                at = first_untrue(raw[row])
                if at is not None and self.is_good[row]:
                    self.fault(
                        int(numbers[row]), f"value {at} is the byte {int(raw[row, at])}, expected a Bool: 0 or 1"
                    )


def header_faults(header: bytes, entry: bytes, what: str) -> list[str]:
    """What distinguishes the local header of a sound signature from its directory entry (APPNOTE 4.3.7, 4.3.12)."""
    for said, start, central, length in (
        ("ZIP flags", 6, 8, 2),
        ("a ZIP method of", 8, 10, 2),
        ("a CRC-32 of", 14, 16, 4),
        ("a name length of", 26, 28, 2),
    ):
        found = int.from_bytes(header[start : start + length], "little")
        wanted = int.from_bytes(entry[central : central + length], "little")
        if found != wanted:
            return [f"the local header of the {what} has {said} {found:#x}, its directory entry {wanted:#x}"]
    name_stop = 30 + int.from_bytes(header[26:28], "little")
    name = entry[46 : 16 + name_stop]
    if header[30:name_stop] != name:
        return [f"the local header of the {what} has the name {header[30:name_stop]!r}, its directory entry {name!r}"]
    extra_bytes = int.from_bytes(header[28:30], "little")
    found_sizes = _sizes(header[18:26], header[name_stop : name_stop + extra_bytes])
    wanted_sizes = _sizes(entry[20:28], entry[16 + name_stop :])
    if found_sizes != wanted_sizes:
        return [f"the local header of the {what} has the sizes {found_sizes}, its directory entry {wanted_sizes}"]
    return []


def _sizes(narrow: bytes, extra: bytes) -> tuple[int, int]:
    """Stored and raw size, from the ZIP64 field (4.5.3) at the beginning of `extra` where both have sentinels."""
    stored, raw = struct.unpack("<II", narrow)
    if (stored, raw) == (_SENTINEL_32, _SENTINEL_32) and len(extra) >= _LOCAL_ZIP64_BYTES:
        kind, length, wide_raw, wide_stored = struct.unpack_from("<HHQQ", extra)
        if kind == 1 and 16 <= length <= len(extra) - 4:
            return wide_stored, wide_raw
    return stored, raw


def _same_name(name: str, at: int) -> str:
    return name


def _names_of(part: _Chunks, stride: directory.Stride) -> NDArray[np.uint8]:
    start = directory.CENTRAL_ENTRY_BYTES
    return part.entries[:, start : start + stride.name_bytes]


def _at_edge(grid: Grid, numbers: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which chunks have padding."""
    edge = np.zeros(len(numbers), np.bool_)
    rest = numbers
    for size, chunk_size, n_blocks in zip(grid.shape, grid.chunk_shape, grid.grid_shape, strict=True):
        if size % chunk_size:
            edge |= rest % n_blocks == n_blocks - 1
        rest = rest // n_blocks
    return edge


def _valid_shape(grid: Grid, number: int) -> tuple[int, int]:
    """Rows and columns of a chunk that are not padding."""
    valid = []
    for size, chunk_size, n_blocks in zip(grid.shape, grid.chunk_shape, grid.grid_shape, strict=True):
        number, block = divmod(number, n_blocks)
        valid.append(min(chunk_size, size - block * chunk_size))
    return (valid[0], valid[1]) if len(valid) == 2 else (valid[0], 1)


def _has_padding(chunk: NDArray[np.generic], rows: int, columns: int) -> bool:
    """Whether anything but zeros lies beyond `rows` and `columns` of a chunk, one column a row."""
    return bool(chunk[columns:].any() or chunk[:columns, rows:].any())


def name_bytes(grid: Grid, *, is_gzip_name: bool) -> int:
    """How long the name of a chunk is."""
    names = chunk_names(np.zeros(1, np.int64), grid.grid_shape, is_gzip=is_gzip_name)
    return int(names.shape[1])


def index_pairs(block: bytes) -> NDArray[np.uint64]:
    return np.frombuffer(block, "<u8").reshape(-1, 2)


def absent_chunks(pairs: NDArray[np.uint64]) -> NDArray[np.bool_]:
    absent: NDArray[np.bool_] = (pairs == ABSENT).all(axis=1)
    return absent
