"""Counting requests and telling how long they took, without a mount."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dafmount.mount.statistics import Statistics


def test_nothing_is_told_of_requests_that_did_not_occur() -> None:
    statistics = Statistics()
    assert statistics.requests() == {}
    assert statistics.latency("read") is None
    assert statistics.requests() == {}


def test_requests_are_counted_by_kind_and_errors_by_name() -> None:
    statistics = Statistics()
    for kind in ("read", "lookup", "read"):
        statistics.took(kind, 1000)
    statistics.failed("EIO")
    statistics.failed("EIO")
    statistics.failed("ESTALE")
    assert statistics.requests() == {"read": 2, "lookup": 1}
    assert statistics.errors == {"EIO": 2, "ESTALE": 1}


@given(st.integers(0, 2**62))
def test_a_time_is_told_at_most_a_quarter_too_large(elapsed_ns: int) -> None:
    statistics = Statistics()
    statistics.took("read", elapsed_ns)
    latency = statistics.latency("read")
    assert latency is not None
    told_ns = latency.longest_us * 1000
    assert elapsed_ns <= told_ns * (1 + 1e-9)
    assert told_ns <= max(16, elapsed_ns * 1.25 + 1)


@given(st.lists(st.integers(1_000, 10**9), min_size=1, max_size=200))
def test_percentiles_agree_with_the_sorted_times(times_ns: list[int]) -> None:
    statistics = Statistics()
    for elapsed_ns in times_ns:
        statistics.took("read", elapsed_ns)
    latency = statistics.latency("read")
    assert latency is not None
    ordered = sorted(times_ns)
    for percentile, told_us in latency.percentiles_us.items():
        rank = -(-percentile * len(ordered) // 100)
        exact_us = ordered[rank - 1] / 1000
        assert exact_us <= told_us * (1 + 1e-9) <= exact_us * 1.25 + 0.01
    assert list(latency.percentiles_us) == [50, 90, 99]
    assert latency.n_requests == len(times_ns)
