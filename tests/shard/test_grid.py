"""The chunk grid against numpy's own slicing of column-major arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dafmount.errors import CorruptDescriptor
from dafmount.shard.grid import Grid, Piece, make_grid

LIMIT = 1 << 26
ITEMS = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    rank = draw(st.integers(1, 2))
    shape = [draw(st.integers(0, 20)) for _ in range(rank)]
    chunk_shape = [draw(st.integers(1, 9)) for _ in range(rank)]
    return make_grid(shape, chunk_shape, draw(st.sampled_from([1, 2, 4, 8])), LIMIT, "x")


def property_and_chunks(grid: Grid) -> tuple[bytes, list[bytes]]:
    """Flat bytes, and raw chunks cut by numpy with padding of 0xEE, which no flat byte is."""
    values: NDArray[np.generic] = np.arange(int(np.prod(grid.shape)), dtype=ITEMS[grid.itemsize]) % 200 + 1
    array = values.reshape(grid.shape, order="F")
    padded_shape = [n * size for n, size in zip(grid.grid_shape, grid.chunk_shape, strict=True)]
    padded = np.full(padded_shape, 0xEE, array.dtype)
    padded[tuple(slice(0, n) for n in grid.shape)] = array
    chunks = []
    for block in np.ndindex(*reversed(grid.grid_shape)):  # the first dimension is to run fastest
        at = tuple(slice(b * c, (b + 1) * c) for b, c in zip(reversed(block), grid.chunk_shape, strict=True))
        chunks.append(padded[at].tobytes(order="F"))
    return array.tobytes(order="F"), chunks


@settings(max_examples=100, deadline=None)
@given(grid=grids(), data=st.data())
def test_pieces_give_exactly_the_flat_range(grid: Grid, data: st.DataObject) -> None:
    flat, chunks = property_and_chunks(grid)
    assert grid.size == len(flat)
    assert grid.n_chunks == len(chunks)
    offset = data.draw(st.integers(0, len(flat)))
    length = data.draw(st.integers(0, len(flat) - offset))
    pieces = grid.pieces(offset, length)
    assert all(piece.start < piece.stop for piece in pieces)
    assert b"".join(chunks[piece.chunk][piece.start : piece.stop] for piece in pieces) == flat[offset : offset + length]


@settings(max_examples=100, deadline=None)
@given(grid=grids(), data=st.data())
def test_a_run_decoded_in_order_holds_the_flat_range(grid: Grid, data: st.DataObject) -> None:
    flat, chunks = property_and_chunks(grid)
    offset = data.draw(st.integers(0, len(flat)))
    length = data.draw(st.integers(0, len(flat) - offset))
    run = grid.run(offset, length)
    if run is None:
        assert length == 0 or not grid.is_sequential
        return
    out = bytearray(run.buffer_bytes)
    assert len(run.places) == run.last - run.first + 1
    for chunk, place in zip(range(run.first, run.last + 1), run.places, strict=True):
        out[place : place + grid.chunk_bytes] = chunks[chunk]
    assert len(out) == run.buffer_bytes
    assert out[run.skip : run.skip + length] == flat[offset : offset + length]
    assert {piece.chunk for piece in grid.pieces(offset, length)} == set(range(run.first, run.last + 1))


@settings(max_examples=50, deadline=None)
@given(grid=grids())
def test_valid_counts_add_up_to_the_property(grid: Grid) -> None:
    counts = [grid.valid_count(chunk) for chunk in range(grid.n_chunks)]
    assert sum(counts) * grid.itemsize == grid.size
    assert all(0 < count <= grid.chunk_count for count in counts)


def test_a_terabyte_property_needs_no_walk_over_its_chunks() -> None:
    grid = make_grid([10**6, 10**6], [1024, 1], 8, LIMIT, "x")
    assert grid.n_chunks == 977 * 10**6
    far = 8 * (10**6 * 999_999 + 1023)
    assert grid.pieces(far, 16) == [Piece(977 * 999_999, 8184, 8192), Piece(977 * 999_999 + 1, 0, 8)]
    run = grid.run(far, 16)
    assert run is not None
    assert (run.first, run.last, run.skip) == (977 * 999_999, 977 * 999_999 + 1, 8184)


@pytest.mark.parametrize(
    ("shape", "chunk_shape", "itemsize"),
    [
        ([], [], 8),
        ([1, 2, 3], [1, 1, 1], 8),
        ([5], [5, 1], 8),
        ([5], [0], 8),
        ([-1], [5], 8),
        ([5], [LIMIT], 8),
        ([1 << 40, 1 << 40], [1, 1], 1),
    ],
)
def test_senseless_shapes_are_refused(shape: list[int], chunk_shape: list[int], itemsize: int) -> None:
    with pytest.raises(CorruptDescriptor, match="a property"):
        make_grid(shape, chunk_shape, itemsize, LIMIT, "a property")


@pytest.mark.parametrize("shape", [[0], [0, 5], [5, 0], [0, 0]])
def test_an_empty_property_has_no_chunks(shape: list[int]) -> None:
    grid = make_grid(shape, [4] * len(shape), 8, LIMIT, "x")
    assert (grid.n_chunks, grid.size, list(grid.pieces(0, 0)), grid.run(0, 0)) == (0, 0, [], None)
