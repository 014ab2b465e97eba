"""Indexing a lazy array is indexing the numpy array that it stands for, and reads no more than it must."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from check_archives import shard
from dafmount.arrays.lazy import LazyArray, NumberStretches, StringStretches
from dafmount.daf.catalog import Component, Packing
from dafmount.shard.grid import make_grid
from dafmount.source.zip_entries import MemorySource
from dafmount.tree.build import Style, open_shard
from dafmount.tree.cache import ChunkCache
from dafmount.tree.content import PackedNumbers


class CountingSource:
    """Bytes in memory that count how many of them are read."""

    name = "memory"
    gap_bytes = 0

    def __init__(self, data: bytes) -> None:
        self._source = MemorySource("memory", data)
        self.size = len(data)
        self.read_bytes = 0

    def read(self, offset: int, length: int) -> bytes:
        self.read_bytes += length
        return self._source.read(offset, length)

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return self.read(offset, length)

    def read_ranges(self, ranges: Any) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        pass


def flat(values: np.ndarray[Any, Any]) -> LazyArray:
    source = MemorySource("memory", values.tobytes(order="F"))
    return LazyArray(NumberStretches(source, values.shape[0], values.dtype), values.shape, values.dtype)


def packed(values: np.ndarray[Any, Any], chunk: tuple[int, ...]) -> LazyArray:
    eltype = "String" if values.dtype == object else "Int32"
    data: Any = values.astype("<i4").tobytes(order="F") if eltype == "Int32" else None
    if eltype == "String":
        data = [text.encode() for text in values.reshape(-1, order="F")]
    stored = shard(data, values.shape, chunk, eltype, "zstd")
    source = MemorySource("memory", stored)
    component = Component("", eltype, None, Packing("indexed+zipped", chunk, "zstd", 3))
    style = Style(ChunkCache(1 << 20))
    grid, reader = open_shard(source, values.shape, component, style)
    if eltype == "String":
        return LazyArray(StringStretches(grid, reader, style.cache, 1), values.shape, values.dtype)
    content = PackedNumbers(grid, reader, style.cache, 1)
    return LazyArray(NumberStretches(content, values.shape[0], values.dtype), values.shape, values.dtype)


def index_of(n: int) -> st.SearchStrategy[Any]:
    bound = st.one_of(st.none(), st.integers(-n - 2, n + 2))
    slices = st.builds(slice, bound, bound, st.one_of(st.none(), st.integers(-4, 4).filter(bool)))
    return st.one_of(slices, st.integers(-n, n - 1)) if n else slices


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_basic_index_gives_what_numpy_gives(data: st.DataObject) -> None:
    ndim = data.draw(st.sampled_from([1, 2]))
    shape = tuple(data.draw(st.integers(0 if axis else 1, 9)) for axis in range(ndim))
    chunk = tuple(data.draw(st.integers(1, 5)) for _ in range(ndim))
    numbers = np.arange(int(np.prod(shape)), dtype="<i4").reshape(shape)
    texts = np.empty(shape, object)
    texts[...] = numbers.astype(str).astype(object)
    key = tuple(data.draw(index_of(n)) for n in shape)
    for expected, lazy in ((numbers, flat(numbers)), (numbers, packed(numbers, chunk)), (texts, packed(texts, chunk))):
        found = lazy[key if ndim == 2 or data.draw(st.booleans()) else key[0]]
        assert np.shape(found) == np.shape(expected[key])
        np.testing.assert_array_equal(found, expected[key])


@pytest.mark.parametrize("key", [..., (..., 1), (1, ...), (slice(None), ..., 2), 3, (), np.int64(2), (np.uint8(1), -1)])
def test_shorter_indices(key: Any) -> None:
    values = np.arange(28, dtype="<i4").reshape(7, 4)
    np.testing.assert_array_equal(flat(values)[key], values[key])


@pytest.mark.parametrize("key", [7, -8, (0, 4), (0, 0, 0), (..., ...), True, [1, 2], np.ones(7, bool), "a", None, 1.0])
def test_other_indices_are_index_errors(key: Any) -> None:
    with pytest.raises(IndexError):
        flat(np.zeros((7, 4), "<i4"))[key]


def test_it_looks_like_an_array() -> None:
    values = np.arange(6, dtype="<i4").reshape(3, 2)
    lazy = flat(values)
    assert (lazy.shape, lazy.dtype, lazy.ndim, lazy.size, lazy.nbytes, len(lazy)) == ((3, 2), values.dtype, 2, 6, 24, 3)
    assert repr(lazy) == "<lazy array of 3 x 2 int32>"
    assert np.asarray(lazy).tolist() == values.tolist()
    assert np.asarray(lazy, float).dtype == float
    assert (np.asarray(lazy) @ np.ones(2)).tolist() == [1, 5, 9]
    with pytest.raises(ValueError, match="copy"):
        np.array(lazy, copy=False)


def test_a_column_reads_no_other_column() -> None:
    values = np.zeros((1000, 1000), "<i4")
    source = CountingSource(values.tobytes())
    lazy = LazyArray(NumberStretches(source, 1000, values.dtype), values.shape, values.dtype)
    lazy[:, 7]
    assert source.read_bytes == 4000
    lazy[10:20, 7]
    assert source.read_bytes == 4040
    lazy[3]
    assert source.read_bytes == 4040 + 4000
    lazy[:, ::500]
    assert source.read_bytes == 4040 + 4000 + 8000


def test_a_grid_is_needed_for_strings_of_any_chunk_shape() -> None:
    texts = np.array([[f"{row},{column}" for column in range(5)] for row in range(6)], object)
    for chunk in ((6, 5), (4, 1), (1, 5), (4, 3), (9, 9)):
        assert make_grid((6, 5), chunk, 1, 1 << 20, "grid").n_chunks
        assert packed(texts, chunk)[...].tolist() == texts.tolist()
