"""Packed components as flat bytes: any range of any grid, decoded once, and damage that stays where it is."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.daf.catalog import Packing
from dafmount.errors import CorruptShard, ShortRead
from dafmount.shard.codecs import CODECS
from dafmount.shard.grid import make_grid
from dafmount.shard.writer import write_shard
from dafmount.source.base import Range
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import ShardReader, ShardSpec
from dafmount.tree.content import PackedNumbers, PackedText


class Memory:
    """A byte source in memory that counts its reads and can hold them up."""

    gap_bytes = 4096

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.name = "memory: x.zip"
        self.bytes_read = 0
        self.gate = threading.Event()
        self.gate.set()
        self.is_near = True

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> bytes:
        assert self.gate.wait(20)
        if offset < 0 or offset + length > len(self.data):
            raise ShortRead(f"{self.name}: {length} bytes at {offset}")
        self.bytes_read += length
        return self.data[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return self.read(offset, length) if self.is_near else None

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        pass


def shard_of(data: bytes | list[bytes], shape: tuple[int, ...], packing: Packing, itemsize: int | None) -> bytes:
    out = io.BytesIO()
    write_shard(out, data, shape, packing.chunk_shape, itemsize, packing.compression, packing.compression_level or 5)
    return out.getvalue()


def packing(chunk_shape: tuple[int, ...], compression: str = "zstd") -> Packing:
    return Packing("indexed+zipped", chunk_shape, compression, 5)


def numbers(
    values: np.ndarray[Any, Any], how: Packing, cache: ChunkCache | None = None
) -> tuple[PackedNumbers, Memory]:
    """A packed component of an array whose dimensions are reversed (C order is then column-major), and its source."""
    shape, itemsize = values.shape[::-1], values.itemsize
    source = Memory(shard_of(values.tobytes(), shape, how, itemsize))
    grid = make_grid(shape, how.chunk_shape, itemsize, 1 << 20, "x")
    spec = ShardSpec(grid.n_chunks, how, itemsize, grid.chunk_bytes, 1 << 20, True)
    reader = ShardReader(source, spec, source.name)
    return PackedNumbers(grid, reader, cache or ChunkCache(1 << 20), 7), source


def text(lines: list[bytes], shape: tuple[int, ...], how: Packing) -> tuple[PackedText, Memory]:
    source = Memory(shard_of(lines, shape, how, None))
    grid = make_grid(shape, how.chunk_shape, 1, 1 << 20, "x")
    spec = ShardSpec(grid.n_chunks, how, None, None, 1 << 20, True)
    return PackedText(grid, ShardReader(source, spec, source.name), ChunkCache(1 << 20), 7), source


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_range_of_any_grid_is_a_slice_of_the_flat_file(data: st.DataObject) -> None:
    n_rows, n_columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 9))
    chunk = (data.draw(st.integers(1, 50)), data.draw(st.integers(1, 10)))
    compression = data.draw(st.sampled_from(sorted(CODECS)))
    values = np.arange(n_rows * n_columns, dtype="<i4").reshape(n_columns, n_rows)
    content, _ = numbers(values, packing(chunk, compression))
    flat = values.tobytes()
    assert content.size == len(flat)
    for _ in range(4):
        start = data.draw(st.integers(0, len(flat) - 1))
        length = data.draw(st.integers(1, len(flat) - start))
        expected = flat[start : start + length]
        assert content.read(start, length) == expected
        assert content.read_nowait(start, length) == expected


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_any_range_of_packed_strings_is_a_slice_of_the_text(data: st.DataObject) -> None:
    is_matrix = data.draw(st.booleans())
    n_rows, n_columns = data.draw(st.integers(1, 30)), data.draw(st.integers(1, 5)) if is_matrix else 1
    shape: tuple[int, ...] = (n_rows, n_columns) if is_matrix else (n_rows,)
    chunk = tuple(data.draw(st.integers(1, 12)) for _ in shape)
    compression = data.draw(st.sampled_from(sorted(CODECS)))
    word = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=9)
    count = n_rows * n_columns
    lines = [line.encode() for line in data.draw(st.lists(word, min_size=count, max_size=count))]
    content, _ = text(lines, shape, packing(chunk, compression))
    flat = b"".join(line + b"\n" for line in lines)
    assert content.size == len(flat)
    start = data.draw(st.integers(0, len(flat) - 1))
    length = data.draw(st.integers(1, len(flat) - start))
    assert content.read(start, length) == flat[start : start + length]
    assert content.read_nowait(start, length) == flat[start : start + length]
    assert content.read(0, len(flat)) == flat


def test_only_the_chunks_that_are_needed_are_read() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 60, 100_000)
    content, source = numbers(values, packing((1000,)))
    assert content.read(8 * 50_500, 8) == values[50_500:50_501].tobytes()
    assert source.bytes_read < len(source.data) / 10


def test_a_chunk_is_decoded_once_however_many_readers_ask_at_once() -> None:
    cache = ChunkCache(1 << 20)
    values = np.arange(3000, dtype="<i8")
    content, source = numbers(values, packing((1000,)), cache)
    source.gate.clear()
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(content.read, 8 * 900, 8 * 200) for _ in range(12)]
        source.gate.set()
        for answer in answers:
            assert answer.result(20) == values[900:1100].tobytes()
    assert cache.counters.misses == 2


def test_what_would_have_to_be_waited_for_is_not_answered_inline() -> None:
    values = np.arange(3000, dtype="<i8")
    content, source = numbers(values, packing((1000,)))
    source.is_near = False
    assert content.read_nowait(0, 8) is None
    assert content.read(0, 8) == values[:1].tobytes()
    assert content.read_nowait(16, 8) == values[2:3].tobytes()


def test_damage_in_one_chunk_is_an_error_of_that_chunk_only() -> None:
    values = np.random.default_rng(1).integers(0, 1 << 60, 3000)
    content, source = numbers(values, packing((1000,)))
    middle = source.data.index(b"PK\x03\x04", len(source.data) // 2)
    damaged = bytearray(source.data)
    damaged[middle - 100] ^= 1
    source.data = bytes(damaged)
    with pytest.raises(CorruptShard, match=r"memory: x\.zip: chunk 1: "):
        content.read(8 * 1000, 8)
    assert content.read(0, 8 * 1000) == values[:1000].tobytes()
    assert content.read(8 * 2000, 8 * 1000) == values[2000:].tobytes()


def test_a_text_whose_strings_contradict_its_sizes_is_an_error() -> None:
    content, source = text([b"ab", b"c"], (2,), packing((2,), "gzip_shuffle"))
    assert content.size == 5
    source.data = shard_of([b"ab", b"cd"], (2,), packing((2,), "gzip_shuffle"), None)
    content._reader._opened = None
    content._reader._blocks.clear()
    with pytest.raises(CorruptShard, match="6 bytes of text, expected 5"):
        content.read(0, 5)


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0)])
def test_an_empty_component_has_no_bytes(shape: tuple[int, ...]) -> None:
    content, _ = numbers(np.zeros(shape[::-1], "<f8"), packing((4,) * len(shape)))
    assert content.size == 0


def test_an_empty_text_has_no_bytes() -> None:
    assert text([], (0,), packing((4,)))[0].size == 0
