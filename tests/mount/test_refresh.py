"""When sources are looked at, without a mount."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock

from dafmount.mount.refresh import Follower


class OneUnit:
    """A unit that counts how often it is looked at, and the list of it."""

    name = "unit"

    def __init__(self) -> None:
        self.n_looks = 0

    def __iter__(self) -> Iterator[OneUnit]:
        return iter([self])

    def look(self) -> None:
        self.n_looks += 1


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
            await follower.settle()  # somebody was told of a change
            counts.append(units.n_looks - before)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0.01))
    assert counts == ([0, 1, 10, 1] if only_in_use else [10, 10, 10, 1])
