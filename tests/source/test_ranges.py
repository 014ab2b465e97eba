from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.source.base import Range
from dafmount.source.ranges import Fetch, cut, join

DATA = bytes(i * 7 % 251 for i in range(400))

some_ranges = st.lists(
    st.tuples(st.integers(0, 300), st.integers(0, 90)).map(lambda pair: Range(pair[0], pair[0] + pair[1])), max_size=12
)


def test_near_ranges_are_fetched_together_and_far_ones_apart() -> None:
    wanted = [Range(100, 110), Range(0, 10), Range(14, 20), Range(25, 30)]
    assert join(wanted, gap_bytes=4, max_bytes=1000) == [
        Fetch(Range(0, 20), (1, 2)),
        Fetch(Range(25, 30), (3,)),
        Fetch(Range(100, 110), (0,)),
    ]


def test_a_range_longer_than_the_limit_stays_whole_and_joins_what_lies_inside_it() -> None:
    assert join([Range(0, 50), Range(10, 20), Range(50, 60)], gap_bytes=8, max_bytes=16) == [
        Fetch(Range(0, 50), (0, 1)),
        Fetch(Range(50, 60), (2,)),
    ]


def test_nothing_wanted_is_nothing_fetched() -> None:
    assert join([], gap_bytes=8, max_bytes=16) == []


@settings(max_examples=100, deadline=None)
@given(some_ranges, st.integers(0, 50), st.integers(1, 200))
def test_each_wanted_range_is_cut_out_of_the_one_fetch_that_holds_it(
    wanted: list[Range], gap_bytes: int, max_bytes: int
) -> None:
    found: dict[int, bytes] = {}
    for fetch in join(wanted, gap_bytes=gap_bytes, max_bytes=max_bytes):
        members = cut(fetch, DATA[fetch.range.start : fetch.range.stop], wanted)
        assert not found.keys() & members.keys()
        found.update((position, bytes(view)) for position, view in members.items())
    assert found == {position: DATA[start:stop] for position, (start, stop) in enumerate(wanted)}


@settings(max_examples=100, deadline=None)
@given(some_ranges, st.integers(0, 50), st.integers(1, 200))
def test_no_fetch_bridges_a_larger_gap_or_outgrows_the_limit(
    wanted: list[Range], gap_bytes: int, max_bytes: int
) -> None:
    for fetch in join(wanted, gap_bytes=gap_bytes, max_bytes=max_bytes):
        members = sorted(wanted[position] for position in fetch.members)
        longest = max(stop - start for start, stop in members)
        assert fetch.range.stop - fetch.range.start <= max(max_bytes, longest)
        assert fetch.range == Range(members[0].start, max(stop for _, stop in members))
        reached = members[0].stop
        for start, stop in members:
            assert start - reached <= gap_bytes
            reached = max(reached, stop)
