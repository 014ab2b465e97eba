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
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import pyfuse3
import trio
from pyfuse3 import FileNameT, InodeT

from dafmount.tree.nodes import Directory, File, OpenContents
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
        self._crowded = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._waiting: dict[int, trio.Event] = {}
        """By the unit's identity: looks that have not begun, and what is set once what they find is in the tree."""
        self._busy: dict[int, trio.Event] = {}
        """The same of looks that are under way."""
        self._not_before_s: dict[Unit, float] = {}
        """When each unit is looked at again at the earliest."""

    def loaded(self) -> None:
        """Hear that a directory was looked into: perhaps that was one too many."""
        if self._units.is_crowded:
            self._crowded.set()

    async def settle(self, file: File) -> None:
        """Look everywhere now; returns when what stands behind the names of `file` and of the directories above it is
        up to date, or after `SETTLE_S`."""
        looks = {id(unit): self._begin(unit) for unit in self._units}
        with trio.move_on_after(SETTLE_S):
            for unit in _units_above(file):
                if id(unit) in looks:
                    await looks[id(unit)].wait()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._keep_few_open)
                while True:
                    await trio.sleep(self._refresh_s)
                    if not self._only_in_use or self._is_in_use():
                        self._look_where_due()
        finally:
            self._nursery = None

    def _is_in_use(self) -> bool:
        before, self._n_opened = self._n_opened, self._contents.n_opened
        return self._contents.n_in_use > 0 or self._n_opened != before

    def _look_where_due(self) -> None:
        now = trio.current_time()
        self._not_before_s = {unit: at for unit, at in self._not_before_s.items() if at > now}
        for unit in self._units:
            if id(unit) not in self._busy and unit not in self._not_before_s:
                self._begin(unit)

    def _begin(self, unit: Unit) -> trio.Event:
        """Look at a unit, once for all who ask before the look begins; a source that is stuck holds up no other."""
        applied = self._waiting.get(id(unit))
        if applied is None:
            applied = trio.Event()
            if self._nursery is None:
                applied.set()
            else:
                self._waiting[id(unit)] = applied
                self._nursery.start_soon(self._look_at, unit, applied)
        return applied

    async def _look_at(self, unit: Unit, applied: trio.Event) -> None:
        if id(unit) in self._busy:  # that look may have begun before the change
            await self._busy[id(unit)].wait()
        self._busy[id(unit)] = self._waiting.pop(id(unit))
        begin = trio.current_time()
        forget = None
        try:
            plan = await self._in_thread(unit.look)
            if plan is not None:
                forget = plan.apply(self._contents)
        except Exception:
            log.exception("%s: unexpected error while looking for changes, please report it", unit.name)
        finally:
            del self._busy[id(unit)]
            applied.set()  # before the kernel is told, which waits for those who wait for this
            now = trio.current_time()
            self._not_before_s[unit] = now + min(SHARE * (now - begin), MAX_PAUSE_S)
        if forget is not None:
            await self._in_thread(partial(_tell_kernel, forget))

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


def _units_above(file: File) -> Iterator[object]:
    directory: Directory | None = file.parent
    while directory is not None:
        if directory.unit is not None:
            yield directory.unit
        directory = directory.parent


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
