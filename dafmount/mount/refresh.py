"""Following sources that change: when to look, applying what is found, and telling the kernel.

The kernel remembers names, attributes and bytes for long, so that what it remembers is never asked for again: somebody
has to look without being asked, and to tell it. Looking and telling block and run in worker threads; the tree is
changed in the event loop's thread. Telling must not happen within a handler: it waits for requests that are under way.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import FileNameT, InodeT

from dafmount.tree.nodes import OpenContents
from dafmount.tree.refresh import Forget, Unit, Units, close_unused

log = logging.getLogger(__name__)

T = TypeVar("T")

N_THREADS = 8
"""As many sources may be stuck before none is looked at any more."""

SHARE = 20
"""A source is left alone for so many times as long as looking at it took."""

SETTLE_S = 2.0
"""How long a request waits for the tree to become true."""

MAX_PAUSE_S = 60.0
CLOSE_PAUSE_S = 0.1

_UNKNOWN = frozenset({errno.ENOENT, errno.ENOTDIR})
"""What the kernel answers where it does not remember what it shall forget."""

_OVER = frozenset({errno.ENOTCONN, errno.ENODEV, errno.EBADF})
"""What it answers while the mount ends."""


class Follower:
    """Looks at every open unit each `refresh_s` seconds (0: never), and closes units when too many are open."""

    def __init__(
        self, units: Units, contents: OpenContents, refresh_s: float, *, only_in_use: bool = False
    ) -> None:
        """With `only_in_use` it looks only where a file is open or was opened since the last time."""
        self._only_in_use = only_in_use
        self._n_opened = 0
        self._units = units
        self._contents = contents
        self._refresh_s = refresh_s or math.inf
        self._limiter = trio.CapacityLimiter(N_THREADS)
        self._wake = trio.Event()
        self._crowded = trio.Event()
        self._settling: list[trio.Event] = []
        self._busy: dict[Unit, trio.Event] = {}
        """The units that are looked at now, and what is set when that is over."""
        self._not_before_s: dict[Unit, float] = {}
        """When each unit is looked at again at the earliest."""

    def loaded(self) -> None:
        """Hear that a directory was looked into: perhaps that was one too many."""
        if self._units.is_crowded:
            self._crowded.set()

    async def settle(self) -> None:
        """Look now; returns after the tree was brought up to date, or after `SETTLE_S`."""
        settled = trio.Event()
        self._settling.append(settled)
        self._wake.set()
        with trio.move_on_after(SETTLE_S):
            await settled.wait()

    async def run(self) -> None:
        """Until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_few_open)
            while True:
                with trio.move_on_after(self._refresh_s):
                    await self._wake.wait()
                self._wake = trio.Event()
                settling, self._settling = self._settling, []
                if not settling and self._only_in_use and not self._is_in_use():
                    continue
                # A source that is stuck holds up nobody but those who wait for it.
                nursery.start_soon(self._look_at_all, settling)

    def _is_in_use(self) -> bool:
        before, self._n_opened = self._n_opened, self._contents.n_opened
        return self._contents.n_in_use > 0 or self._n_opened != before

    async def _look_at_all(self, settling: list[trio.Event]) -> None:
        now = trio.current_time()
        units = list(self._units)
        if not settling:
            units = [u for u in units if u not in self._busy and self._not_before_s.get(u, 0) <= now]
        forgets: list[Forget] = []
        async with trio.open_nursery() as nursery:
            for unit in units:
                nursery.start_soon(self._look_at, unit, forgets)
        for settled in settling:
            settled.set()
        for forget in forgets:
            await self._in_thread(partial(_tell_kernel, forget))
        self._not_before_s = {unit: at for unit, at in self._not_before_s.items() if at > now}

    async def _look_at(self, unit: Unit, forgets: list[Forget]) -> None:
        while unit in self._busy:  # that look may have begun before the change
            await self._busy[unit].wait()
        over = self._busy[unit] = trio.Event()
        begin = trio.current_time()
        try:
            plan = await self._in_thread(unit.look)
            if plan is not None:
                forgets.append(plan.apply(self._contents))
        except Exception:
            log.exception("%s: unexpected error while looking for changes, please report it", unit.name)
        finally:
            del self._busy[unit]
            over.set()
            now = trio.current_time()
            self._not_before_s[unit] = now + min(SHARE * (now - begin), MAX_PAUSE_S)

    async def _keep_few_open(self) -> None:
        """Close the units that were not used for longest: first the kernel forgets their names, then the nodes go."""
        while True:
            await self._crowded.wait()
            self._crowded = trio.Event()
            unused = self._units.surplus()
            names = [
                (unit.directory.parent.number, unit.directory.name)
                for unit in unused
                if unit.directory.parent is not None and unit.directory.parent.number
            ]
            await self._in_thread(partial(_tell_kernel, Forget([], [], names)))
            for unit in unused:
                close_unused(unit, self._contents)
            # What the kernel forgot arrives as requests of its own, a moment later.
            await trio.sleep(CLOSE_PAUSE_S)
            for unit in self._units.surplus():
                close_unused(unit, self._contents)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True, limiter=self._limiter)


def _tell_kernel(forget: Forget) -> None:
    for number in forget.inodes:
        _tell(partial(pyfuse3.invalidate_inode, InodeT(number)))
    for number in forget.attributes:
        _tell(partial(pyfuse3.invalidate_inode, InodeT(number), attr_only=True))
    for number, name in forget.names:
        _tell(partial(pyfuse3.invalidate_entry, InodeT(number), FileNameT(os.fsencode(name))))


def _tell(call: Callable[[], None]) -> None:
    try:
        call()
    except OSError as error:
        if error.errno not in _UNKNOWN and error.errno not in _OVER:
            log.warning("the kernel did not take note of a change: %s", error)
