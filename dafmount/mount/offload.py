"""The one place that decides where blocking work runs.

A hop to a worker thread and back takes some 100 us, as long as decoding twenty chunks: whatever can be answered from
memory is answered inline, everything else takes one hop.

A thread may never come back (a dead NFS server, say). Every call therefore has a lane, which is what it works on: the
number of a file or directory. A lane has few places, fewer once it was found slow, and whoever waits in the lane that
holds the fewest comes first, so that what waits for one file cannot take all threads. A call that has lasted long no
longer counts among the busy ones, so that many stuck files cannot either; and a lane whose places are all held by
threads that were given up answers at once. Everything here but the calls themselves runs in the event loop's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from dafmount.errors import SourceTimeout

T = TypeVar("T")

log = logging.getLogger(__name__)

LANE_PLACES = 16
"""Threads that may work on one file or directory at the same time."""

SLOW_LANE_PLACES = 8
"""The same, while one of them is slow."""

SLOW_S = 2.0
"""A call that lasts longer waits for something, so that it is not one of those that the limit on threads is for."""

MAX_GIVEN_UP = 512
"""Threads given up and not come back, over all lanes; with so many of them nothing more is begun."""

_LOOK_AGAIN_S = 0.25


class Offload:
    """Runs blocking calls in worker threads, with a limit on their number and on the time waited."""

    def __init__(self, n_threads: int, timeout_s: float) -> None:
        self._n_threads = n_threads
        self._timeout_s = timeout_s
        self._running: dict[_Call, None] = {}  # those that began first come first, here and in each lane
        self._lanes: dict[int, dict[_Call, None]] = {}
        self._waiting: dict[_Call, trio.Event] = {}
        self._n_given_up = 0
        self._begun = trio.Event()

    @property
    def n_given_up(self) -> int:
        """Threads that were given up and have not come back."""
        return self._n_given_up

    async def run(
        self, call: Callable[[], T], what: str, lane: int, undo: Callable[[], None] | None = None,
        timeout_s: float | None = None,
    ) -> T:  # fmt: skip
        """The call's result or exception; SourceTimeout naming `what` when it takes longer than `timeout_s`.

        `undo` takes back what a call did that succeeded after it was given up.
        """
        self._check_hope(what, lane)
        place = _Call(self, lane, undo)
        limit_s = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)

        def work() -> T:
            result = call()
            place.has_succeeded = True
            return result

        with trio.move_on_after(limit_s):
            return await trio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=place)  # type: ignore[arg-type]
        self._give_up(place)
        raise SourceTimeout(f"{what}: no answer within {limit_s:g} s")

    async def wait_for_work(self) -> None:
        """Returns when a call is under way."""
        while not self._running:
            if self._begun.is_set():
                self._begun = trio.Event()
            await self._begun.wait()

    async def enter(self, call: _Call) -> None:
        """Wait for a place."""
        woken = self._waiting[call] = trio.Event()
        self._admit()
        try:
            while not call.is_running:
                with trio.move_on_after(_LOOK_AGAIN_S):  # a call becomes slow without telling
                    await woken.wait()
                self._admit()
        except BaseException:
            self._waiting.pop(call, None)
            if call.is_running:
                self.leave(call)
            raise

    def leave(self, call: _Call) -> None:
        """The thread came back."""
        call.is_running = False
        del self._running[call]
        lane = self._lanes[call.lane]
        del lane[call]
        if not lane:
            del self._lanes[call.lane]
        if call.is_given_up:
            self._n_given_up -= 1
            call.take_back()
        self._admit()

    def _admit(self) -> None:
        """Give the free places to those that wait."""
        while self._waiting and self._n_busy() < self._n_threads:
            candidates = [call for call in self._waiting if self._has_room(call.lane)]
            if not candidates:
                return
            self._begin(min(candidates, key=lambda call: len(self._lanes.get(call.lane, ()))))

    def _begin(self, call: _Call) -> None:
        call.is_running = True
        call.started_s = trio.current_time()
        self._running[call] = None
        self._lanes.setdefault(call.lane, {})[call] = None
        self._waiting.pop(call).set()
        if not self._begun.is_set():
            self._begun.set()

    def _n_busy(self) -> int:
        n = len(self._running)
        if n < self._n_threads:
            return n
        for call in self._running:
            if not _is_slow(call):
                break
            n -= 1
        return n

    def _has_room(self, lane: int) -> bool:
        calls = self._lanes.get(lane)
        if not calls:
            return True
        return len(calls) < (SLOW_LANE_PLACES if _is_slow(next(iter(calls))) else LANE_PLACES)

    def _check_hope(self, what: str, lane: int) -> None:
        """Waiting for the whole time again and again helps nobody, and holds a request each time."""
        calls = self._lanes.get(lane, ())
        if calls and not self._has_room(lane) and all(call.is_given_up for call in calls):
            raise SourceTimeout(f"{what}: {len(calls)} earlier reads of it were given up and still wait for the source")
        if self._n_given_up >= MAX_GIVEN_UP:
            raise SourceTimeout(f"{what}: {MAX_GIVEN_UP} earlier reads were given up and still wait for the source")

    def _give_up(self, call: _Call) -> None:
        call.is_given_up = True
        if call.is_running:
            self._n_given_up += 1
        else:
            call.take_back()


class _Call:
    """One call, in the shape of the limiter that trio asks for a place and tells when the thread has come back."""

    __slots__ = ("_offload", "_undo", "has_succeeded", "is_given_up", "is_running", "lane", "started_s")

    def __init__(self, offload: Offload, lane: int, undo: Callable[[], None] | None) -> None:
        self._offload = offload
        self._undo = undo
        self.lane = lane
        self.started_s = 0.0
        self.is_running = False
        self.is_given_up = False
        self.has_succeeded = False

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        """Wait for a place."""
        await self._offload.enter(self)

    def release_on_behalf_of(self, borrower: object) -> None:
        """The thread came back, whether or not somebody still waits for it."""
        self._offload.leave(self)

    def take_back(self) -> None:
        """Undo what nobody will use."""
        if self.has_succeeded and self._undo is not None:
            try:
                self._undo()
            except Exception:
                log.exception("unexpected error, please report it")


def _is_slow(call: _Call) -> bool:
    return trio.current_time() - call.started_s > SLOW_S
