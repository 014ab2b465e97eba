"""When sources are looked at, without a mount."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from dafmount.mount import refresh
from dafmount.mount.refresh import SETTLE_S, Follower
from dafmount.tree.nodes import Directory, File
from dafmount.tree.refresh import Forget
from mounts import LIMIT_S


class OneUnit:
    """A unit that counts how often it is looked at, and the list of it."""

    name = "unit"

    def __init__(self) -> None:
        self.n_looks = 0

    def __iter__(self) -> Iterator[OneUnit]:
        return iter([self])

    def look(self) -> None:
        self.n_looks += 1


class Planned:
    """A unit that finds a change by each look, as soon as `is_free`."""

    name = "unit"

    def __init__(self, number: int) -> None:
        self.number = number
        self.n_looks = 0
        self.is_free = threading.Event()

    def look(self) -> Planned:
        self.n_looks += 1
        self.is_free.wait(LIMIT_S)
        return self

    def apply(self, contents: object) -> Forget:
        return Forget([self.number], [], [])


def a_file(unit: object) -> File:
    folder = Directory("", None, 0, cast(Any, None))
    return File("file", Directory("unit", folder, 0, cast(Any, None), unit), 0, 0, cast(Any, None))


def test_a_source_that_is_stuck_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, well = Planned(1), Planned(2)
    well.is_free.set()
    told: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    monkeypatch.setattr(refresh, "_tell_kernel", lambda forget: told.put(forget.inodes))
    follower = Follower(cast(Any, [stuck, well]), cast(Any, SimpleNamespace()), 0)
    clock = MockClock()  # stands still

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            await wait_all_tasks_blocked()
            await follower.settle(a_file(well))
            assert await trio.to_thread.run_sync(told.get, True, LIMIT_S) == [2]
            async with trio.open_nursery() as impatient:
                for _ in range(3):
                    impatient.start_soon(follower.settle, a_file(stuck))
                await wait_all_tasks_blocked()
                clock.jump(SETTLE_S)
            assert stuck.n_looks == 1
            stuck.is_free.set()
            await follower.settle(a_file(stuck))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=clock)
    assert stuck.n_looks == 2  # what asked while the first was stuck shares the second


@pytest.mark.parametrize("only_in_use", [False, True])
def test_what_nobody_uses_is_left_alone_where_looking_is_dear(only_in_use: bool) -> None:
    units, contents = OneUnit(), SimpleNamespace(n_opened=0, n_in_use=0)
    follower = Follower(cast(Any, units), cast(Any, contents), 10.0, only_in_use=only_in_use)
    counts = []

    async def looks_in(seconds: float) -> None:
        before = units.n_looks
        await trio.sleep(seconds)
        counts.append(units.n_looks - before)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.run)
            await looks_in(101)  # nobody has opened anything
            contents.n_opened += 1
            await looks_in(100)  # somebody did, once
            contents.n_in_use = 1
            await looks_in(100)  # something stays open
            contents.n_in_use = 0
            before = units.n_looks
            await follower.settle(a_file(units))  # somebody was told of a change
            counts.append(units.n_looks - before)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert counts == ([0, 1, 10, 1] if only_in_use else [10, 10, 10, 1])
