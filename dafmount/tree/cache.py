"""Decoded chunks, kept within a number of bytes; each is decoded once however many readers ask at the same time.

Owns the least-recently-used order and the flights: a flight is one reader's promise to decode some keys, on which
others wait. Knows nothing of shards. Threads share it; its lock is held for dictionary work only, never while anything
is read or decoded. Invariants: a key is in `_flights` until its flight, or another that brings its chunk, has landed;
`_bytes` is the sum of the sizes in `_chunks`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Chunk = bytes | bytearray | memoryview


@dataclass(slots=True)
class CacheCounters:
    """What has happened since the cache was made."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """Keys that one reader is decoding, and later their chunks."""

    keys: Sequence[int]
    done: threading.Event = field(default_factory=threading.Event)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    """Empty when the decoding failed: whoever waited then tries for itself."""


class Claim(NamedTuple):
    """The answer to `ChunkCache.claim`."""

    found: dict[int, Chunk]
    mine: Flight | None
    """What the caller must decode and then `land`, whether or not it succeeded."""
    others: list[tuple[int, Flight]]
    """Keys that are being decoded by someone else."""


class ChunkCache:
    """Least-recently-used cache of chunks, bounded in bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.counters = CacheCounters()
        self._lock = threading.Lock()
        self._chunks: OrderedDict[int, Chunk] = OrderedDict()
        self._flights: dict[int, Flight] = {}
        self._bytes = 0

    @property
    def used_bytes(self) -> int:
        """Bytes held now; never more than the limit."""
        return self._bytes

    def claim(self, keys: Sequence[int]) -> Claim:
        """Sort `keys` into those that are here, those that the caller shall decode, and those on their way."""
        found: dict[int, Chunk] = {}
        missing: list[int] = []
        others: list[tuple[int, Flight]] = []
        chunks, flights = self._chunks, self._flights
        with self._lock:
            for key in keys:
                chunk = chunks.get(key)
                if chunk is not None:
                    chunks.move_to_end(key)
                    found[key] = chunk
                elif key in flights:
                    others.append((key, flights[key]))
                else:
                    missing.append(key)
            mine = Flight(missing) if missing else None
            if mine is not None:
                for key in missing:
                    flights[key] = mine
            self.counters.hits += len(found)
            self.counters.misses += len(missing)
        return Claim(found, mine, others)

    def get(self, key: int) -> Chunk | None:
        """A chunk that is here; a hit."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._chunks.move_to_end(key)
                self.counters.hits += 1
        return chunk

    def add(self, key: int, chunk: Chunk) -> None:
        """A chunk that was decoded without a claim; a miss."""
        with self._lock:
            self.counters.misses += 1
            self._keep(key, chunk)

    def swap(self, key: int, chunk: Chunk) -> None:
        """The same bytes in other memory, where the chunk is still here."""
        with self._lock:
            if key in self._chunks:
                self._keep(key, chunk)

    def has(self, keys: Sequence[int]) -> bool:
        """Whether all of `keys` are here; changes nothing."""
        return all(key in self._chunks for key in keys)

    def uncount(self, claim: Claim) -> None:
        """A claim that came to nothing, as bytes had to be waited for, will be made again: count it once."""
        with self._lock:
            self.counters.hits -= len(claim.found)
            if claim.mine is not None:
                self.counters.misses -= len(claim.mine.keys)

    def busy(self, keys: Sequence[int]) -> bool:
        """Whether any of `keys` is being decoded now."""
        flights = self._flights
        return bool(flights) and any(key in flights for key in keys)

    def land(self, flight: Flight, chunks: dict[int, Chunk]) -> None:
        """End a flight: keep its chunks (none when it failed) and wake those who wait."""
        with self._lock:
            for key in flight.keys:
                if self._flights.get(key) is flight:
                    del self._flights[key]
            for key, chunk in chunks.items():
                self._keep(key, chunk)
                self._flights.pop(key, None)  # of a reader that was not waited for any longer
            flight.chunks = chunks
        flight.done.set()

    def discard(self, key: int) -> None:
        """Forget one chunk."""
        with self._lock:
            chunk = self._chunks.pop(key, None)
            if chunk is not None:
                self._bytes -= len(chunk)

    def _keep(self, key: int, chunk: Chunk) -> None:
        size = len(chunk)
        if size > self.limit_bytes:
            return
        old = self._chunks.pop(key, None)
        if old is not None:
            self._bytes -= len(old)
        self._chunks[key] = chunk
        self._bytes += size
        while self._bytes > self.limit_bytes:
            _, evicted = self._chunks.popitem(last=False)
            self._bytes -= len(evicted)
            self.counters.evictions += 1
