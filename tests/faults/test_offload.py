"""Threads that do not come back: others get on, those that wait are told, and what came too late is taken back."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator

import pytest
import trio
import trio.testing

from dafmount.errors import SourceTimeout
from dafmount.mount import offload as offload_module
from dafmount.mount.offload import LANE_PLACES, Offload

LIMIT_S = 30
SHORT_S = 0.05


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What stuck calls wait for."""
    event = threading.Event()
    yield event
    event.set()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        with trio.fail_after(LIMIT_S):
            await test()

    trio.run(limited)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await trio.sleep(0.01)


def test_results_and_errors_come_through() -> None:
    async def test() -> None:
        offload = Offload(2, LIMIT_S)
        assert await offload.run(lambda: 5, "five", 1) == 5
        with pytest.raises(ZeroDivisionError):
            await offload.run(lambda: 1 // 0, "none", 1)

    run(test)


def test_a_call_that_takes_too_long_is_given_up(stuck: threading.Event) -> None:
    async def test() -> None:
        offload = Offload(2, SHORT_S)
        with pytest.raises(SourceTimeout, match=r"file: no answer within 0\.05 s"):
            await offload.run(stuck.wait, "file", 1)
        assert offload.n_given_up == 1
        stuck.set()
        await until(lambda: offload.n_given_up == 0)

    run(test)


def test_what_succeeds_too_late_is_taken_back_and_what_fails_is_not(stuck: threading.Event) -> None:
    async def test() -> None:
        offload = Offload(4, SHORT_S)
        undone: list[str] = []

        def fail() -> None:
            stuck.wait()
            raise OSError

        for call, name in ((stuck.wait, "good"), (fail, "bad")):
            with pytest.raises(SourceTimeout):
                await offload.run(call, name, 1, undo=lambda name=name: undone.append(name))  # type: ignore[misc]
        assert await offload.run(lambda: 5, "in time", 1, undo=lambda: undone.append("in time")) == 5
        stuck.set()
        await until(lambda: offload.n_given_up == 0)
        assert undone == ["good"]

    run(test)


def test_stuck_lanes_do_not_keep_others_from_running(stuck: threading.Event) -> None:
    async def test() -> None:
        offload = Offload(4, LIMIT_S)
        async with trio.open_nursery() as nursery:
            for lane in [*range(10)] * 5:
                nursery.start_soon(offload.run, stuck.wait, "stuck", lane)
            await trio.testing.wait_all_tasks_blocked()
            assert await offload.run(lambda: 5, "healthy", 99) == 5
            stuck.set()

    run(test)


def test_a_lane_full_of_calls_that_were_given_up_answers_at_once_until_one_comes_back(stuck: threading.Event) -> None:
    async def test() -> None:
        offload = Offload(4 * LANE_PLACES, SHORT_S)
        answers: list[str] = []

        async def read() -> None:
            with pytest.raises(SourceTimeout) as caught:
                await offload.run(stuck.wait, "stuck", 1)
            answers.append(str(caught.value))

        async with trio.open_nursery() as nursery:
            for _ in range(LANE_PLACES):
                nursery.start_soon(read)
        await read()
        assert "given up" in answers[-1]
        assert not any("given up" in answer for answer in answers[:-1])
        assert await offload.run(lambda: 5, "healthy", 2) == 5
        stuck.set()
        await until(lambda: offload.n_given_up == 0)
        assert await offload.run(lambda: 5, "recovered", 1) == 5

    run(test)


def test_no_more_threads_are_begun_when_too_many_are_stuck(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_module, "MAX_GIVEN_UP", 5)

    async def test() -> None:
        offload = Offload(8, SHORT_S)
        for lane in range(5):
            with pytest.raises(SourceTimeout, match="no answer"):
                await offload.run(stuck.wait, "stuck", lane)
        with pytest.raises(SourceTimeout, match="5 earlier reads"):
            await offload.run(lambda: 5, "another", 99)

    run(test)


def test_waiting_for_work_ends_when_some_begins() -> None:
    async def test() -> None:
        offload = Offload(4, LIMIT_S)
        gate = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(offload.wait_for_work)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(offload.run, gate.wait, "work", 1)
            nursery.start_soon(offload.wait_for_work)
            await trio.testing.wait_all_tasks_blocked()
            gate.set()

    run(test)
