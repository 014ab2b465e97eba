"""What the cache keeps pieces of, and how a file's pieces get there: each decoded once however many ask.

Owns the waiting for one another, and the blocks of a component that is read sequentially. Must not know what a file's
bytes mean. Every class may be shared by threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from dafmount.shard.grid import Grid
from dafmount.tree.cache import Chunk, ChunkCache, Flight
from dafmount.tree.chunks import ChunkReader, WouldWait

FLIGHT_PATIENCE_S = 10.0
"""How long a reader waits for another one that decodes what it needs; then it reads for itself."""


class Units(Protocol):
    """What the cache keeps pieces of: numbered from 0, each read whole."""

    def read(self, units: Sequence[int]) -> Sequence[Chunk]:
        """The units asked for, in ascending order; may block."""

    def read_nowait(self, units: Sequence[int]) -> Sequence[Chunk]:
        """As `read`, but raises WouldWait rather than wait for bytes."""

    def close(self) -> None:
        """Let go of the source."""


class CachedUnits:
    """Units of one file through the shared cache; each decoded once however many ask."""

    def __init__(self, units: Units, cache: ChunkCache, first_key: int) -> None:
        self._units = units
        self._cache = cache
        self._base = first_key

    def peek(self, unit: int) -> Chunk | None:
        """A unit if it is cached."""
        return self._cache.get(self._base + unit)

    def discard(self, unit: int) -> None:
        """Do not keep a unit any longer."""
        self._cache.discard(self._base + unit)

    def add(self, unit: int, chunk: Chunk) -> None:
        """Keep a unit that was decoded by other means."""
        self._cache.add(self._base + unit, chunk)

    def swap(self, unit: int, chunk: Chunk) -> None:
        """Keep a unit, if it is still kept, in other memory."""
        self._cache.swap(self._base + unit, chunk)

    def key(self, unit: int) -> int:
        """Under which the cache keeps a unit."""
        return self._base + unit

    def has(self, units: Sequence[int]) -> bool:
        """Whether all units are cached now."""
        return self._cache.has([self._base + unit for unit in units])

    def get(self, units: Sequence[int]) -> list[Chunk]:
        """The units, in ascending order of their numbers; decodes or waits for those that are not cached."""
        wanted = [self._base + unit for unit in units]
        have: dict[int, Chunk] = {}
        while len(have) < len(wanted):
            claim = self._cache.claim([key for key in wanted if key not in have])
            have.update(claim.found)
            if claim.mine is not None:
                have.update(self._decode(claim.mine, self._units.read))
            have.update(self._wait_for(claim.others))
        return [have[key] for key in wanted]

    def get_nowait(self, units: Sequence[int]) -> list[Chunk] | None:
        """As `get`, or None where bytes or another reader would have to be waited for."""
        if len(units) == 1:
            return self._get_one_nowait(units)
        wanted = [self._base + unit for unit in units]
        if self._cache.busy(wanted):
            return None
        claim = self._cache.claim(wanted)
        have = claim.found
        if claim.mine is not None:
            try:
                have.update(self._decode(claim.mine, self._units.read_nowait))
            except WouldWait:
                self._cache.uncount(claim)
                return None
        if claim.others:
            return None
        return [have[key] for key in wanted]

    def _get_one_nowait(self, units: Sequence[int]) -> list[Chunk] | None:
        """One unit, as random access asks for. Promised to nobody: it is there before anyone could wait for it."""
        key = self._base + units[0]
        chunk = self._cache.get(key)
        if chunk is None:
            if self._cache.busy((key,)):
                return None
            try:
                chunk = self._units.read_nowait(units)[0]
            except WouldWait:
                return None
            self._cache.add(key, chunk)
        return [chunk]

    def close(self) -> None:
        """Let go of the source; decoded units stay cached."""
        self._units.close()

    def _wait_for(self, others: Sequence[tuple[int, Flight]]) -> dict[int, Chunk]:
        """What others decode. A reader that may never come back is not waited for: its units are read once more."""
        landed: dict[int, Chunk] = {}
        late: list[int] = []
        end_s = time.monotonic() + FLIGHT_PATIENCE_S
        for key, flight in others:
            if not flight.done.wait(max(0.0, end_s - time.monotonic())):
                late.append(key)
            elif key in flight.chunks:
                landed[key] = flight.chunks[key]
        if late:
            landed.update(self._decode(Flight(late), self._units.read))
        return landed

    def _decode(self, flight: Flight, read: Callable[[Sequence[int]], Sequence[Chunk]]) -> dict[int, Chunk]:
        decoded: dict[int, Chunk] = {}
        try:
            decoded = dict(zip(flight.keys, read([key - self._base for key in flight.keys]), strict=True))
        finally:
            self._cache.land(flight, decoded)
        return decoded


class FlatBlocks:
    """Pieces of a numeric component that are decoded together when it is read sequentially.

    A block is `per_block` consecutive chunks laid out flat, so that what a call costs is shared by many chunks.
    """

    def __init__(self, grid: Grid, reader: ChunkReader, per_block: int) -> None:
        self._grid = grid
        self._reader = reader
        self._per_block = per_block

    def of_chunk(self, chunk: int) -> int:
        """The block that holds a chunk."""
        return chunk // self._per_block

    def span(self, block: int) -> tuple[int, int]:
        """Where in the flat bytes a block begins and ends."""
        grid, first = self._grid, block * self._per_block
        stop = first + self._per_block
        return grid.flat_offset(first), grid.size if stop >= grid.n_chunks else grid.flat_offset(stop)

    def read(self, units: Sequence[int]) -> Sequence[Chunk]:
        """The blocks asked for; may block."""
        return [self._reader.read_run(*self._run(unit)) for unit in units]

    def read_nowait(self, units: Sequence[int]) -> Sequence[Chunk]:
        """As `read`, but raises WouldWait rather than wait for bytes."""
        return [self._reader.read_run_nowait(*self._run(unit)) for unit in units]

    def read_flat_nowait(self, first: int, stop: int) -> memoryview:
        """The flat bytes of the blocks `first` to `stop`, in one buffer; raises WouldWait."""
        start, end = self.span(first)[0], self.span(stop - 1)[1]
        return self._reader.read_run_nowait(*self._run_of(start, end))[: end - start]

    @property
    def block_bytes(self) -> int:
        """About how long each is."""
        return self._per_block * self._grid.chunk_bytes

    @property
    def n_blocks(self) -> int:
        """How many there are."""
        return -(-self._grid.n_chunks // self._per_block)

    @property
    def size(self) -> int:
        """Bytes of the whole component."""
        return self._grid.size

    def close(self) -> None:
        """Nothing of its own."""

    def _run(self, block: int) -> tuple[int, Sequence[int], int]:
        return self._run_of(*self.span(block))

    def _run_of(self, start: int, stop: int) -> tuple[int, Sequence[int], int]:
        run = self._grid.run(start, stop - start)
        assert run is not None  # the grid is sequential and no block is empty
        return run.first, run.places, run.buffer_bytes
