"""The cache of decoded chunks: its bound, its order, and one decode however many ask."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from dafmount.tree.cache import ChunkCache, Flight


def decode(cache: ChunkCache, key: int, size: int) -> None:
    claim = cache.claim([key])
    if claim.mine is not None:
        cache.land(claim.mine, {key: bytes(size)})


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60))))
def test_never_holds_more_than_its_limit(requests: list[tuple[int, int]]) -> None:
    cache = ChunkCache(100)
    for key, size in requests:
        decode(cache, key, size)
        held = sum(len(chunk) for chunk in cache.claim(range(10)).found.values())
        assert held == cache.used_bytes <= 100
        # What the look above claimed is given back.
        for flight in {id(flight): flight for flight in cache._flights.values()}.values():
            cache.land(flight, {})


def test_the_least_recently_used_chunk_goes_first() -> None:
    cache = ChunkCache(30)
    for key in (1, 2, 3):
        decode(cache, key, 10)
    cache.claim([1])
    decode(cache, 4, 10)
    assert sorted(cache.claim([1, 3, 4]).found) == [1, 3, 4]
    assert cache.claim([2]).mine is not None
    assert cache.counters.evictions == 1


def test_a_chunk_larger_than_the_cache_is_not_kept() -> None:
    cache = ChunkCache(10)
    decode(cache, 1, 11)
    assert cache.used_bytes == 0


def test_a_second_reader_waits_for_the_first_ones_flight() -> None:
    cache = ChunkCache(100)
    mine = cache.claim([1, 2]).mine
    assert isinstance(mine, Flight)
    second = cache.claim([2, 3])
    assert second.others == [(2, mine)]
    assert second.mine is not None
    assert list(second.mine.keys) == [3]
    got: list[bytes] = []

    def wait() -> None:
        mine.done.wait(10)
        got.append(bytes(mine.chunks[2]))

    waiter = threading.Thread(target=wait)
    waiter.start()
    cache.land(mine, {1: b"one", 2: b"two"})
    waiter.join(10)
    assert got == [b"two"]


def test_a_failed_flight_leaves_its_keys_to_the_next_who_asks() -> None:
    cache = ChunkCache(100)
    mine = cache.claim([1]).mine
    assert mine is not None
    assert cache.busy([1])
    cache.land(mine, {})
    assert mine.done.is_set()
    assert not cache.busy([1])
    assert cache.claim([1]).mine is not None
