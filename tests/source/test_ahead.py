from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.errors import ShortRead, SourceUnavailable
from dafmount.source.ahead import Ahead, Streams
from dafmount.source.base import Range
from dafmount.source.fetchers import Fetchers, Task

DATA = os.urandom(2_000_000)
KIB = 1024


class Recording:
    """A far source that remembers what it was asked for, and may be told to fail or to wait."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []
        self.failure: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.name, self.size, self.gap_bytes = "source", len(data), 0
        self.is_closed = False

    def read(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        if offset + length > len(self.data):
            raise ShortRead("beyond")
        return self.data[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return None

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def fetchers() -> Iterator[Fetchers]:
    made = Fetchers(4, 1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize("is_sequential", [False, True])
@settings(max_examples=40, deadline=None)
@given(reads=st.lists(st.tuples(st.integers(0, 49_999), st.integers(0, 20_000), st.booleans()), max_size=30))
def test_any_reads_give_what_lies_there(is_sequential: bool, reads: list[tuple[int, int, bool]]) -> None:
    fetchers = Fetchers(3, 60_000)
    ahead = Ahead(Recording(DATA[:50_000]), fetchers, is_sequential=is_sequential)
    for offset, length, is_impatient in reads:
        length = min(length, 50_000 - offset)
        found = ahead.read_nowait(offset, length) if is_impatient else None
        if found is None:
            found = ahead.read(offset, length)
        assert found == DATA[offset : offset + length]
    assert fetchers.held_bytes <= 60_000
    ahead.close()
    assert fetchers.held_bytes == 0
    fetchers.close()


def test_sequential_reading_asks_for_each_byte_once_in_longer_and_longer_pieces(fetchers: Fetchers) -> None:
    source = Recording()
    ahead = Ahead(source, fetchers)
    assert b"".join(ahead.read(at, min(16 * KIB, len(DATA) - at)) for at in range(0, len(DATA), 16 * KIB)) == DATA
    assert sum(length for _, length in source.asked) == len(DATA)
    assert len(source.asked) < len(DATA) / (64 * KIB)
    assert max(length for _, length in source.asked) >= 128 * KIB


def test_random_reading_asks_for_nothing_else(fetchers: Fetchers) -> None:
    source = Recording()
    ahead = Ahead(source, fetchers)
    offsets = [1_000_000, 5, 700_000, 300_000, 1_900_000, 200_000]
    for offset in offsets:
        ahead.read_nowait(offset, 4096)
        assert ahead.read(offset, 4096) == DATA[offset : offset + 4096]
    assert sorted(source.asked) == sorted((offset, 4096) for offset in offsets)


def test_what_is_on_its_way_is_not_asked_for_again(fetchers: Fetchers) -> None:
    source = Recording()
    source.gate.clear()
    ahead = Ahead(source, fetchers)
    assert ahead.read_nowait(0, 1000) is None
    assert ahead.read_nowait(200, 300) is None
    found: list[bytes] = []
    readers = [threading.Thread(target=lambda at=at: found.append(ahead.read(at, 100))) for at in (0, 300, 900)]
    for reader in readers:
        reader.start()
    source.gate.set()
    for reader in readers:
        reader.join(30)
    assert sorted(found) == sorted(DATA[at : at + 100] for at in (0, 300, 900))
    assert source.asked == [(0, 1000)]


def test_a_failed_read_raises_and_the_next_one_tries_again(fetchers: Fetchers) -> None:
    source = Recording()
    source.failure = SourceUnavailable("gone")
    ahead = Ahead(source, fetchers)
    for _ in range(2):
        with pytest.raises(SourceUnavailable):
            ahead.read(0, 100)
    with pytest.raises(SourceUnavailable):
        ahead.read_ranges([Range(0, 100), Range(5000, 5100)])
    source.failure = None
    assert ahead.read(0, 100) == DATA[:100]
    assert ahead.read_ranges([Range(50, 150), Range(5000, 5100)]) == [DATA[50:150], DATA[5000:5100]]


def test_what_fails_ahead_of_a_reader_does_not_stop_it(fetchers: Fetchers) -> None:
    source = Recording()
    ahead = Ahead(source, fetchers, is_sequential=False)
    source.failure = SourceUnavailable("for a moment")
    ahead.prefetch(Range(0, 1000), is_needed=False)
    while not source.asked or ahead.read_here(0, 1) is not None:
        pass
    source.failure = None
    assert ahead.read(0, 1000) == DATA[:1000]


class Slow(Recording):
    """A source whose bytes come in two halves, the second when the gate opens; or not at all, if it is to fail."""

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        self.asked.append((offset, len(buffer)))
        half = len(buffer) // 2
        buffer[:half] = self.data[offset : offset + half]
        arrived(half)
        assert self.gate.wait(30)
        if self.failure is not None:
            raise self.failure
        buffer[half:] = self.data[offset + half : offset + len(buffer)]
        arrived(len(buffer))


def test_the_first_bytes_of_a_request_can_be_read_before_the_last_are_here(fetchers: Fetchers) -> None:
    source = Slow()
    source.gate.clear()
    ahead = Ahead(source, fetchers, is_sequential=False)
    ahead.prefetch(Range(0, 1000), is_needed=True)
    assert ahead.read(0, 500) == DATA[:500]
    assert ahead.read_here(100, 400) == DATA[100:500]
    assert ahead.read_here(100, 401) is None
    source.gate.set()
    assert ahead.read(400, 600) == DATA[400:1000]
    assert source.asked == [(0, 1000)]


def test_a_request_that_fails_half_way_fails_for_those_who_need_the_rest(fetchers: Fetchers) -> None:
    source = Slow()
    source.gate.clear()
    source.failure = SourceUnavailable("half way")
    ahead = Ahead(source, fetchers, is_sequential=False)
    ahead.prefetch(Range(0, 1000), is_needed=True)
    failed: list[type[Exception]] = []

    def read() -> None:
        try:
            ahead.read(450, 100)
        except SourceUnavailable as error:
            failed.append(type(error))

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    assert ahead.read(0, 500) == DATA[:500]
    source.gate.set()
    for reader in readers:
        reader.join(30)
    assert failed
    source.failure = None
    assert ahead.read(0, 1000) == DATA[:1000]


def test_reads_outside(fetchers: Fetchers) -> None:
    ahead = Ahead(Recording(), fetchers)
    for offset, length in ((len(DATA), 1), (-1, 5), (0, len(DATA) + 1)):
        with pytest.raises(ShortRead):
            ahead.read(offset, length)


def test_held_bytes_stay_within_the_limit_and_go_to_who_reads(fetchers: Fetchers) -> None:
    source = Recording()
    kept = Ahead(source, fetchers)
    kept.keep_what_was_read()
    for at in range(0, len(DATA), 100_000):
        kept.read_ranges([Range(at, at + 100_000)])
        assert fetchers.held_bytes <= 1 << 20
    source.asked.clear()
    assert kept.read_ranges([Range(1_900_000, 2_000_000)]) == [DATA[1_900_000:]]
    assert source.asked == []  # it is still here
    other = Ahead(Recording(), fetchers)
    other.prefetch(Range(0, 900_000), is_needed=False)
    assert other.read(0, 900_000) == DATA[:900_000]


def test_closing_closes_the_source(fetchers: Fetchers) -> None:
    source = Recording()
    ahead = Ahead(source, fetchers)
    ahead.prefetch(Range(0, 1000), is_needed=True)
    ahead.close()
    assert source.is_closed
    assert fetchers.held_bytes == 0


def test_a_window_grows_with_what_was_read_and_is_renewed_when_half_is_used() -> None:
    streams = Streams(max_window_bytes=1000)
    found = [streams.note(at, 100, 10_000) for at in range(0, 2000, 100)]
    assert found[:4] == [None, Range(200, 800), None, Range(800, 1400)]
    assert None in found[3:]
    wanted = [window for window in found if window is not None]
    assert all(before.stop == after.start for before, after in pairwise(wanted))
    assert max(window.stop - window.start for window in wanted) <= 1000
    assert streams.note(2000, 100, 2100) is None


def test_requests_of_the_kernel_may_overtake_each_other() -> None:
    streams = Streams()
    size = 128 * KIB
    assert streams.note(0, size, 1 << 30) is None
    assert streams.note(2 * size, size, 1 << 30) is not None
    assert streams.note(size, size, 1 << 30) is None


def test_a_reader_of_one_record_is_not_taken_to_go_on() -> None:
    record = 512 * KIB
    streams = Streams(record_bytes=record)
    size = 128 * KIB
    windows = [streams.note(5 * record + at, size, 1 << 30) for at in range(0, record, size)]
    assert max(window.stop for window in windows if window is not None) == 6 * record
    assert streams.record_stop(6 * record) == 6 * record
    beyond = streams.note(6 * record, size, 1 << 30)
    assert beyond is not None
    assert beyond.stop > 6 * record + size
    assert streams.record_stop(6 * record + size) is None


def test_a_task_runs_once_whoever_is_first() -> None:
    runs: list[int] = []
    task = Task(lambda: runs.append(1) or len(runs))
    assert not task.is_done
    assert [task.result(), task.result()] == [1, 1]
    task.run()
    assert runs == [1]


def test_tasks_may_wait_for_tasks_though_there_is_one_thread() -> None:
    fetchers = Fetchers(1, 0)
    inner = [fetchers.submit(lambda n=n: n) for n in range(3)]
    outer = fetchers.submit(lambda: sum(fetchers.submit(lambda n=n: n).result() for n in range(3)))
    assert outer.result() == sum(task.result() for task in inner) == 3
    fetchers.close()
    assert fetchers.submit(lambda: 7).result() == 7


def test_a_task_that_fails_raises_for_everybody() -> None:
    def fail() -> None:
        raise SourceUnavailable("gone")

    task = Task(fail)
    for _ in range(2):
        with pytest.raises(SourceUnavailable):
            task.result()
    assert task.has_failed
