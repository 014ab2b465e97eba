"""What is decoded ahead of a reader and given to the kernel: the same bytes, and nobody waits for ever."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dafmount.daf.catalog import Packing
from dafmount.errors import CorruptShard
from dafmount.shard.codecs import CODECS
from dafmount.shard.grid import make_grid
from dafmount.shard.writer import write_shard
from dafmount.source.local import LocalFile
from dafmount.tree import decoders as decoders_module
from dafmount.tree import stretches as stretches_module
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import DECODED, ShardReader, ShardSpec, WouldWait
from dafmount.tree.content import PackedNumbers
from dafmount.tree.decoders import Decoders
from dafmount.tree.nodes import File
from dafmount.tree.stretches import AHEAD_AFTER_BLOCKS, HEAD_BYTES, MAX_HEAD_SHARE, STRETCH_BLOCKS
from mounts import LIMIT_S, wait_until

N_ROWS, N_COLUMNS = 30_000, 240
VALUES = np.random.default_rng(4).poisson(3, (N_COLUMNS, N_ROWS)).astype("<i4")
FLAT = VALUES.tobytes()
BLOCK_BYTES = 1 << 18
PAGE = 4096
SOON = AHEAD_AFTER_BLOCKS * BLOCK_BYTES + HEAD_BYTES
"""Who has read so much is taken to read on."""


class Kernel:
    """A page cache that reads ahead as Linux does: so many bytes from the first missing page, no page that is there."""

    def __init__(self, request_bytes: int) -> None:
        self.request_bytes = request_bytes
        self.pages: set[int] = set()
        self.n_stored_bytes = 0
        self.takes = True
        self.blocks: Callable[[int, int], object] = lambda start, stop: None
        self.lock = threading.Lock()

    def store(self, offset: int, data: memoryview) -> bool:
        stop = offset + len(data)
        assert len(data) > 0
        assert offset % PAGE == 0
        assert stop % PAGE == 0 or stop == len(FLAT)
        assert data == FLAT[offset:stop]
        self.blocks(offset, stop)
        if self.takes:
            with self.lock:
                self.pages.update(range(offset // PAGE, -(-stop // PAGE)))
                self.n_stored_bytes += len(data)
        return self.takes

    def requests(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """What a program that reads from `start` to `stop` makes the kernel ask for, each looked at when it is due."""
        page, last = start // PAGE, -(-stop // PAGE)
        while page < last:
            if page in self.pages:
                page += 1
                continue
            n = 0
            while n < self.request_bytes // PAGE and page + n < last and page + n not in self.pages:
                n += 1
            yield page * PAGE, min(n * PAGE, len(FLAT) - page * PAGE)
            with self.lock:
                self.pages.update(range(page, page + n))
            page += n


class Ready:
    """A kernel that can be given bytes."""

    def is_ready(self) -> bool:
        return True

    def store(self, file: File, offset: int, data: memoryview) -> bool:
        raise NotImplementedError


class Reader:
    """A packed matrix whose columns are no whole number of chunks nor of pages."""

    def __init__(self, shard: Path, compression: str, decoders: Decoders, kernel: Kernel, cache: ChunkCache) -> None:
        self.decoders, self.kernel = decoders, kernel
        how = packing(compression)
        grid = make_grid((N_ROWS, N_COLUMNS), how.chunk_shape, 4, 1 << 20, "x")
        spec = ShardSpec(grid.n_chunks, how, 4, grid.chunk_bytes, 1 << 20, True)
        reader = ShardReader(LocalFile(shard, "x.zip"), spec, "x.zip")
        self.content = PackedNumbers(
            grid, reader, cache, 7, block_bytes=BLOCK_BYTES, decoders=decoders, store=kernel.store
        )
        self.n_requests = 0

    def read(self, start: int, stop: int) -> None:
        """As a program does; all that is asked for is checked, what is stored is by the kernel."""
        for offset, length in self.kernel.requests(start, stop):
            self.ask(offset, length)

    def ask(self, offset: int, length: int) -> None:
        self.n_requests += 1
        found = self.content.read_nowait(offset, length)
        if found is None:
            found = self.content.read(offset, length)
        assert bytes(found) == FLAT[offset : offset + length]

    def settle(self) -> None:
        """Until nothing is under way."""
        wait_until(lambda: all(job.done.is_set() for job in self.decoders._jobs), "what was begun")


def packing(compression: str) -> Packing:
    return Packing("indexed+zipped", (2047, 1), compression, 5)


def made(compression: str) -> bytes:
    out = io.BytesIO()
    write_shard(out, FLAT, (N_ROWS, N_COLUMNS), packing(compression).chunk_shape, 4, compression, 5)
    return out.getvalue()


@contextmanager
def reading(
    shard: Path, compression: str = "blosc_zstd_bitshuffle", n_threads: int = 2, request_bytes: int = HEAD_BYTES
) -> Iterator[Reader]:
    cache = ChunkCache(64 << 20)
    decoders = Decoders(cache, n_threads)
    decoders.kernel = Ready()
    try:
        yield Reader(shard, compression, decoders, Kernel(request_bytes), cache)
    finally:
        decoders.close()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "x.zip"
    path.write_bytes(made("blosc_zstd_bitshuffle"))
    return path


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests keep the machine busy."""
    monkeypatch.setattr(stretches_module, "PATIENCE_S", 20)
    monkeypatch.setattr(stretches_module, "LONG_PATIENCE_S", 20)


@pytest.mark.parametrize("compression", list(CODECS))
def test_all_bytes_are_right_and_most_come_before_they_are_asked_for(tmp_path: Path, compression: str) -> None:
    (tmp_path / "x.zip").write_bytes(made(compression))
    with reading(tmp_path / "x.zip", compression) as reader:
        reader.read(0, SOON)
        reader.settle()  # the threads are there now
        for start in range(SOON, len(FLAT), BLOCK_BYTES):
            reader.read(start, min(start + BLOCK_BYTES, len(FLAT)))
            reader.settle()
        assert reader.kernel.n_stored_bytes > len(FLAT) // 2
        stretches = len(FLAT) // (STRETCH_BLOCKS * BLOCK_BYTES)
        assert reader.n_requests < SOON // HEAD_BYTES + 4 * stretches + 20


@pytest.mark.parametrize("request_bytes", [PAGE, 5 * PAGE, HEAD_BYTES, 1 << 20])
def test_whatever_the_kernel_asks_for_is_right(shard: Path, request_bytes: int) -> None:
    with reading(shard, request_bytes=request_bytes) as reader:
        reader.read(0, len(FLAT))
        reader.settle()


@pytest.mark.parametrize("n_heads", [1, 2, 3, 8])
def test_a_kernel_that_reads_more_ahead_is_given_less_and_then_nothing(shard: Path, n_heads: int) -> None:
    with reading(shard, request_bytes=n_heads * HEAD_BYTES) as reader:
        for offset, length in reader.kernel.requests(0, len(FLAT)):
            reader.ask(offset, length)
            reader.settle()
        assert reader.decoders._threads
        stretches_bytes = len(FLAT) - SOON - STRETCH_BLOCKS * BLOCK_BYTES
        share = 1 - n_heads * HEAD_BYTES / (STRETCH_BLOCKS * BLOCK_BYTES)
        most = stretches_bytes * share + STRETCH_BLOCKS * BLOCK_BYTES
        if n_heads * HEAD_BYTES * MAX_HEAD_SHARE > STRETCH_BLOCKS * BLOCK_BYTES:
            assert reader.kernel.n_stored_bytes == 0
        else:
            assert most / 2 < reader.kernel.n_stored_bytes <= most


def test_short_and_scattered_reads_begin_nothing(shard: Path) -> None:
    with reading(shard) as reader:
        reader.read(0, 2 * BLOCK_BYTES)
        for start in range(0, len(FLAT) - HEAD_BYTES, 7 * HEAD_BYTES):
            reader.ask(start, HEAD_BYTES)
        assert not reader.decoders._threads


def test_without_threads_all_is_decoded_here(shard: Path) -> None:
    with reading(shard, n_threads=0) as reader:
        reader.read(0, len(FLAT))
        assert not reader.decoders._threads
        assert reader.kernel.n_stored_bytes == 0


def test_a_reader_that_jumps_gets_the_right_bytes(shard: Path) -> None:
    with reading(shard) as reader:
        for start in (0, 60, 4, 100, 22):
            at = start * 100_000
            reader.read(at, at + 15 * BLOCK_BYTES)


def test_readers_at_several_places_get_the_right_bytes(shard: Path) -> None:
    with reading(shard) as reader:
        for at in range(0, len(FLAT) // 2, HEAD_BYTES):
            for start in (0, len(FLAT) // 2):
                reader.read(start + at, min(start + at + HEAD_BYTES, len(FLAT)))


def test_a_kernel_that_takes_nothing_is_not_given_more(shard: Path) -> None:
    with reading(shard) as reader:
        stores = []
        reader.kernel.takes = False
        reader.kernel.blocks = lambda start, stop: stores.append(start)
        reader.read(0, SOON)
        reader.settle()
        n_stores = len(stores)
        assert n_stores > 0
        reader.read(SOON, len(FLAT))
        reader.settle()
        assert len(stores) == n_stores


def test_who_reads_past_the_page_cache_makes_it_stop(shard: Path) -> None:
    before = DECODED.n_chunks
    with reading(shard) as reader:
        for at in range(0, len(FLAT) - HEAD_BYTES, HEAD_BYTES):
            reader.ask(at, HEAD_BYTES)
            reader.settle()
        assert 0 < reader.kernel.n_stored_bytes < len(FLAT) // 4
    n_given = reader.kernel.n_stored_bytes / len(FLAT)
    assert DECODED.n_chunks - before < (1.1 + n_given) * len(FLAT) / (2047 * 4), "once more is enough"


def test_what_is_being_given_to_the_kernel_is_answered_meanwhile(shard: Path) -> None:
    """The kernel has asked for pages of what it is given: it takes them only after the answer."""
    answered, begun = threading.Event(), threading.Event()
    taken: list[int] = []

    def blocks(start: int, stop: int) -> None:
        taken.append(start)
        begun.set()
        assert answered.wait(LIMIT_S)

    with reading(shard, n_threads=1) as reader:
        reader.kernel.blocks = blocks
        reader.read(0, SOON)
        assert begun.wait(LIMIT_S)
        head = taken[0] - HEAD_BYTES
        reader.read(SOON, head)
        assert reader.content.read_nowait(head, HEAD_BYTES) is None, "the head waits, and not in the requests' thread"
        reader.ask(taken[0], HEAD_BYTES)  # would fail to return if it waited for what waits for it
        assert reader.content._stretches is not None
        assert reader.content._stretches._n_overlapped == 1
        asked = threading.Thread(target=reader.content.read, args=(head, HEAD_BYTES))
        asked.start()
        asked.join(0.05)
        assert asked.is_alive()
        answered.set()
        asked.join(LIMIT_S)
        assert not asked.is_alive()


def test_a_kernel_that_does_not_come_back_holds_nobody_up(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches_module, "LONG_PATIENCE_S", 0.05)
    monkeypatch.setattr(stretches_module, "PATIENCE_S", 0.05)
    ended = threading.Event()
    with reading(shard) as reader:
        reader.kernel.blocks = lambda start, stop: ended.wait(LIMIT_S)
        reader.read(0, len(FLAT))
        ended.set()
        reader.settle()


def test_a_damaged_chunk_is_an_error_of_its_block_alone(shard: Path, tmp_path: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x55
    damaged = tmp_path / "x.zip"
    damaged.write_bytes(data)
    errors = []
    with reading(damaged) as reader:
        for start in range(0, len(FLAT), HEAD_BYTES):
            try:
                reader.ask(start, min(HEAD_BYTES, len(FLAT) - start))
            except CorruptShard as error:
                errors.append(str(error))
    assert 1 <= len(errors) <= 2 + BLOCK_BYTES // HEAD_BYTES
    assert all(error.startswith("x.zip: chunk") for error in errors)


def test_jobs_that_failed_are_not_taken_for_given(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the first reading of a file that is not in memory."""
    with reading(shard) as reader:
        stretches = reader.content._stretches
        assert stretches is not None
        read, failures = stretches.blocks.read_flat_nowait, [WouldWait(), MemoryError()]

        def fails_at_first(first: int, stop: int) -> memoryview:
            if failures:
                raise failures.pop()
            return read(first, stop)

        monkeypatch.setattr(stretches.blocks, "read_flat_nowait", fails_at_first)
        for offset, length in reader.kernel.requests(0, len(FLAT)):
            reader.ask(offset, length)
            reader.settle()
        assert not failures
        assert stretches.is_given
        assert reader.kernel.n_stored_bytes > len(FLAT) // 3


def test_a_limit_on_threads_is_no_error_of_a_file(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(stretches_module, "PATIENCE_S", 0.01)
    with reading(shard) as reader:
        reader.read(0, len(FLAT))


def test_a_request_waits_only_for_what_does_not_wait_for_it(shard: Path) -> None:
    """It begins where a stretch was given up to, and is longer than the head of the next one."""
    may_end, begun = threading.Event(), threading.Event()
    with reading(shard, n_threads=1) as reader:
        stretches = reader.content._stretches
        assert stretches is not None
        reader.kernel.blocks = lambda start, stop: [call() for call in (begun.set, may_end.wait)]
        reader.read(0, SOON)
        assert begun.wait(LIMIT_S)
        job = stretches._jobs[1]
        asked = threading.Thread(target=stretches.wait, args=(job.blocks, job.stored.start, 2 * HEAD_BYTES))
        asked.start()
        asked.join(LIMIT_S)
        assert not asked.is_alive()
        may_end.set()


def test_readers_who_went_away_leave_room_for_others(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "UNUSED_S", 0.0)
    with reading(shard) as reader:
        reader.read(0, SOON)
        assert reader.decoders._jobs
        reader.settle()
        assert reader.decoders.has_room(BLOCK_BYTES)
        assert not reader.decoders._jobs


def test_a_cache_holds_not_only_what_was_not_asked_for(shard: Path) -> None:
    with reading(shard, request_bytes=4 * HEAD_BYTES) as reader:
        cache = reader.decoders._cache
        for offset, length in reader.kernel.requests(0, len(FLAT) // 2):
            reader.ask(offset, length)
            assert sum(job.n_bytes for job in reader.decoders._jobs) <= cache.limit_bytes * 3 // 4


def test_nothing_is_begun_for_a_content_that_was_closed(shard: Path) -> None:
    with reading(shard, n_threads=1) as reader:
        ended = threading.Event()
        reader.kernel.blocks = lambda start, stop: ended.wait(LIMIT_S)
        reader.read(0, SOON + BLOCK_BYTES)
        reader.content.close()
        ended.set()
        reader.settle()
        assert reader.kernel.n_stored_bytes <= STRETCH_BLOCKS * BLOCK_BYTES


def test_closing_ends_the_threads(shard: Path) -> None:
    with reading(shard) as reader:
        reader.read(0, len(FLAT))
        threads = reader.decoders._threads
        assert threads
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
