"""Threads that fetch from a far source, and the bytes they may fetch before anybody asks.

Owns the order of the work and the memory held for readers to come. Knows nothing of HTTP. Threads may share everything
here. A task that is waited for is done by the thread that waits if no other has begun with it, so that tasks may wait
for tasks without running out of threads.
"""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")


class Task(Generic[T]):
    """A piece of work, done once by whoever comes first."""

    __slots__ = ("_call", "_done", "_error", "_lock", "_result")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None

    @property
    def has_begun(self) -> bool:
        """Whether some thread does the work, or has done it."""
        return self._call is None

    @property
    def is_done(self) -> bool:
        """Whether `result` answers without waiting."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        """Whether `result` raises; False while it is not done."""
        return self._error is not None

    def run(self) -> None:
        """Does the work unless another thread has begun with it."""
        with self._lock:
            call, self._call = self._call, None
        if call is None:
            return
        try:
            self._result = call()
        except BaseException as error:  # it belongs to whoever waits
            self._error = error
        finally:
            self._done.set()

    def result(self) -> T:
        """The work's result or exception; may do the work."""
        self.run()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]


class Held(Protocol):
    """Bytes that were fetched ahead."""

    @property
    def is_done(self) -> bool:
        """Whether they have arrived."""

    def give_up(self) -> None:
        """Called when the room is needed for others; must neither block nor take a lock."""


class Fetchers:
    """A few threads with a queue, and a budget of bytes held."""

    def __init__(self, n_threads: int, held_limit_bytes: int) -> None:
        self._n_threads = n_threads
        self._limit_bytes = held_limit_bytes
        self._queue: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._n_started = 0
        self._n_idle = 0
        self._held: OrderedDict[Held, int] = OrderedDict()
        self._held_bytes = 0
        self._is_closed = False

    @property
    def n_threads(self) -> int:
        """How many pieces of work are done at the same time."""
        return self._n_threads

    @property
    def limit_bytes(self) -> int:
        """Most bytes that may be held."""
        return self._limit_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    def submit(self, call: Callable[[], T]) -> Task[T]:
        """Queues work; after `close` it is done only when its result is asked for."""
        task = Task(call)
        with self._lock:
            if self._is_closed:
                return task
            if self._n_started < self._n_threads:
                self._n_started += 1
                threading.Thread(target=self._work, name="fetcher", daemon=True).start()
        self._queue.put(task)  # type: ignore[arg-type]
        return task

    def hold(self, held: Held, n_bytes: int) -> bool:
        """Whether `n_bytes` more may be held; the oldest that arrived and were not used make room."""
        with self._lock:
            if n_bytes > self._limit_bytes:
                return False
            for other in [other for other in self._held if other.is_done]:
                if self._held_bytes + n_bytes <= self._limit_bytes:
                    break
                self._held_bytes -= self._held.pop(other)
                other.give_up()
            if self._held_bytes + n_bytes > self._limit_bytes:
                return False
            self._held[held] = n_bytes
            self._held_bytes += n_bytes
            return True

    def let_go(self, held: Held) -> None:
        """The bytes were used; nothing happens if they are not held."""
        with self._lock:
            self._held_bytes -= self._held.pop(held, 0)

    def close(self) -> None:
        """Ends the threads once they are done with what they do now."""
        with self._lock:
            self._is_closed = True
            for _ in range(self._n_started):
                self._queue.put(None)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task.run()
            del task  # it holds bytes


def fetchers_of(source: object) -> Fetchers | None:
    """The threads that fetch for a source that is far; None for one that is near."""
    fetchers: Fetchers | None = getattr(source, "fetchers", None)
    return fetchers
