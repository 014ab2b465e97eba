"""Blosc version 1 buffers: checking, decoding and writing them with the libblosc2 that the blosc2 package ships.

Owns the buffer's layout and the C library. Must not know shards. The library is called through ctypes, which gives up
the GIL for the time of a call, needs no copy of the result, and spares importing blosc2 (0.2 s, 40 MB); where it cannot
be loaded so, `blosc2.decompress` decodes. Decoding contexts belong to a thread each, so threads may share everything
here.

Facts: c-blosc 1.21, README_CHUNK_FORMAT.rst (version 2 of the format, which Blosc 1 and numcodecs write).
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import zstandard
from numpy.typing import NDArray

from dafmount.errors import CorruptShard, UnsupportedFormat
from dafmount.shard.shuffle import items_of_bit_planes
from dafmount.shard.where import Where, text_of

HEADER_BYTES = 16
"""Bytes of a buffer that `raw_size` needs."""

FLAGS_AT = 2
TYPESIZE_AT = 3
"""Where these lie in a header."""

_HEADER = struct.Struct("<BBBBIII")
_U32 = struct.Struct("<I")
_SINGLE = struct.Struct("<BBBBIIIII")  # a header, the only block's start, and the length of its only stream
_FORMAT_VERSION = 2
_CODEC_VERSION = 1
_BYTE_SHUFFLE = 0x01
_COPIED = 0x02
_BIT_SHUFFLE = 0x04
_RESERVED = 0x08
_NOT_SPLIT = 0x10
_BOTH_SHUFFLES = _BYTE_SHUFFLE | _BIT_SHUFFLE  # marks the longer header of Blosc 2
_CODEC_SHIFT = 5
_CODECS = {0: "blosclz", 1: "lz4", 2: "snappy", 3: "zlib", 4: "zstd"}
_LZ4 = 1
_ZSTD = 4
_READ_CODECS = (0, _LZ4, 3, _ZSTD)  # libblosc2 is built without snappy
_MAX_SPLITS = 16
_MIN_SPLIT_ITEMS = 128
_BLOCK_BYTES = 1 << 18
_MAX_ZSTD_LEVEL = 22


class Header(NamedTuple):
    """The first 16 bytes of a buffer, checked."""

    flags: int
    typesize: int
    raw_bytes: int
    block_bytes: int

    @property
    def has_loose_bytes(self) -> bool:
        """Whether a bit-shuffled block is no whole number of items."""
        if not self.flags & _BIT_SHUFFLE:
            return False
        return bool(self.block_bytes % self.typesize or self.raw_bytes % self.block_bytes % self.typesize)


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of libblosc2 that this room calls."""

    create_dctx: Callable[..., int]
    free_ctx: Callable[..., int]
    decompress_ctx: Callable[..., int]
    bitshuffle: Callable[..., int]
    lz4_compress: Callable[..., int]


class _DecodeParameters(ctypes.Structure):
    """blosc2_dparams of blosc2.h."""

    _fields_ = (
        ("nthreads", ctypes.c_int16),
        ("schunk", ctypes.c_void_p),
        ("postfilter", ctypes.c_void_p),
        ("postparams", ctypes.c_void_p),
        ("typesize", ctypes.c_int32),
    )


_PROBE = bytes.fromhex("02012001800000008000000023000000140000000b0000001f07010067500707070707")
"""128 bytes of 7, LZ4 in one block: decoded once to learn that the library does what its header file promises."""


@cache
def library() -> Library | None:
    """libblosc2, loaded and tried once; None where it cannot be loaded or does not work this way."""
    spec = importlib.util.find_spec("blosc2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder, "lib").glob("libblosc2.so*")):
            try:
                found = _bind(ctypes.CDLL(str(path)))
            except (OSError, AttributeError):
                continue
            if _works(found):
                return found
    return None


def _bind(dll: ctypes.CDLL) -> Library:
    pointer, i32 = ctypes.c_void_p, ctypes.c_int32

    def function(name: str, result: type | None, *arguments: type) -> Callable[..., int]:
        found = dll[name]
        found.restype = result
        found.argtypes = arguments
        return found

    return Library(
        function("blosc2_create_dctx", pointer, _DecodeParameters),
        function("blosc2_free_ctx", None, pointer),
        function("blosc2_decompress_ctx", ctypes.c_int, pointer, pointer, i32, pointer, i32),
        function("blosc2_bitshuffle", i32, i32, i32, pointer, pointer),
        function("LZ4_compress_fast", ctypes.c_int, pointer, pointer, i32, i32, i32),
    )


def _works(found: Library) -> bool:
    context = found.create_dctx(_DecodeParameters(nthreads=1, typesize=1))
    if not context:
        return False
    out = bytearray(128)
    n = found.decompress_ctx(context, _PROBE, len(_PROBE), address_of(out), len(out))
    found.free_ctx(context)
    return bool(n == len(out) and out == bytes([7] * 128))


class _Local(threading.local):
    """What each thread has of its own."""

    context: int | None = None
    owner: object = None
    compressors: dict[int, zstandard.ZstdCompressor] | None = None


class _Owner:
    """Dies with its thread, and a context with it."""


_local = _Local()


def context_of_thread(lib: Library) -> int:
    """This thread's decoding context."""
    context = _local.context
    if context is None:
        context = lib.create_dctx(_DecodeParameters(nthreads=1, typesize=1))
        if not context:
            raise MemoryError("libblosc2 gives no decoding context")
        _local.context = context
        _local.owner = _Owner()
        weakref.finalize(_local.owner, lib.free_ctx, context).atexit = False
    return int(context)


def address_of(buffer: bytearray | memoryview, at: int = 0) -> int:
    """Address of byte `at` of a writable buffer, which the caller must keep alive and at its size."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, at))


def parse_header(payload: bytes | memoryview, stored_bytes: int, where: Where) -> Header:
    """The header of a buffer of `stored_bytes`, of which `payload` needs only the first 16. Raises CorruptShard."""
    if len(payload) < HEADER_BYTES:
        raise CorruptShard(f"{text_of(where)}: {len(payload)} bytes are too few for a blosc header of {HEADER_BYTES}")
    version, codec_version, flags, typesize, raw_bytes, block_bytes, compressed = _HEADER.unpack_from(payload)
    if (
        version != _FORMAT_VERSION
        or codec_version != _CODEC_VERSION
        or flags & _RESERVED
        or flags & _BOTH_SHUFFLES == _BOTH_SHUFFLES
        or typesize == 0
    ):
        raise CorruptShard(
            f"{text_of(where)}: the blosc header begins {bytes(payload[:4]).hex()}, "
            f"expected {_FORMAT_VERSION:02x}{_CODEC_VERSION:02x}, flags of Blosc 1 and a typesize"
        )
    if compressed != stored_bytes:
        raise CorruptShard(f"{text_of(where)}: the blosc header claims {compressed} bytes, expected {stored_bytes}")
    codec = flags >> _CODEC_SHIFT
    if codec not in _READ_CODECS:
        raise UnsupportedFormat(
            f"{text_of(where)}: blosc codec {_CODECS.get(codec, codec)}, expected one of blosclz, lz4, zlib, zstd"
        )
    if block_bytes > max(raw_bytes, 1) or (block_bytes == 0 and raw_bytes):
        raise CorruptShard(
            f"{text_of(where)}: the blosc header claims blocks of {block_bytes} bytes in a chunk of {raw_bytes}"
        )
    return Header(flags, typesize, raw_bytes, block_bytes)


def header(flags: int, typesize: int, raw_bytes: int, block_bytes: int, stored_bytes: int) -> bytes:
    """The first 16 bytes of a buffer."""
    return _HEADER.pack(_FORMAT_VERSION, _CODEC_VERSION, flags, typesize, raw_bytes, block_bytes, stored_bytes)


def flags_of(codec: str, *, is_bit_shuffled: bool) -> int:
    """The flags of a buffer whose blocks are one stream each of `codec`, "zstd" or "lz4"."""
    code = _ZSTD if codec == "zstd" else _LZ4
    return (_BIT_SHUFFLE if is_bit_shuffled else 0) | _NOT_SPLIT | code << _CODEC_SHIFT


def is_one_stream(flags: int) -> bool:
    """Whether each block is one stream, and not one for each byte of an item."""
    return bool(flags & _NOT_SPLIT)


def raw_size(head: bytes | memoryview, stored_bytes: int, where: Where) -> int:
    """Bytes that a buffer decodes to, from its first 16 bytes. Raises CorruptShard."""
    return parse_header(head, stored_bytes, where).raw_bytes


def _check_blocks(payload: bytes | memoryview, header: Header, where: Where) -> None:
    """What the C library is about to follow: each block's start, and the length of its first stream."""
    n_blocks = -(-header.raw_bytes // header.block_bytes)
    first = HEADER_BYTES + 4 * n_blocks
    stop = len(payload) - 4
    if first > stop:
        raise CorruptShard(f"{text_of(where)}: {len(payload)} bytes of blosc are too few for {n_blocks} blocks")
    for block, start in enumerate(struct.unpack_from(f"<{n_blocks}I", payload, HEADER_BYTES)):
        if start < first or start > stop:
            raise CorruptShard(f"{text_of(where)}: blosc block {block} begins at {start}, expected {first} to {stop}")
        (stream,) = _U32.unpack_from(payload, start)
        if stream == 0 or stream > header.block_bytes or start + 4 + stream > len(payload):
            raise CorruptShard(f"{text_of(where)}: blosc block {block} at {start} claims a stream of {stream} bytes")


def decode_simple(payload: bytes, raw_bytes: int) -> bytearray | None:
    """Decode a buffer that passes all checks of `decode_into` and is one compressed block of `raw_bytes`.

    None for any other, good or bad: `decode_into` tells. This is what `simple_chunks` is for many.
    """
    lib = library()
    if lib is None or len(payload) < _SINGLE.size:
        return None
    version, codec_version, flags, typesize, raw, block, stored, start, stream = _SINGLE.unpack_from(payload)
    if (
        version != _FORMAT_VERSION
        or codec_version != _CODEC_VERSION
        or not _SIMPLE_FLAGS[flags]
        or typesize == 0
        or (flags & _BIT_SHUFFLE and raw % typesize)
        or raw != raw_bytes
        or block != raw_bytes
        or stored != len(payload)
        or start != HEADER_BYTES + 4
        or not 0 < stream <= min(stored - _SINGLE.size, raw_bytes)
    ):
        return None
    out = bytearray(raw_bytes)
    n = lib.decompress_ctx(context_of_thread(lib), payload, stored, address_of(out), raw_bytes)
    return out if n == raw_bytes else None


def decode_into(payload: bytes, out: bytearray | memoryview, at: int, expected: int, where: Where) -> None:
    """Decode a buffer of `expected` raw bytes to `out[at : at + expected]`, which is undefined after CorruptShard."""
    header = parse_header(payload, len(payload), where)
    if header.raw_bytes != expected:
        raise CorruptShard(
            f"{text_of(where)}: the blosc header claims a chunk of {header.raw_bytes} bytes, expected {expected}"
        )
    if at < 0 or at + expected > len(out):
        raise ValueError(f"{expected} bytes at {at} do not fit a buffer of {len(out)}")
    if header.flags & _COPIED:
        if len(payload) != HEADER_BYTES + expected:
            raise CorruptShard(
                f"{text_of(where)}: a blosc copy of {expected} bytes takes {len(payload)}, expected 16 more"
            )
        out[at : at + expected] = payload[HEADER_BYTES:]
        return
    if expected == 0:
        raise CorruptShard(f"{text_of(where)}: a blosc buffer of 0 raw bytes has {len(payload)} bytes and is no copy")
    _check_blocks(payload, header, where)
    if header.has_loose_bytes:
        out[at : at + expected] = _decode_loose_bytes(payload, header, where)
    else:
        _decode_blocks(payload, out, at, expected, where)


def _decode_blocks(payload: bytes, out: bytearray | memoryview, at: int, expected: int, where: Where) -> None:
    lib = library()
    if lib is None:
        out[at : at + expected] = _decode_with_package(payload, expected, where)
        return
    n = lib.decompress_ctx(context_of_thread(lib), payload, len(payload), address_of(out, at), expected)
    if n != expected:
        raise CorruptShard(f"{text_of(where)}: libblosc2 gave {n}, expected {expected} bytes")


def _decode_loose_bytes(payload: bytes, header: Header, where: Where) -> bytes:
    """Decode without libblosc2's bit unshuffle, which leaves bytes after a block's last whole item unwritten."""
    flags = bytes([header.flags & ~_BIT_SHUFFLE])
    shuffled = bytearray(header.raw_bytes)
    _decode_blocks(payload[:2] + flags + payload[3:], shuffled, 0, header.raw_bytes, where)
    parts = []
    for begin in range(0, header.raw_bytes, header.block_bytes):
        block = bytes(shuffled[begin : begin + header.block_bytes])
        n_items = len(block) // header.typesize
        whole = n_items * header.typesize if n_items % 8 == 0 else 0
        parts += [items_of_bit_planes(np.frombuffer(block, np.uint8, whole), header.typesize), block[whole:]]
    return b"".join(parts)


def _decode_with_package(payload: bytes, expected: int, where: Where) -> bytes:
    import blosc2

    try:
        raw: bytes = blosc2.decompress(payload)
    except (RuntimeError, ValueError, TypeError) as error:
        raise CorruptShard(f"{text_of(where)}: blosc2 cannot decode the chunk: {error}") from error
    if len(raw) != expected:
        raise CorruptShard(f"{text_of(where)}: blosc2 gave {len(raw)} bytes, expected {expected}")
    return raw


def simple_chunks(
    block: NDArray[np.uint8], starts: NDArray[np.int64], stored_bytes: NDArray[np.int64], raw_bytes: int
) -> NDArray[np.bool_]:
    """Which of many buffers in `block` pass all checks of `decode_into` and are one compressed block of `raw_bytes`.

    The others are not bad for that: `decode_into` tells. Each `starts + stored_bytes` must lie within `block`.
    """
    long_enough = stored_bytes >= HEADER_BYTES + 8
    if not long_enough.all():
        return np.zeros(len(starts), np.bool_)
    heads = block[starts[:, None] + _SIMPLE_COLUMNS]
    sizes = heads[:, 4:].view("<u4")
    flags = heads[:, 2]
    typesize = heads[:, 3].astype(np.int64)
    passes: NDArray[np.bool_] = (
        (heads[:, 0] == _FORMAT_VERSION)
        & (heads[:, 1] == _CODEC_VERSION)
        & _SIMPLE_FLAGS_ARRAY[flags]
        & ((flags & _BIT_SHUFFLE == 0) | (raw_bytes % np.maximum(typesize, 1) == 0))
        & (typesize != 0)
        & (sizes[:, 0] == raw_bytes)
        & (sizes[:, 1] == raw_bytes)
        & (sizes[:, 2] == stored_bytes)
        & (sizes[:, 3] == HEADER_BYTES + 4)
        & (sizes[:, 4] != 0)
        & (sizes[:, 4] <= np.minimum(stored_bytes - (HEADER_BYTES + 8), raw_bytes))
    )
    return passes


_SIMPLE_COLUMNS = np.arange(HEADER_BYTES + 8)
_SIMPLE_FLAGS = [
    not flags & (_RESERVED | _COPIED)
    and flags & _BOTH_SHUFFLES != _BOTH_SHUFFLES
    and flags >> _CODEC_SHIFT in _READ_CODECS
    for flags in range(256)
]
_SIMPLE_FLAGS_ARRAY = np.array(_SIMPLE_FLAGS)


def encode(raw: bytes, codec: str, level: int, typesize: int) -> bytes:
    """A version 1 buffer with bit shuffle and `codec` "zstd" or "lz4", as c-blosc 1.21 would lay it out.

    libblosc2 itself writes such buffers only under a process-wide environment variable and with a version byte that
    Blosc 1 refuses; so the layout is made here, and the library shuffles and compresses.
    """
    lib = library()
    if lib is None:
        raise UnsupportedFormat("writing blosc needs the libblosc2 of the blosc2 package, which cannot be loaded")
    code = _ZSTD if codec == "zstd" else _LZ4
    block_bytes = min(max(len(raw), 1), _BLOCK_BYTES - _BLOCK_BYTES % (8 * typesize))
    flags = _BIT_SHUFFLE | code << _CODEC_SHIFT
    split = code == _LZ4 and typesize <= _MAX_SPLITS and block_bytes // typesize >= _MIN_SPLIT_ITEMS
    flags |= 0 if split else _NOT_SPLIT
    if _MIN_SPLIT_ITEMS <= len(raw) <= block_bytes and not split and len(raw) % (8 * typesize) == 0:
        # The chunks that writers make: as below, for one block of one stream.
        shuffled = bytearray(len(raw))
        lib.bitshuffle(typesize, len(raw), raw, address_of(shuffled))
        stream = _zstd(shuffled, level) if code == _ZSTD else _lz4(lib, bytes(shuffled), level)
        if len(stream) >= len(raw):
            stream = bytes(shuffled)
        at = HEADER_BYTES + 8 + len(stream)
        if at < len(raw) + HEADER_BYTES:
            sizes = (len(raw), block_bytes, at, HEADER_BYTES + 4, len(stream))
            return _SINGLE.pack(_FORMAT_VERSION, _CODEC_VERSION, flags, typesize, *sizes) + stream
    elif len(raw) >= _MIN_SPLIT_ITEMS:  # c-blosc copies less than MIN_BUFFERSIZE (128) bytes
        n_blocks = -(-len(raw) // block_bytes)
        starts: list[int] = []
        parts: list[bytes] = []
        at = HEADER_BYTES + 4 * n_blocks
        for begin in range(0, len(raw), block_bytes):
            block = raw[begin : begin + block_bytes]
            n_streams = typesize if split and len(block) == block_bytes else 1
            encoded = _encode_block(lib, block, code, level, typesize, n_streams)
            starts.append(at)
            parts.append(encoded)
            at += len(encoded)
        if at < len(raw) + HEADER_BYTES:
            head = header(flags, typesize, len(raw), block_bytes, at)
            return b"".join((head, struct.pack(f"<{n_blocks}I", *starts), *parts))
    return header(flags | _COPIED, typesize, len(raw), block_bytes, HEADER_BYTES + len(raw)) + raw


def encode_many(raws: Sequence[bytes], codec: str, level: int, typesize: int) -> list[bytes]:
    """As `encode` for each. For zstd the compressor is called once for all, which lets other threads run meanwhile."""
    lib = library()
    size = len(raws[0]) if raws else 0
    compressor = _compressor(level)
    if (
        lib is None
        or codec != "zstd"
        or not _MIN_SPLIT_ITEMS <= size <= _BLOCK_BYTES - _BLOCK_BYTES % (8 * typesize)
        or size % (8 * typesize)
        or any(len(raw) != size for raw in raws)
        or not hasattr(compressor, "multi_compress_to_buffer")
    ):
        return [encode(raw, codec, level, typesize) for raw in raws]
    shuffled = bytearray(size * len(raws))
    at = address_of(shuffled)
    for raw in raws:
        lib.bitshuffle(typesize, size, raw, at)
        at += size
    view = memoryview(shuffled)
    streams = compressor.multi_compress_to_buffer([view[n * size : (n + 1) * size] for n in range(len(raws))])
    flags = flags_of("zstd", is_bit_shuffled=True)
    encoded = []
    for n, raw in enumerate(raws):
        stream = streams[n].tobytes()
        length = HEADER_BYTES + 8 + len(stream)
        if length < size + HEADER_BYTES:
            sizes = (size, size, length, HEADER_BYTES + 4, len(stream))
            encoded.append(_SINGLE.pack(_FORMAT_VERSION, _CODEC_VERSION, flags, typesize, *sizes) + stream)
        else:
            encoded.append(encode(raw, codec, level, typesize))
    return encoded


def _encode_block(lib: Library, block: bytes, code: int, level: int, typesize: int, n_streams: int) -> bytes:
    shuffled = block
    # In this version of the format a block whose item count is no multiple of 8 is left as it is.
    if len(block) // typesize % 8 == 0:
        out = bytearray(block)
        lib.bitshuffle(typesize, len(block), block, address_of(out))
        shuffled = bytes(out)
    parts = []
    stream_bytes = len(block) // n_streams
    for at in range(0, stream_bytes * n_streams, stream_bytes):
        stream = shuffled[at : at + stream_bytes]
        encoded = _zstd(stream, level) if code == _ZSTD else _lz4(lib, stream, level)
        if len(encoded) >= len(stream):
            encoded = stream
        parts += [_U32.pack(len(encoded)), encoded]
    return b"".join(parts)


def _zstd(stream: bytes | bytearray, level: int) -> bytes:
    return _compressor(level).compress(stream)


def _compressor(level: int) -> zstandard.ZstdCompressor:
    """This thread's, with c-blosc's translation of blosc levels 1..9."""
    zstd_level = {8: _MAX_ZSTD_LEVEL - 2, 9: _MAX_ZSTD_LEVEL}.get(level, 2 * level - 1)
    if _local.compressors is None:
        _local.compressors = {}
    compressor = _local.compressors.get(zstd_level)
    if compressor is None:
        compressor = _local.compressors[zstd_level] = zstandard.ZstdCompressor(level=zstd_level)
    return compressor


def _lz4(lib: Library, stream: bytes, level: int) -> bytes:
    out = bytearray(len(stream))
    n = lib.lz4_compress(stream, address_of(out), len(stream), len(out), 10 - level)
    return bytes(out[:n]) if n > 0 else stream
