from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.source.base import Range
from dafmount.source.warm import Warm

DATA = os.urandom(10_000)


class Far:
    """A source that remembers what it was asked for."""

    name, size, gap_bytes = "far", len(DATA), 0

    def __init__(self) -> None:
        self.asked: list[Range] = []

    def read(self, offset: int, length: int) -> bytes:
        self.asked.append(Range(offset, offset + length))
        return DATA[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return None

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        self.asked += ranges
        return [DATA[start:stop] for start, stop in ranges]

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        buffer[:] = self.read(offset, len(buffer))
        arrived(len(buffer))


RANGES = st.builds(
    lambda start, length: Range(start, min(start + length, len(DATA))), st.integers(0, 9999), st.integers(1, 900)
)


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(RANGES, max_size=5), RANGES), max_size=8))
def test_any_reads_give_what_lies_there(steps: list[tuple[list[Range], Range]]) -> None:
    warm = Warm(cast(Any, Far()), 2000)
    for ranges, (start, stop) in steps:
        warm.warm(ranges)
        buffer = bytearray(stop - start)
        warm.read_into(start, memoryview(buffer), lambda n_bytes: None)
        assert warm.read(start, stop - start) == buffer == DATA[start:stop]
        assert warm.read_nowait(start, stop - start) in (None, DATA[start:stop])


def test_what_was_fetched_is_not_fetched_again_while_there_is_room() -> None:
    far = Far()
    warm = Warm(cast(Any, far), 1000)
    warm.warm([Range(0, 300), Range(5000, 5300)])
    warm.warm([Range(5000, 5300), Range(7000, 7100)])
    assert far.asked == [Range(0, 300), Range(5000, 5300), Range(7000, 7100)]
    assert warm.read_nowait(10, 290) == DATA[10:300]
    assert warm.read_nowait(10, 291) is None
    warm.warm([Range(8000, 8900)])  # others make room, those fetched first
    assert warm.read_nowait(0, 300) is None
    assert warm.read_nowait(7000, 100) == DATA[7000:7100]
    assert warm.read_nowait(8000, 900) == DATA[8000:8900]
