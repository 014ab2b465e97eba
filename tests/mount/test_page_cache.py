"""Giving the kernel pages: never of another file, never when the session ends."""

from __future__ import annotations

import errno
import threading

import pyfuse3
import pytest

from dafmount.mount import page_cache as page_cache_module
from dafmount.mount.page_cache import PageCache
from dafmount.mount.statistics import Statistics
from dafmount.tree.content import Literal
from dafmount.tree.nodes import Directory, File, Node, NodeTable
from mounts import LIMIT_S

DATA = memoryview(b"0123")


class Opener:
    def open(self, file: File) -> Literal:
        return Literal(bytes(DATA))

    def open_nowait(self, file: File) -> Literal:
        return Literal(bytes(DATA))


class Guard:
    """Ends the connection: whatever waits goes on."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def is_on_guard(self) -> bool:
        return True

    def abort(self) -> None:
        self.ended.set()

    def close(self) -> None:
        pass


@pytest.fixture
def file() -> File:
    def load(directory: Directory) -> dict[str, Node]:
        return {"a": File("a", directory, len(DATA), 0, Opener())}

    found = Directory("", None, 0, load).children()["a"]
    assert isinstance(found, File)
    return found


@pytest.fixture
def cache(file: File) -> PageCache:
    assert file.parent is not None
    nodes = NodeTable(file.parent)
    nodes.remember(file)
    return PageCache(nodes, Statistics(), "/nowhere")


def test_what_is_given_is_counted(cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr(pyfuse3, "notify_store", lambda *call: given.append(call))
    assert cache.store(file, 4096, DATA)
    assert given == [(file.number, 4096, DATA)]
    assert cache._statistics.bytes_served == len(DATA)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.ENOMEM, errno.ENOSYS])
def test_a_kernel_that_refuses_is_no_error(
    cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*call: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(pyfuse3, "notify_store", refuse)
    assert not cache.store(file, 0, DATA)
    assert cache._statistics.bytes_served == 0


def test_nothing_is_given_of_what_was_replaced(cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3, "notify_store", lambda *call: pytest.fail("given"))
    file.retire()
    assert not cache.store(file, 0, DATA)


def test_nothing_is_given_after_the_end(cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3, "notify_store", lambda *call: pytest.fail("given"))
    cache.close()
    assert not cache.store(file, 0, DATA)


def test_the_end_waits_for_what_is_under_way(cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(pyfuse3, "notify_store", lambda *call: [step() for step in (begun.set, may_end.wait)])
    store = threading.Thread(target=cache.store, args=(file, 0, DATA))
    store.start()
    assert begun.wait(LIMIT_S)
    end = threading.Thread(target=cache.close)
    end.start()
    end.join(0.05)
    assert end.is_alive()
    may_end.set()
    end.join(LIMIT_S)
    assert not end.is_alive()
    store.join(LIMIT_S)


def test_the_connection_is_ended_where_the_kernel_waits_for_answers(
    cache: PageCache, file: File, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    guard, begun = Guard(), threading.Event()
    monkeypatch.setattr(page_cache_module, "END_LIMIT_S", 0.05)
    monkeypatch.setattr(cache, "_guardian", guard)
    monkeypatch.setattr(pyfuse3, "notify_store", lambda *call: [step() for step in (begun.set, guard.ended.wait)])
    store = threading.Thread(target=cache.store, args=(file, 0, DATA))
    store.start()
    assert begun.wait(LIMIT_S)
    cache.close()
    store.join(LIMIT_S)
    assert guard.ended.is_set()
    assert "/nowhere: ending the connection" in caplog.text
