"""How long the cache of decoded chunks takes; `pytest --benchmark-only` prints the table."""

from __future__ import annotations

from pytest_benchmark.fixture import BenchmarkFixture

from dafmount.tree.cache import ChunkCache

CHUNK = bytes(8192)
KEYS = range(1 << 40, (1 << 40) + 128)
"""Of a mebibyte."""


def filled() -> ChunkCache:
    cache = ChunkCache(64 << 20)
    fly(cache, KEYS)
    return cache


def fly(cache: ChunkCache, keys: range) -> int:
    """Take on what is missing and put it there; how many were."""
    claim = cache.claim(keys)
    if claim.mine is None:
        return 0
    cache.land(claim.mine, dict.fromkeys(claim.mine.keys, CHUNK))
    return len(claim.mine.keys)


def test_get_one_chunk(benchmark: BenchmarkFixture) -> None:
    assert benchmark(filled().get, KEYS[5]) is CHUNK


def test_get_the_chunks_of_a_mebibyte(benchmark: BenchmarkFixture) -> None:
    assert len(benchmark(filled().claim, KEYS).found) == len(KEYS)


def test_put_one_chunk(benchmark: BenchmarkFixture) -> None:
    starts = iter(range(10**9))

    def put(cache: ChunkCache) -> int:
        start = next(starts)
        return fly(cache, range(start, start + 1))

    assert benchmark(put, ChunkCache(64 << 20)) == 1


def test_put_the_chunks_of_a_mebibyte_in_place_of_others(benchmark: BenchmarkFixture) -> None:
    cache, starts = ChunkCache(2 << 20), iter(range(0, 10**12, len(KEYS)))

    def put() -> int:
        start = next(starts)
        return fly(cache, range(start, start + len(KEYS)))

    assert benchmark(put) == len(KEYS)
    assert cache.used_bytes <= cache.limit_bytes
