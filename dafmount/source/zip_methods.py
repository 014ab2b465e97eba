"""Decompression of ZIP entries as a stream.

Pure: compressed chunks in, decompressed chunks out, each of bounded size whatever the input claims. Translates the
decoders' errors. Owns which ZIP methods are read. Each stream belongs to one thread.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Iterator
from typing import IO, Protocol, cast

from dafmount.errors import CorruptArchive, UnsupportedFormat

STORED = 0

CHUNK_BYTES = 256 * 1024
"""How much is decompressed at a time."""

_DEFLATE, _DEFLATE64, _BZIP2, _ZSTANDARD = 8, 9, 12, 93

_METHOD_NAMES = {
    1: "shrink",
    6: "implode",
    14: "LZMA",
    20: "zstandard, early",
    95: "xz",
    97: "WavPack",
    98: "PPMd",
    99: "AES",
}
"""APPNOTE.TXT 4.4.5: those seen in the wild that are not read."""

_DEFLATE64_STEP = 256
"""The inflate64 library cannot bound its output. A byte of Deflate64 makes at most some 30,000, so small steps do."""


def check_method(method: int, name: str) -> None:
    """Raises UnsupportedFormat for a method that is not read; `name` is what the message calls the entry."""
    if method != STORED and method not in _DECODERS:
        known = f" ({_METHOD_NAMES[method]})" if method in _METHOD_NAMES else ""
        raise UnsupportedFormat(
            f"{name}: ZIP compression method {method}{known} is not supported, expected 0 (stored), 8 (deflate), "
            "9 (deflate64), 12 (bzip2) or 93 (zstandard)"
        )


def decompress(method: int, compressed: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The decompressed bytes in chunks; ends where the compressed stream does, or where `compressed` ends.

    Raises CorruptArchive for bytes that are no such stream. How much there ought to be is the caller's to check.
    """
    try:
        yield from _DECODERS[method](compressed)
    except _decoder_errors(method) as error:
        raise CorruptArchive(f"{name}: its compressed data is damaged: {error}") from error


def _decoder_errors(method: int) -> tuple[type[Exception], ...]:
    if method == _ZSTANDARD:
        import zstandard

        return (zstandard.ZstdError,)
    # bz2 raises OSError, which a source may raise too: _bzip2 turns it into ValueError.
    return (zlib.error, ValueError)


def _deflate(compressed: Iterator[bytes]) -> Iterator[bytes]:
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    for chunk in compressed:
        pending = chunk
        while pending and not decoder.eof:
            yield decoder.decompress(pending, CHUNK_BYTES)
            pending = decoder.unconsumed_tail
        # All input taken does not mean all output given.
        while not decoder.eof and (rest := decoder.decompress(b"", CHUNK_BYTES)):
            yield rest
        if decoder.eof:
            return


def _deflate64(compressed: Iterator[bytes]) -> Iterator[bytes]:
    import inflate64

    decoder = inflate64.Inflater()
    for chunk in compressed:
        for start in range(0, len(chunk), _DEFLATE64_STEP):
            yield decoder.inflate(chunk[start : start + _DEFLATE64_STEP])
            if decoder.eof:
                return


def _bzip2(compressed: Iterator[bytes]) -> Iterator[bytes]:
    decoder = bz2.BZ2Decompressor()
    for chunk in compressed:
        pending = chunk
        while not decoder.eof:
            try:
                data = decoder.decompress(pending, CHUNK_BYTES)
            except OSError as error:
                raise ValueError(str(error)) from error
            yield data
            pending = b""
            if decoder.needs_input:
                break
        if decoder.eof:
            return


def _zstandard(compressed: Iterator[bytes]) -> Iterator[bytes]:
    import zstandard

    # The library itself refuses windows above 128 MiB. Archivers with threads write several frames.
    source = cast("IO[bytes]", _Chunks(compressed))  # of a file the library uses `read` only
    reader = zstandard.ZstdDecompressor().stream_reader(source, read_across_frames=True)
    while data := reader.read(CHUNK_BYTES):
        yield data


class _Chunks:
    """An iterator of chunks as the file that zstandard reads from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._pending = b""

    def read(self, length: int) -> bytes:
        """At most `length` bytes; none at the end."""
        if not self._pending:
            self._pending = next(self._chunks, b"")
        data, self._pending = self._pending[:length], self._pending[length:]
        return data


class _Decoder(Protocol):
    def __call__(self, compressed: Iterator[bytes]) -> Iterator[bytes]: ...


_DECODERS: dict[int, _Decoder] = {_DEFLATE: _deflate, _DEFLATE64: _deflate64, _BZIP2: _bzip2, _ZSTANDARD: _zstandard}
