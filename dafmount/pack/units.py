"""The bytes of planned files, in units of about a mebibyte that may be read and encoded side by side.

Owns how a component is cut into units and how a unit's flat bytes become encoded chunks. Knows nothing of destinations
and threads: whoever asks for units calls their `work` where and when they like, and uses the results in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from dafmount.errors import CorruptDescriptor, UnsupportedFormat
from dafmount.pack.plan import FlatFile, ShardFile
from dafmount.shard.codecs import encode_chunk, encode_chunks
from dafmount.shard.grid import Grid
from dafmount.shard.strings import encode_strings
from dafmount.shard.writer import split_flat
from dafmount.tree.build import MAX_CHUNK_BYTES
from dafmount.tree.content import Content

UNIT_BYTES = 1 << 20

Encoded = tuple[bytes, int, int]
"""What `encode_chunk` gives: payload, CRC-32, raw size."""


class Unit(NamedTuple):
    """Some work whose result is the next part of a file."""

    work: Callable[[], bytes | memoryview | list[Encoded]]
    """Flat bytes, or encoded chunks of a shard."""
    size: int
    """Flat bytes it covers."""


def flat_units(file: FlatFile, content: Content) -> Iterator[Unit]:
    """The units of a flat file."""
    for offset in range(0, file.size, UNIT_BYTES):
        length = min(UNIT_BYTES, file.size - offset)
        yield Unit(partial(content.read, offset, length), length)


def shard_units(file: ShardFile, content: Content) -> Iterator[Unit]:
    """The units of a shard; those of strings raise CorruptDescriptor for a wrong number of lines."""
    return _text_units(file, content) if file.itemsize is None else _number_units(file, file.itemsize, content)


def _number_units(file: ShardFile, itemsize: int, content: Content) -> Iterator[Unit]:
    """Whole columns, or, where these are long, whole chunks of one column."""
    rows, columns = (*file.shape, 1)[:2]
    chunk_rows = file.packing.chunk_shape[0]
    n_columns = UNIT_BYTES // (rows * itemsize)
    if n_columns:
        stretches = ((column, 0, min(n_columns, columns - column), rows) for column in range(0, columns, n_columns))
    else:
        step = max(1, UNIT_BYTES // (chunk_rows * itemsize)) * chunk_rows
        stretches = (
            (column, row, 1, min(step, rows - row)) for column in range(columns) for row in range(0, rows, step)
        )
    for column, row, width, height in stretches:
        offset, length = (column * rows + row) * itemsize, width * height * itemsize
        grid = Grid((height, width), (chunk_rows, 1), itemsize)
        yield Unit(partial(_encode_numbers, file, content, offset, length, grid), length)


def _encode_numbers(file: ShardFile, content: Content, offset: int, length: int, grid: Grid) -> list[Encoded]:
    packing = file.packing
    level = packing.compression_level or 0
    flat = content.read(offset, length)
    return encode_chunks(packing.compression, level, file.itemsize, list(split_flat(flat, grid)))


def _text_units(file: ShardFile, content: Content) -> Iterator[Unit]:
    """Lines are found one after the other, here; only encoding them is left to the units."""
    rows, columns = (*file.shape, 1)[:2]
    chunk_rows, expected = file.packing.chunk_shape[0], rows * columns
    chunks: list[Sequence[bytes]] = []
    waiting: list[bytes] = []
    size = row = n_lines = 0
    for lines in _line_batches(file, content):
        waiting += lines
        n_lines += len(lines)
        if n_lines > expected:
            raise CorruptDescriptor(f"{file.path}: more than {expected} lines")
        at = 0
        while at < len(waiting) and (height := min(chunk_rows, rows - row)) <= len(waiting) - at:
            chunks.append(waiting[at : at + height])
            size += sum(map(len, chunks[-1])) + height
            at += height
            row = (row + height) % rows
            if size >= UNIT_BYTES:
                yield Unit(partial(_encode_texts, file, chunks), size)
                chunks, size = [], 0
        del waiting[:at]
    if n_lines < expected:
        raise CorruptDescriptor(f"{file.path}: {n_lines} lines, expected {expected}")
    if chunks:
        yield Unit(partial(_encode_texts, file, chunks), size)


def _line_batches(file: ShardFile, content: Content) -> Iterator[list[bytes]]:
    """The lines of a text without their newlines, those of about a unit at a time."""
    rest: list[bytes] = []
    rest_bytes = 0
    for offset in range(0, file.size, UNIT_BYTES):
        block = bytes(content.read(offset, min(UNIT_BYTES, file.size - offset)))
        first, newline, others = block.partition(b"\n")
        rest.append(first)
        rest_bytes += len(first)
        if rest_bytes > MAX_CHUNK_BYTES:
            raise UnsupportedFormat(f"{file.path}: a line of more than {MAX_CHUNK_BYTES} bytes cannot be packed")
        if newline:
            lines = others.split(b"\n")
            complete = [b"".join(rest), *lines[:-1]]
            rest, rest_bytes = [lines[-1]], len(lines[-1])
            yield complete
    last = b"".join(rest)
    if last:
        yield [last]


def _encode_texts(file: ShardFile, chunks: Sequence[Sequence[bytes]]) -> list[Encoded]:
    packing = file.packing
    level = packing.compression_level or 0
    encoded = []
    for lines in chunks:
        raw_bytes = 4 + 4 * packing.chunk_shape[0] + sum(map(len, lines))
        if raw_bytes > MAX_CHUNK_BYTES:
            raise UnsupportedFormat(
                f"{file.path}: a chunk of {packing.chunk_shape[0]} strings takes {raw_bytes} bytes, more than "
                f"{MAX_CHUNK_BYTES}; choose smaller chunks or leave it flat"
            )
        raw = encode_strings(lines, packing.chunk_shape[0])
        encoded.append(encode_chunk(packing.compression, level, None, raw))
    return encoded
