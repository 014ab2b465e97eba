"""Writes a packed shard: a ZIP archive that is a Zarr v3 `sharding_indexed` array as well.

Owns the layout of what is written, byte for byte as upstream writes it. Must not know where the shard goes: it gets a
seekable file-like object and uses only `seek`, `tell` and `write`. A ShardWriter belongs to one thread; `encode_chunk`
may run in several, with `append_encoded` taking their results in chunk order.

Facts: "PackedFormat documentation, Dual-format shard layout" and "Per-codec ZIP method and self-description"; PKWARE's
APPNOTE 6.3 for the records; dates, versions, flags and names as in shards that DataAxesFormats.jl 0.3.0 wrote.
"""

from __future__ import annotations

import base64
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from dafmount.errors import UnsupportedFormat
from dafmount.shard import codecs
from dafmount.shard.directory import CENTRAL_ENTRY_BYTES, INDEX_CHECKSUM_BYTES, LOCAL_HEADER_BYTES, index_bytes
from dafmount.shard.grid import Grid, make_grid
from dafmount.shard.names import GZIP_NAME, chunk_names
from dafmount.shard.strings import encode_strings

_VERSION = 45  # APPNOTE 4.4.3.2: ZIP64
_VERSION_DEFLATE = 20
_MADE_BY = 3 << 8 | 30  # UNIX, 3.0
_UTF8_FLAG = 0x0800
_DATE = 0x0021  # 1980-01-01, so that equal content gives equal bytes
_MODE = 0o100644 << 16
_SENTINEL_32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")
_LOCAL_ZIP64 = struct.Struct("<HHQQ")
_CENTRAL_ZIP64_BYTES = 28
_CODEC_JSON = b"codec.json"
_GZIP_MAX_CHUNKS = 1 << 24  # what four base64 characters count to
_DIRECTORY_BLOCK = 1 << 14  # entries made at a time, about 1.3 MB
_MAX_SIZE_32 = (1 << 32) - 1
_NO_LIMIT = 1 << 62


class OutFile(Protocol):
    """Where a shard goes."""

    def write(self, data: bytes, /) -> int:
        """All of `data`, at the present position."""

    def seek(self, offset: int, /) -> int:
        """Go to a position, which may be beyond the end."""

    def tell(self) -> int:
        """The present position."""


class ShardWriter:
    """One shard, from the present position of `out` on.

    `shape` and `chunk_shape` count values, rows first; `itemsize` is that of a value in bytes, None for strings. Give
    each chunk with `append` or `append_encoded`, in chunk order, then call `finish`. What the directory will say of a
    chunk takes 20 bytes; beyond some 16,000 chunks they go to a file that `scratch` makes, or stay in memory without.
    Raises UnsupportedFormat for an unknown compression, a level out of range, or more chunks than gzip can name.
    """

    def __init__(
        self,
        out: OutFile,
        shape: Sequence[int],
        chunk_shape: Sequence[int],
        itemsize: int | None,
        compression: str,
        level: int,
        scratch: Callable[[], IO[bytes]] | None = None,
    ) -> None:
        codecs.check_level(compression, level)
        self.grid = make_grid(shape, chunk_shape, itemsize or 1, _NO_LIMIT, "shard")
        self._out = out
        self._itemsize = itemsize
        self._compression = compression
        self._level = level
        self._method = codecs.find_codec(compression).zip_method
        self._n_chunks = self.grid.n_chunks
        self._grid_shape = self.grid.grid_shape
        if self._is_gzip and self._n_chunks > _GZIP_MAX_CHUNKS:
            raise UnsupportedFormat(f"gzip shard: {self._n_chunks} chunks, expected at most {_GZIP_MAX_CHUNKS}")
        self._start = out.tell()
        self._records = _Records(scratch)
        self._widths = tuple(len(str(max(0, n - 1))) for n in self._grid_shape)
        self._data_at = index_bytes(self._n_chunks)
        self._at = self._data_at
        out.seek(self._start + self._at)

    @property
    def _is_gzip(self) -> bool:
        return self._method == codecs.METHOD_DEFLATE

    def append(self, raw: bytes) -> None:
        """Encode and write the next chunk, of the full chunk_shape with its padding."""
        if self._itemsize is not None and len(raw) != self.grid.chunk_bytes:
            raise ValueError(f"chunk {len(self._records)} has {len(raw)} bytes, expected {self.grid.chunk_bytes}")
        self.append_encoded(*codecs.encode_chunk(self._compression, self._level, self._itemsize, raw))

    def append_encoded(self, payload: bytes, crc: int, raw_bytes: int) -> None:
        """Write the next chunk, given what `encode_chunk` made of it."""
        k = len(self._records)
        if k >= self._n_chunks:
            raise ValueError(f"the shard has {self._n_chunks} chunks only")
        if self._is_gzip:
            if max(len(payload), raw_bytes) >= _MAX_SIZE_32:
                raise UnsupportedFormat(
                    f"gzip shard: chunk {k} has {raw_bytes} bytes, expected less than {_MAX_SIZE_32}"
                )
            parts = self._gzip_parts(k, payload, crc, raw_bytes)
        else:
            parts = (self._local_header(self._name(k), len(payload), crc, raw_bytes), payload)
        self._records.append(len(payload), raw_bytes, crc)
        self._write(b"".join(parts))

    def finish(self) -> int:
        """Write codec.json, directory and end records, fill in the Zarr index; the shard's length in bytes.

        Leaves `out` behind the shard's last byte.
        """
        if len(self._records) != self._n_chunks:
            raise ValueError(f"{len(self._records)} chunks were written, expected {self._n_chunks}")
        codec_json = self._write_codec_json() if self._method == codecs.METHOD_STORED else b""
        directory_offset = self._at
        for chunks in self._blocks():
            self._write(self._central_entries(chunks))
        self._write(codec_json)
        n_entries = self._n_chunks + (1 if codec_json else 0)
        self._write(_end_records(directory_offset, self._at - directory_offset, n_entries))
        self._write_index()
        self._out.seek(self._start + self._at)
        self._records.close()
        return self._at

    def _write(self, data: bytes) -> None:
        self._out.write(data)
        self._at += len(data)

    def _gzip_parts(self, k: int, payload: bytes, crc: int, raw_bytes: int) -> tuple[bytes, ...]:
        """The name is the gzip header and the trailer follows as dead bytes: together a whole gzip stream."""
        name = GZIP_NAME % base64.b64encode(k.to_bytes(3, "big"))
        fields = (_VERSION_DEFLATE, _UTF8_FLAG, self._method, 0, _DATE, crc, len(payload), raw_bytes, len(name), 0)
        return _LOCAL.pack(0x04034B50, *fields), name, payload, struct.pack("<II", crc, raw_bytes)

    def _local_header(self, name: bytes, stored_bytes: int, crc: int, raw_bytes: int) -> bytes:
        fields = (_VERSION, _UTF8_FLAG, self._method, 0, _DATE, crc, _SENTINEL_32, _SENTINEL_32, len(name), 20)
        return _LOCAL.pack(0x04034B50, *fields) + name + _LOCAL_ZIP64.pack(1, 16, raw_bytes, stored_bytes)

    def _name(self, k: int) -> bytes:
        if len(self._widths) == 1:
            return b"c/%0*d" % (self._widths[0], k)
        column, row = divmod(k, self._grid_shape[0])
        return b"c/%0*d/%0*d" % (self._widths[1], column, self._widths[0], row)

    def _blocks(self) -> Iterator[_Block]:
        """The chunks in directory order, some at a time."""
        name_bytes = len(self._name(0)) if self._n_chunks and not self._is_gzip else 10
        before = LOCAL_HEADER_BYTES + name_bytes + (0 if self._is_gzip else _LOCAL_ZIP64.size)
        after = codecs.GZIP_TRAILER_BYTES if self._is_gzip else 0
        at, first = self._data_at, 0
        for stored, raw, crc in self._records.blocks():
            spans = stored + np.uint64(before + after)
            ends = np.uint64(at) + np.cumsum(spans, dtype=np.uint64)
            at = int(ends[-1])
            yield _Block(first, stored, raw, crc, ends - spans, before)
            first += len(crc)

    def _central_entries(self, chunks: _Block) -> bytes:
        n = len(chunks.crc)
        numbers = np.arange(chunks.first, chunks.first + n, dtype=np.int64)
        names = chunk_names(numbers, self.grid.grid_shape, is_gzip=self._is_gzip)
        head = _central_head(self._method, 0, names.shape[1])
        entries = np.empty((n, CENTRAL_ENTRY_BYTES + names.shape[1] + _CENTRAL_ZIP64_BYTES), np.uint8)
        entries[:, :CENTRAL_ENTRY_BYTES] = np.frombuffer(head, np.uint8)
        entries[:, 16:20] = chunks.crc.astype("<u4").view(np.uint8).reshape(n, 4)
        entries[:, CENTRAL_ENTRY_BYTES:-_CENTRAL_ZIP64_BYTES] = names
        entries[:, -_CENTRAL_ZIP64_BYTES:-24] = np.frombuffer(struct.pack("<HH", 1, 24), np.uint8)
        values = np.stack((chunks.raw_bytes, chunks.stored_bytes, chunks.header_offset), axis=1)
        entries[:, -24:] = values.astype("<u8").view(np.uint8).reshape(n, 24)
        return entries.tobytes()

    def _write_codec_json(self) -> bytes:
        """Write the entry of codec.json; its line for the directory."""
        text = codecs.codec_json_text(self._compression, self._level, self._itemsize)
        crc = codecs.crc32(text)
        zip64 = struct.pack("<HHQQQ", 1, 24, len(text), len(text), self._at)
        self._write(self._local_header(_CODEC_JSON, len(text), crc, len(text)) + text)
        return _central_head(self._method, crc, len(_CODEC_JSON)) + _CODEC_JSON + zip64

    def _write_index(self) -> None:
        self._out.seek(self._start)
        crc = 0
        # A Zarr reader of gzip needs the whole stream, from the header in the name to the trailer.
        more = codecs.GZIP_HEADER_BYTES if self._is_gzip else 0
        after = codecs.GZIP_TRAILER_BYTES if self._is_gzip else 0
        for chunks in self._blocks():
            offset = chunks.header_offset + np.uint64(chunks.header_bytes - more)
            length = chunks.stored_bytes + np.uint64(more + after)
            pairs = np.stack((offset, length), axis=1).astype("<u8").tobytes()
            crc = google_crc32c.extend(crc, pairs)
            self._out.write(pairs)
        self._out.write(crc.to_bytes(INDEX_CHECKSUM_BYTES, "little"))


class _Records:
    """Stored bytes, raw bytes and CRC-32 of each chunk so far."""

    def __init__(self, scratch: Callable[[], IO[bytes]] | None) -> None:
        self._scratch = scratch
        self._file: IO[bytes] | None = None
        self._n_full = 0
        """Blocks in the file, or in memory where there is no scratch."""
        self._full: list[bytes] = []
        self._reset()

    def _reset(self) -> None:
        self._stored_bytes = array("Q")
        self._raw_bytes = array("Q")
        self._crc = array("I")

    def __len__(self) -> int:
        return self._n_full * _DIRECTORY_BLOCK + len(self._crc)

    def append(self, stored_bytes: int, raw_bytes: int, crc: int) -> None:
        self._stored_bytes.append(stored_bytes)
        self._raw_bytes.append(raw_bytes)
        self._crc.append(crc)
        if len(self._crc) == _DIRECTORY_BLOCK:
            block = self._stored_bytes.tobytes() + self._raw_bytes.tobytes() + self._crc.tobytes()
            if self._scratch is None:
                self._full.append(block)
            else:
                self._file = self._file or self._scratch()
                self._file.write(block)
            self._n_full += 1
            self._reset()

    def blocks(self) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint32]]]:
        """All of them, some at a time; may be asked for again when it has ended."""
        n = _DIRECTORY_BLOCK
        if self._file is not None:
            self._file.seek(0)
        for number in range(self._n_full):
            block = self._full[number] if self._file is None else self._file.read(20 * n)
            stored, raw = np.frombuffer(block, np.uint64, n), np.frombuffer(block, np.uint64, n, 8 * n)
            yield stored, raw, np.frombuffer(block, np.uint32, n, 16 * n)
        if len(self._crc):
            stored, raw = np.array(self._stored_bytes, np.uint64), np.array(self._raw_bytes, np.uint64)
            yield stored, raw, np.array(self._crc, np.uint32)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _Block:
    """Some consecutive chunks, one element of each array a chunk."""

    __slots__ = ("crc", "first", "header_bytes", "header_offset", "raw_bytes", "stored_bytes")

    def __init__(
        self,
        first: int,
        stored_bytes: NDArray[np.uint64],
        raw_bytes: NDArray[np.uint64],
        crc: NDArray[np.uint32],
        header_offset: NDArray[np.uint64],
        header_bytes: int,
    ) -> None:
        self.first = first
        self.stored_bytes = stored_bytes
        self.raw_bytes = raw_bytes
        self.crc = crc
        self.header_offset = header_offset
        self.header_bytes = header_bytes


def _central_head(method: int, crc: int, name_bytes: int) -> bytes:
    return struct.pack(
        "<IHHHHHHIIIHHHHHII",
        0x02014B50,
        _MADE_BY,
        _VERSION,
        _UTF8_FLAG,
        method,
        0,
        _DATE,
        crc,
        _SENTINEL_32,
        _SENTINEL_32,
        name_bytes,
        _CENTRAL_ZIP64_BYTES,
        0,
        0,
        0,
        _MODE,
        _SENTINEL_32,
    )


def _end_records(directory_offset: int, directory_bytes: int, n_entries: int) -> bytes:
    end64_offset = directory_offset + directory_bytes
    end64 = (0x06064B50, 44, _MADE_BY, _VERSION, 0, 0, n_entries, n_entries, directory_bytes, directory_offset)
    end = (0x06054B50, 0, 0, 0xFFFF, 0xFFFF, _SENTINEL_32, _SENTINEL_32, 0)
    return (
        struct.pack("<IQHHIIQQQQ", *end64)
        + struct.pack("<IIQI", 0x07064B50, 0, end64_offset, 1)
        + struct.pack("<IHHHHIIH", *end)
    )


def split_flat(flat: bytes | bytearray | memoryview, grid: Grid) -> Iterator[bytes]:
    """The raw chunks of a flat numeric property (column-major), in chunk order, padded with zeros."""
    rows, columns = (*grid.shape, 1)[:2]
    chunk_rows, chunk_columns = (*grid.chunk_shape, 1)[:2]
    step = chunk_rows * grid.itemsize
    values = np.frombuffer(flat, np.uint8).reshape(columns, rows * grid.itemsize)
    for column in range(0, columns, chunk_columns):
        for at in range(0, rows * grid.itemsize, step):
            part = values[column : column + chunk_columns, at : at + step]
            if part.shape != (chunk_columns, step):
                padded = np.zeros((chunk_columns, step), np.uint8)
                padded[: part.shape[0], : part.shape[1]] = part
                part = padded
            yield part.tobytes()


def split_lines(lines: Sequence[bytes], grid: Grid) -> Iterator[bytes]:
    """The raw chunks of a property of strings (column-major, without newlines), in chunk order, padded with ""."""
    rows, columns = (*grid.shape, 1)[:2]
    chunk_rows, chunk_columns = (*grid.chunk_shape, 1)[:2]
    for column in range(0, columns, chunk_columns):
        for row in range(0, rows, chunk_rows):
            chosen: list[bytes] = []
            for one in range(column, min(column + chunk_columns, columns)):
                part = lines[one * rows + row : one * rows + min(row + chunk_rows, rows)]
                chosen += part
                chosen += [b""] * (chunk_rows - len(part))
            yield encode_strings(chosen, grid.chunk_count)


def write_shard(
    out: OutFile,
    flat: bytes | bytearray | memoryview | Sequence[bytes],
    shape: Sequence[int],
    chunk_shape: Sequence[int],
    itemsize: int | None,
    compression: str,
    level: int,
) -> int:
    """A whole property as a shard: flat bytes, or for `itemsize` None a list of lines; the shard's length in bytes."""
    writer = ShardWriter(out, shape, chunk_shape, itemsize, compression, level)
    if isinstance(flat, bytes | bytearray | memoryview):
        chunks = split_flat(flat, writer.grid)
    else:
        chunks = split_lines(flat, writer.grid)
    for raw in chunks:
        writer.append(raw)
    return writer.finish()
