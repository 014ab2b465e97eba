"""The two filters against the libraries that define them."""

from __future__ import annotations

import sys

import numcodecs
import numpy as np
import pytest

from dafmount.shard import shuffle

SIZES = [0, 1, 7, 8, 9, 127, 128, 1000, 1024, 1025, 5000]


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("n", SIZES)
def test_the_byte_shuffle_is_that_of_numcodecs(itemsize: int, n: int) -> None:
    data = np.random.default_rng(n).bytes(n * itemsize)
    shuffled = shuffle.shuffle(data, itemsize)
    if n:
        assert shuffled == bytes(numcodecs.Shuffle(itemsize).encode(data))
    assert shuffle.unshuffle(shuffled, itemsize) == data


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="bitshuffle has no wheels for this Python")
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize("n", SIZES)
def test_the_bit_shuffle_is_that_of_the_bitshuffle_library(itemsize: int, n: int) -> None:
    import bitshuffle

    data = np.random.default_rng(n).bytes(n * itemsize)
    shuffled = shuffle.bitshuffle(data, itemsize)
    if n:
        assert shuffled == bitshuffle.bitshuffle(np.frombuffer(data, f"u{itemsize}")).tobytes()
    assert shuffle.bitunshuffle(shuffled, itemsize) == data


@pytest.mark.parametrize(
    "forward_and_back", [(shuffle.shuffle, shuffle.unshuffle), (shuffle.bitshuffle, shuffle.bitunshuffle)]
)
def test_bytes_beyond_the_last_whole_item_stay(forward_and_back: tuple[object, object]) -> None:
    forward, back = forward_and_back
    data = bytes(range(8 * 16 + 5))
    assert callable(forward)
    assert callable(back)
    assert forward(data, 8)[-5:] == data[-5:]
    assert back(forward(data, 8), 8) == data
