"""One chunk: from its stored bytes to its raw bytes and back, for the six compressions of the format.

Owns the table of compressions, what ZIP method and which levels each has, the codec list of `codec.json`, and the
checks that make every altered byte an error rather than a wrong value. Must not know where chunks come from or what a
raw chunk means. A Decoder is immutable and keeps the C libraries' state apart for each thread, so threads may share it.

Facts: "PackedFormat documentation, Per-codec ZIP method and self-description" and its table of codecs.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import zstandard
from numpy.typing import NDArray

from dafmount.errors import CorruptShard, UnsupportedFormat
from dafmount.shard import blosc, together
from dafmount.shard.directory import Chunks
from dafmount.shard.shuffle import bitshuffle, bitunshuffle, is_one_block, shuffle, unshuffle
from dafmount.shard.where import Where, text_of

try:  # two to five times as fast; has no wheels for some machines
    from isal import isal_zlib as fast_zlib
except ImportError:
    fast_zlib = zlib  # type: ignore[misc]

crc32: Callable[[bytes | bytearray | memoryview], int] = fast_zlib.crc32

_INFLATE_ERRORS: tuple[type[Exception], ...] = (zlib.error, fast_zlib.error)  # type: ignore[assignment]

HEAD_BYTES = blosc.HEADER_BYTES
"""Stored bytes of a chunk that `Decoder.raw_size` needs."""

GZIP_HEADER_BYTES = 10
GZIP_TRAILER_BYTES = 8

METHOD_STORED = 0  # APPNOTE 4.4.5
METHOD_DEFLATE = 8
METHOD_ZSTD = 93

_RAW_DEFLATE = -15
_WHOLE_GZIP = 31
_MAX_ITEMSIZE = 255


@dataclass(frozen=True, slots=True)
class Codec:
    """One row of the format's table: ZIP method, the levels it takes, and the steps from raw to stored bytes."""

    zip_method: int
    min_level: int
    max_level: int
    filter: str | None
    compressor: str


CODECS = {
    "blosc_zstd_bitshuffle": Codec(METHOD_STORED, 1, 9, None, "blosc"),
    "blosc_lz4_bitshuffle": Codec(METHOD_STORED, 1, 9, None, "blosc"),
    "zstd_bitshuffle": Codec(METHOD_STORED, 1, 22, "bitshuffle", "zstd"),
    "zstd": Codec(METHOD_ZSTD, 1, 22, None, "zstd"),
    "gzip": Codec(METHOD_DEFLATE, 1, 9, None, "gzip"),
    "gzip_shuffle": Codec(METHOD_STORED, 1, 9, "numcodecs.shuffle", "gzip"),
}


@dataclass(frozen=True, slots=True)
class _Step:
    """One bytes-to-bytes codec of a chunk; `itemsize` counts for the filters only."""

    name: str
    itemsize: int = 1


def find_codec(compression: str, where: str = "compression") -> Codec:
    """The row of a compression. Raises UnsupportedFormat, listing the known ones."""
    codec = CODECS.get(compression)
    if codec is None:
        raise UnsupportedFormat(f"{where}: unknown compression {compression!r}, expected one of {', '.join(CODECS)}")
    return codec


def check_level(compression: str, level: int) -> None:
    """Raises UnsupportedFormat for an unknown compression or a level out of its range; 0 is in none."""
    codec = find_codec(compression)
    if not codec.min_level <= level <= codec.max_level:
        raise UnsupportedFormat(
            f"compression {compression}: level {level}, expected {codec.min_level} to {codec.max_level}"
        )


def make_decoder(compression: str, itemsize: int | None, codec_json: bytes | None, verify: bool, where: str) -> Decoder:
    """A decoder for chunks of values of `itemsize` bytes, None for strings.

    `codec_json` is the shard's, None where it has none; it is followed for numeric zstd_bitshuffle and gzip_shuffle,
    and not believed for others: upstream's readers ignore it and one of its writers names the wrong codec for strings.
    Raises UnsupportedFormat for what is not known here, CorruptShard for a malformed `codec_json`.
    """
    codec = find_codec(compression, where)
    if codec.filter is None:
        steps: tuple[_Step, ...] = (_Step(codec.compressor),)
    elif codec_json is None or itemsize is None:
        steps = (_Step(codec.filter, itemsize or 1), _Step(codec.compressor))
    else:
        steps = _parse_codec_json(codec_json, where)
    return Decoder(compression, codec.zip_method, verify, steps)


def needs_codec_json(compression: str, itemsize: int | None) -> bool:
    """Whether `make_decoder` would look at the shard's `codec.json`."""
    return itemsize is not None and find_codec(compression).filter is not None


def _parse_codec_json(text: bytes, where: str) -> tuple[_Step, ...]:
    try:
        listed: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptShard(f"{where}: codec.json is no JSON: {error}") from error
    if not isinstance(listed, list):
        raise CorruptShard(f"{where}: codec.json holds no list of codecs")
    steps = []
    for at, entry in enumerate(listed):
        name, configuration = _codec_entry(entry, where)
        if name == "bytes" and at == 0:
            if configuration.get("endian", "little") != "little":
                raise UnsupportedFormat(
                    f"{where}: codec.json says endian {configuration['endian']!r}, expected 'little'"
                )
        elif name == "vlen-utf8" and at == 0:
            raise CorruptShard(f"{where}: codec.json says vlen-utf8 for numbers")
        elif name in ("numcodecs.shuffle", "bitshuffle"):
            steps.append(_Step(name, _item_size(configuration, name, where)))
        elif name in ("gzip", "zstd", "blosc"):
            steps.append(_Step(name))
        else:
            raise UnsupportedFormat(f"{where}: codec.json names the codec {name!r} as number {at}, which is not known")
    if sum(step.name in ("gzip", "zstd", "blosc") for step in steps) > 1:
        raise UnsupportedFormat(f"{where}: codec.json names several compressors, expected at most one")
    return tuple(steps)


def _codec_entry(entry: object, where: str) -> tuple[str, dict[str, object]]:
    if isinstance(entry, str):
        return entry, {}
    if isinstance(entry, dict):
        name, configuration = entry.get("name"), entry.get("configuration", {})
        if isinstance(name, str) and isinstance(configuration, dict):
            return name, configuration
    raise CorruptShard(f"{where}: codec.json lists {str(entry)[:80]!r}, expected a name and a configuration")


def _item_size(configuration: dict[str, object], name: str, where: str) -> int:
    itemsize = configuration.get("elementsize")
    if not isinstance(itemsize, int) or not 1 <= itemsize <= _MAX_ITEMSIZE:
        raise UnsupportedFormat(
            f"{where}: codec.json says elementsize {itemsize!r} for {name}, expected 1 to {_MAX_ITEMSIZE}"
        )
    return itemsize


class _Local(threading.local):
    """What each thread has of its own: zstandard's objects may not be used by two at once."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()
        self.compressors: dict[int, zstandard.ZstdCompressor] = {}


_local = _Local()


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes the chunks of one shard. Make it with `make_decoder`."""

    compression: str
    zip_method: int
    verify: bool
    _steps: tuple[_Step, ...] = field(repr=False)

    @property
    def _is_blosc(self) -> bool:
        return len(self._steps) == 1 and self._steps[0].name == "blosc"

    def decode(
        self,
        payload: bytes | memoryview,
        method: int,
        crc: int,
        raw_bytes_in_directory: int,
        expected_bytes: int | None,
        max_bytes: int,
        where: Where,
    ) -> bytes | bytearray:
        """The raw chunk, of exactly `expected_bytes`; for strings (None) of the size that directory or header state.

        `method`, `crc` and `raw_bytes_in_directory` are the chunk's in the ZIP directory. Never takes more than about
        twice `max_bytes` of memory. Raises CorruptShard.
        """
        if self._is_blosc and expected_bytes is not None and expected_bytes <= max_bytes:
            usual = self._decode_usual(_as_bytes(payload), method, crc, raw_bytes_in_directory, expected_bytes)
            if usual is not None:
                return usual
        self._check_entry(len(payload), method, raw_bytes_in_directory, where)
        if self.zip_method != METHOD_STORED:
            size = self._stated_size(raw_bytes_in_directory, expected_bytes, max_bytes, where)
            raw = _DECOMPRESS[self._steps[0].name](payload, size, True, _RAW_DEFLATE, where)
            if self.verify and crc32(raw) != crc:
                raise _wrong_crc(raw, crc, "raw", where)
            return raw
        if self.verify and crc32(payload) != crc:
            raise _wrong_crc(payload, crc, "stored", where)
        return self._decode_stored(payload, expected_bytes, max_bytes, where)

    def _decode_usual(
        self, payload: bytes, method: int, crc: int, raw_bytes_in_directory: int, expected_bytes: int
    ) -> bytearray | None:
        """A blosc chunk as nearly all are, in half the time; None for any other, which the careful way judges."""
        if method != METHOD_STORED or raw_bytes_in_directory != len(payload):
            return None
        if self.verify and crc32(payload) != crc:
            return None
        return blosc.decode_simple(payload, expected_bytes)

    def decode_into(
        self,
        payload: bytes | memoryview,
        out: bytearray | memoryview,
        at: int,
        method: int,
        crc: int,
        raw_bytes_in_directory: int,
        expected_bytes: int,
        where: Where,
    ) -> None:
        """As `decode`, to `out[at : at + expected_bytes]`, which is undefined after an error."""
        if at < 0 or at + expected_bytes > len(out):
            raise ValueError(f"{expected_bytes} bytes at {at} do not fit a buffer of {len(out)}")
        if not self._is_blosc:
            out[at : at + expected_bytes] = self.decode(
                payload, method, crc, raw_bytes_in_directory, expected_bytes, expected_bytes, where
            )
            return
        self._check_entry(len(payload), method, raw_bytes_in_directory, where)
        if self.verify and crc32(payload) != crc:
            raise _wrong_crc(payload, crc, "stored", where)
        blosc.decode_into(_as_bytes(payload), out, at, expected_bytes, where)

    def decode_run(
        self,
        block: bytes,
        starts: NDArray[np.int64],
        chunks: Chunks,
        out: bytearray | memoryview,
        places: Sequence[int],
        chunk_bytes: int,
        where: Callable[[int], str],
    ) -> None:
        """Decode many whole chunks in order: the one whose data begins at `block[starts[i]]` to `out` at `places[i]`.

        Each covers `chunk_bytes` of `out` and may cover what the one before it left beyond `places[i]`. `where(i)`
        names a chunk in messages. This is the way to read at the speed of the C library. Raises CorruptShard.
        """
        self.prepare(block, starts, chunks, chunk_bytes).decode(0, len(places), out, places, where)

    def prepare(
        self, block: bytes, starts: NDArray[np.int64], chunks: Chunks, chunk_bytes: int
    ) -> PreparedRun:
        """The checks of `decode_run` that all chunks share, so that they can be decoded piece by piece later."""
        stops = starts + chunks.stored_bytes
        if len(starts) and (int(starts.min()) < 0 or int(stops.max()) > len(block)):
            raise ValueError(f"chunks up to {int(stops.max())} are not within the {len(block)} bytes given")
        streams, is_deflate = None, False
        stated = chunks.stored_bytes if self.zip_method == METHOD_STORED else chunk_bytes
        if not ((chunks.method != self.zip_method).any() or (chunks.raw_bytes != stated).any()):
            streams = self._streams(block, starts, chunks.stored_bytes, chunk_bytes)
            is_deflate = self.zip_method == METHOD_DEFLATE
        return PreparedRun(self, block, starts.tolist(), chunks, chunks.crc.tolist(), chunk_bytes, streams, is_deflate)

    def _streams(
        self, block: bytes, starts: NDArray[np.int64], stored_bytes: NDArray[np.int64], chunk_bytes: int
    ) -> together.Streams | None:
        """How the chunks can be decoded together; None where they are of several kinds, or of one that cannot be."""
        if self._is_blosc:
            return together.streams_of_blosc(block, starts, stored_bytes, chunk_bytes)
        steps = [step.name for step in self._steps]
        if steps == ["zstd"]:
            return together.streams_of_zstd(starts, stored_bytes, chunk_bytes)
        if steps == ["bitshuffle", "zstd"] and is_one_block(chunk_bytes, self._steps[0].itemsize):
            return together.streams_of_zstd(starts, stored_bytes, chunk_bytes, self._steps[0].itemsize)
        return None

    def raw_size(
        self, head: bytes | memoryview, stored_bytes: int, raw_bytes_in_directory: int, where: Where
    ) -> int | None:
        """Bytes of a raw chunk without decoding it, from its first `HEAD_BYTES` stored ones; None where that cannot be.

        Only blosc needs `head`: zstd and gzip have the size in the directory. Raises CorruptShard.
        """
        if self.zip_method != METHOD_STORED:
            return raw_bytes_in_directory
        if self._is_blosc:
            return blosc.raw_size(head, stored_bytes, where)
        return None

    def _check_entry(self, stored_bytes: int, method: int, raw_bytes_in_directory: int, where: Where) -> None:
        if method != self.zip_method:
            raise CorruptShard(
                f"{text_of(where)}: ZIP method {method}, expected {self.zip_method} for compression {self.compression}"
            )
        if method == METHOD_STORED and raw_bytes_in_directory != stored_bytes:
            raise CorruptShard(
                f"{text_of(where)}: the directory states {raw_bytes_in_directory} raw bytes, expected {stored_bytes}"
            )

    def _stated_size(self, stated: int, expected: int | None, max_bytes: int, where: Where) -> int:
        if expected is not None and stated != expected:
            raise CorruptShard(
                f"{text_of(where)}: the directory states a raw chunk of {stated} bytes, expected {expected}"
            )
        if stated > max_bytes:
            raise CorruptShard(
                f"{text_of(where)}: the directory states a raw chunk of {stated} bytes, more than {max_bytes}"
            )
        return stated

    def _decode_stored(
        self, payload: bytes | memoryview, expected: int | None, max_bytes: int, where: Where
    ) -> bytes | bytearray:
        if expected is not None and expected > max_bytes:
            raise CorruptShard(f"{text_of(where)}: a chunk of {expected} bytes, expected at most {max_bytes}")
        limit = max_bytes if expected is None else expected
        data: bytes | bytearray | memoryview = payload
        for step in reversed(self._steps):
            if step.name == "numcodecs.shuffle":
                data = unshuffle(_as_bytes(data), step.itemsize)
            elif step.name == "bitshuffle":
                data = bitunshuffle(_as_bytes(data), step.itemsize)
            elif step.name == "blosc":
                data = _decode_blosc(data, limit, expected is not None, where)
            else:
                data = _DECOMPRESS[step.name](data, limit, expected is not None, _WHOLE_GZIP, where)
        raw = bytes(data) if isinstance(data, memoryview) else data
        if expected is not None and len(raw) != expected:
            raise CorruptShard(f"{text_of(where)}: the chunk decodes to {len(raw)} bytes, expected {expected}")
        return raw


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """Chunks whose stored bytes are at hand. Make it with `Decoder.prepare`; threads may share it."""

    decoder: Decoder
    block: bytes
    starts: list[int]
    chunks: Chunks
    crcs: list[int]
    chunk_bytes: int
    streams: together.Streams | None
    """How they can be decoded by one call."""
    is_deflate: bool
    """Whether each is a DEFLATE stream by itself, of the usual size."""

    def decode(
        self,
        begin: int,
        end: int,
        out: bytearray | memoryview,
        places: Sequence[int],
        where: Callable[[int], str],
    ) -> None:
        """Decode the chunks `begin` to `end` to `out` at `places`; `where(i)` names the chunk `begin + i`."""
        if begin >= end:
            return
        if min(places) < 0 or max(places) + self.chunk_bytes > len(out):
            raise ValueError(
                f"chunks of {self.chunk_bytes} bytes up to {max(places)} do not fit a buffer of {len(out)}"
            )
        decode = self._inflate if self.is_deflate else self._decode_together
        if not decode(begin, end, memoryview(out), places):
            lengths = self.chunks.stored_bytes[begin:end].tolist()
            rows = zip(self.starts[begin:end], lengths, places, self.crcs[begin:end], strict=True)
            self._decode_one_by_one(begin, rows, out, where)

    def _decode_together(self, begin: int, end: int, out: memoryview, places: Sequence[int]) -> bool:
        """False where the chunks cannot be decoded together, or one of them is bad: one by one they tell which."""
        streams, size, n_chunks = self.streams, self.chunk_bytes, end - begin
        if streams is None or n_chunks < 2:
            return False
        is_crc_of_stored = self.decoder.zip_method == METHOD_STORED
        if is_crc_of_stored:
            stops = (self.chunks.stored_bytes[begin:end] + self.starts[begin:end]).tolist()
            if not self._is_intact(memoryview(self.block), begin, self.starts[begin:end], stops):
                return False
        is_flat = isinstance(places, range) and places.step == size
        raw = out[places[0] :] if is_flat else memoryview(bytearray(n_chunks * size))
        if not streams.decode(self.block, begin, end, raw, size):
            return False
        rows = range(0, n_chunks * size, size)
        if not is_crc_of_stored and not self._is_intact(raw, begin, rows, range(size, n_chunks * size + 1, size)):
            return False
        if not is_flat:  # each covers the padding of the one before it
            for place, at in zip(places, rows, strict=True):
                out[place : place + size] = raw[at : at + size]
        return True

    def _inflate(self, begin: int, end: int, out: memoryview, places: Sequence[int]) -> bool:
        """The loop that the speed of gzip depends on; False where a chunk is not as usual."""
        inflater, checksum, size = fast_zlib.decompressobj, crc32, self.chunk_bytes
        verify, view = self.decoder.verify, memoryview(self.block)
        lengths = self.chunks.stored_bytes[begin:end].tolist()
        rows = zip(self.starts[begin:end], lengths, places, self.crcs[begin:end], strict=True)
        try:
            for start, length, place, crc in rows:
                stream = inflater(_RAW_DEFLATE)
                raw = stream.decompress(view[start : start + length], size + 1)
                if len(raw) != size or not stream.eof or stream.unused_data or (verify and checksum(raw) != crc):
                    return False
                out[place : place + size] = raw
        except _INFLATE_ERRORS:
            return False
        return True

    def _is_intact(self, view: memoryview, begin: int, starts: Sequence[int], stops: Sequence[int]) -> bool:
        """Whether the bytes of the chunks from `begin` on, `starts` to `stops` of `view`, have their CRC-32."""
        if not self.decoder.verify:
            return True
        checksum = crc32
        found = [checksum(view[start:stop]) for start, stop in zip(starts, stops, strict=True)]
        return found == self.crcs[begin : begin + len(found)]

    def _decode_one_by_one(
        self,
        begin: int,
        rows: Iterable[tuple[int, int, int, int]],
        out: bytearray | memoryview,
        where: Callable[[int], str],
    ) -> None:
        view, size = memoryview(self.block), self.chunk_bytes
        methods, raw_sizes = self.chunks.method, self.chunks.raw_bytes
        for i, (start, length, place, crc) in enumerate(rows):
            method, raw_bytes = int(methods[begin + i]), int(raw_sizes[begin + i])
            payload = view[start : start + length]
            self.decoder.decode_into(payload, out, place, method, crc, raw_bytes, size, partial(where, i))


def _as_bytes(data: bytes | bytearray | memoryview) -> bytes:
    return data if isinstance(data, bytes) else bytes(data)


def _wrong_crc(data: bytes | bytearray | memoryview, expected: int, which: str, where: Where) -> CorruptShard:
    return CorruptShard(f"{text_of(where)}: CRC-32 {crc32(data):#010x} of the {which} bytes, expected {expected:#010x}")


def _decode_blosc(data: bytes | bytearray | memoryview, limit: int, exact: bool, where: Where) -> bytearray:
    payload = _as_bytes(data)
    size = limit if exact else blosc.raw_size(payload, len(payload), where)
    if size > limit:
        raise CorruptShard(f"{text_of(where)}: the blosc header claims a chunk of {size} bytes, more than {limit}")
    out = bytearray(size)
    blosc.decode_into(payload, out, 0, size, where)
    return out


def _decompress_zstd(data: bytes | bytearray | memoryview, size: int, exact: bool, wbits: int, where: Where) -> bytes:
    """Exactly one frame, of `size` bytes, or at most as many where not `exact`."""
    try:
        stated = zstandard.frame_content_size(data)
        if stated > size or (exact and stated not in (size, -1)):
            raise CorruptShard(
                f"{text_of(where)}: the zstd frame claims {stated} bytes, expected {'' if exact else 'at most '}{size}"
            )
        # A frame without a size is decoded into one byte more than allowed, so that a longer one shows.
        raw = _local.decompressor.decompress(data, max_output_size=size + 1, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise CorruptShard(f"{text_of(where)}: zstd cannot decode the chunk: {error}") from error
    if len(raw) > size or (exact and len(raw) != size):
        raise CorruptShard(f"{text_of(where)}: zstd gave {len(raw)} bytes, expected {size}")
    return raw


def _decompress_deflate(
    data: bytes | bytearray | memoryview, size: int, exact: bool, wbits: int, where: Where
) -> bytes:
    """Exactly one stream, of `size` bytes, or at most as many where not `exact`."""
    stream = fast_zlib.decompressobj(wbits)
    try:
        raw: bytes = stream.decompress(data, size + 1)
    except _INFLATE_ERRORS as error:
        raise CorruptShard(f"{text_of(where)}: DEFLATE cannot decode the chunk: {error}") from error
    if not stream.eof or stream.unused_data:
        state = "goes on" if not stream.eof else "has ended before"
        raise CorruptShard(
            f"{text_of(where)}: the DEFLATE stream {state} at the chunk's end, after {len(raw)} raw bytes"
        )
    if len(raw) > size or (exact and len(raw) != size):
        raise CorruptShard(f"{text_of(where)}: DEFLATE gave {len(raw)} bytes, expected {size}")
    return raw


_DECOMPRESS = {"zstd": _decompress_zstd, "gzip": _decompress_deflate}


def codec_list(compression: str, level: int, itemsize: int | None) -> list[dict[str, object]]:
    """The Zarr v3 codec list of a chunk, as `codec.json` and a Zarr array's inner codecs state it."""
    codec = find_codec(compression)
    typesize = itemsize or 1
    first: dict[str, object] = {"configuration": {"endian": "little"}, "name": "bytes"}
    if itemsize is None:
        first = {"configuration": {}, "name": "vlen-utf8"}
    listed = [first]
    if codec.filter is not None:
        listed.append({"configuration": {"elementsize": typesize}, "name": codec.filter})
    if codec.compressor == "blosc":
        configuration: dict[str, object] = {
            "blocksize": 0,
            "clevel": level,
            "cname": _blosc_codec(compression),
            "shuffle": "bitshuffle",
            "typesize": typesize,
        }
    else:
        configuration = {"level": level}
    listed.append({"configuration": configuration, "name": codec.compressor})
    return listed


def codec_json_text(compression: str, level: int, itemsize: int | None) -> bytes:
    """The text of `codec.json`, byte for byte as upstream writes it."""
    return json.dumps(codec_list(compression, level, itemsize), separators=(",", ":"), sort_keys=True).encode("ascii")


def encode_chunk(compression: str, level: int, itemsize: int | None, raw: bytes) -> tuple[bytes, int, int]:
    """The payload of a raw chunk, and the CRC-32 and raw size that the ZIP directory states for it.

    For gzip the payload is the raw DEFLATE stream. `level` must have passed `check_level`.
    """
    codec = find_codec(compression)
    if codec.zip_method == METHOD_ZSTD:
        return _compress_zstd(raw, level), crc32(raw), len(raw)
    if codec.zip_method == METHOD_DEFLATE:
        return _compress_deflate(raw, level, _RAW_DEFLATE), crc32(raw), len(raw)
    typesize = itemsize or 1
    if codec.compressor == "blosc":
        payload = blosc.encode(raw, _blosc_codec(compression), level, typesize)
    elif codec.compressor == "zstd":
        payload = _compress_zstd(bitshuffle(raw, typesize), level)
    else:
        payload = _compress_deflate(shuffle(raw, typesize), level, _WHOLE_GZIP)
    return payload, crc32(payload), len(payload)


def encode_chunks(
    compression: str, level: int, itemsize: int | None, raws: Sequence[bytes]
) -> list[tuple[bytes, int, int]]:
    """As `encode_chunk` for each of some raw chunks, with less to do for each where they have one size."""
    codec = find_codec(compression)
    if codec.compressor == "blosc" and codec.filter is None:
        payloads = blosc.encode_many(raws, _blosc_codec(compression), level, itemsize or 1)
        return [(payload, crc32(payload), len(payload)) for payload in payloads]
    return [encode_chunk(compression, level, itemsize, raw) for raw in raws]


def _blosc_codec(compression: str) -> str:
    return "zstd" if compression == "blosc_zstd_bitshuffle" else "lz4"


def _compress_zstd(raw: bytes, level: int) -> bytes:
    compressor = _local.compressors.get(level)
    if compressor is None:
        compressor = _local.compressors[level] = zstandard.ZstdCompressor(level=level)
    return compressor.compress(raw)


def _compress_deflate(raw: bytes, level: int, wbits: int) -> bytes:
    stream = zlib.compressobj(level, zlib.DEFLATED, wbits)
    return stream.compress(raw) + stream.flush()
