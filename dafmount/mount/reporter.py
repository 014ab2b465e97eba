"""The status of the mount that this process serves, put together from everything that counts something.

Runs in the event loop's thread; reads counters that other threads change, without waiting for them.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from datetime import UTC, datetime

from dafmount import __version__
from dafmount.mount.statistics import Statistics
from dafmount.mount.status import PREFIX, WHOLE, Status
from dafmount.source.traffic import TRAFFIC
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import DECODED


class Reporter:
    """Makes the status of the mount that this process serves."""

    def __init__(self, source: str, mountpoint: str, statistics: Statistics, cache: ChunkCache) -> None:
        self._source = source
        self._mountpoint = mountpoint
        self._statistics = statistics
        self._cache = cache
        self._started = datetime.now(UTC)
        self._started_s = time.monotonic()

    def status(self) -> Status:
        """The present state."""
        statistics, cache, counters = self._statistics, self._cache, self._cache.counters
        return Status(
            version=__version__,
            source=self._source,
            mountpoint=self._mountpoint,
            pid=os.getpid(),
            started=self._started.isoformat(timespec="seconds"),
            uptime_s=round(time.monotonic() - self._started_s, 1),
            memory_bytes=_resident_bytes(),
            requests=statistics.requests(),
            bytes_served=statistics.bytes_served,
            chunks_decoded=DECODED.n_chunks,
            cache_hits=counters.hits,
            cache_misses=counters.misses,
            cache_evictions=counters.evictions,
            cache_bytes=cache.used_bytes,
            cache_limit_bytes=cache.limit_bytes,
            requests_fetched=TRAFFIC.n_requests,
            bytes_fetched=TRAFFIC.n_bytes,
            retries=TRAFFIC.n_retries,
            errors=dict(statistics.errors),
            latency_us=_latencies(statistics),
        )

    def attributes(self) -> dict[str, bytes]:
        """Name -> value of the root's extended attributes."""
        status = asdict(self.status())
        found = {PREFIX + key: _value(value) for key, value in status.items()}
        found[WHOLE] = _value(status)
        return found


def _latencies(statistics: Statistics) -> dict[str, dict[str, float]]:
    found = {}
    for kind in statistics.requests():
        latency = statistics.latency(kind)
        if latency is not None:
            found[kind] = {f"p{percentile}": value for percentile, value in latency.percentiles_us.items()}
            found[kind]["longest"] = latency.longest_us
    return found


def _value(value: object) -> bytes:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    return text.encode("utf-8", "surrogateescape")


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", "rb") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
