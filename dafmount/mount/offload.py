"""The one place that decides where blocking work runs.

A hop to a worker thread and back takes some 100 us, as long as decoding twenty chunks: whatever can be answered from
memory is answered inline, everything else takes one hop. A thread that never comes back (a dead NFS server, say) costs
its own request an error after `timeout_s` and holds one of `n_threads` places, but nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from dafmount.errors import SourceTimeout

T = TypeVar("T")


class Offload:
    """Runs blocking calls in worker threads, with a limit on their number and on the time waited."""

    def __init__(self, n_threads: int, timeout_s: float) -> None:
        self._limiter = trio.CapacityLimiter(n_threads)
        self._timeout_s = timeout_s

    async def run(self, call: Callable[[], T], what: str) -> T:
        """The call's result or exception; SourceTimeout naming `what` when it takes too long."""
        with trio.move_on_after(self._timeout_s):
            return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)
        raise SourceTimeout(f"{what}: no answer within {self._timeout_s:g} s")
