"""What pyfuse3 uses of trio, without the detours it takes between two requests.

pyfuse3 asks trio for a lock and for the readiness of its descriptor before each request, which makes the event loop
turn twice: as long as decoding ten chunks. Most requests are answered without waiting for anything, so here a request
that has arrived already is taken at once, and the loop turns only when there is none, when a handler waits, or after
a burst.

pyfuse3 reads these names from its module attribute `trio`, which its own asyncio mode replaces in the same way.
"""

from __future__ import annotations

import select
from types import TracebackType
from typing import Any

import pyfuse3
import trio

MAX_BURST = 64
"""Requests answered in a row before other tasks get a turn; some 5 ms."""


def enable() -> None:
    """Let pyfuse3 take requests eagerly; call before `pyfuse3.main`."""
    pyfuse3.trio = _EagerTrio()  # type: ignore[attr-defined]


class _Lock:
    """A lock that its last owner may take again before those who wait for it, so that one task serves a whole burst."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting = trio.lowlevel.ParkingLot()

    async def __aenter__(self) -> None:
        while self._is_held:
            await self._waiting.park()
        self._is_held = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._is_held = False
        self._waiting.unpark()


class _Lowlevel:
    """`trio.lowlevel` with a `wait_readable` that first looks."""

    def __init__(self) -> None:
        self._poll: select.poll | None = None
        self._burst = 0

    async def wait_readable(self, descriptor: int) -> None:
        """Return at once where there is a request, but let others run now and then."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(descriptor, select.POLLIN)
        self._burst += 1
        if self._burst <= MAX_BURST and self._poll.poll(0):
            return
        self._burst = 0
        await trio.lowlevel.wait_readable(descriptor)

    def __getattr__(self, name: str) -> Any:
        return getattr(trio.lowlevel, name)


class _EagerTrio:
    Lock = _Lock

    def __init__(self) -> None:
        self.lowlevel = _Lowlevel()

    def __getattr__(self, name: str) -> Any:
        return getattr(trio, name)
