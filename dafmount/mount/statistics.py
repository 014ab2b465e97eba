"""What a mount has done: requests by kind with their times, bytes, errors.

Owns the counters of requests and how times are kept. Must not know FUSE, nor who wants to see the numbers. Written from
the event loop's thread alone; counting one request takes some 0.5 us and no memory.

Times are kept in buckets, four to each doubling, so that a percentile is at most a quarter too large.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

PERCENTILES = (50, 90, 99)

_PER_DOUBLING = 4
_N_BUCKETS = 65 * _PER_DOUBLING


class Latency(NamedTuple):
    """How long requests of one kind took, from their arrival in this process to the answer."""

    n_requests: int
    percentiles_us: Mapping[int, float]
    """Percentile (50, 90, 99) -> microseconds, rounded up to the end of a bucket."""
    longest_us: float
    """The end of the bucket of the longest."""


class Statistics:
    """Counters of one mount."""

    def __init__(self) -> None:
        self.bytes_served = 0
        """Bytes of files given to the kernel."""
        self.errors: dict[str, int] = {}
        """Failed requests by the name of their errno; a name that does not exist is no failure."""
        self._buckets: defaultdict[str, list[int]] = defaultdict(lambda: [0] * _N_BUCKETS)

    def took(self, kind: str, elapsed_ns: int) -> None:
        """One request of a kind, such as `read`, was answered."""
        doubling = (elapsed_ns | 8).bit_length()
        self._buckets[kind][doubling * 4 + (elapsed_ns >> (doubling - 3) & 3)] += 1

    def failed(self, errno_name: str) -> None:
        """One request ended in an error."""
        self.errors[errno_name] = self.errors.get(errno_name, 0) + 1

    def requests(self) -> dict[str, int]:
        """Kind -> number, for kinds that occurred."""
        return {kind: sum(buckets) for kind, buckets in self._buckets.items()}

    def latency(self, kind: str) -> Latency | None:
        """How long requests of a kind took; None where there were none."""
        if kind not in self._buckets:
            return None
        buckets = self._buckets[kind]
        total = sum(buckets)
        percentiles: dict[int, float] = {}
        seen, end_us = 0, 0.0
        for bucket, count in enumerate(buckets):
            if count == 0:
                continue
            seen += count
            end_us = _end_ns(bucket) / 1000
            for percentile in PERCENTILES:
                if percentile not in percentiles and seen * 100 >= percentile * total:
                    percentiles[percentile] = end_us
        return Latency(total, percentiles, end_us)


def _end_ns(bucket: int) -> int:
    """The first time that is too long for a bucket, in nanoseconds."""
    doubling, quarter = divmod(bucket, _PER_DOUBLING)
    return (_PER_DOUBLING + quarter + 1) << (doubling - 3)
