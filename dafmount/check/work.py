"""How the work of a check is spread over threads, and how far it is.

Owns the threads. Must not know what the work is. Tasks may run in any thread; everything else belongs to the thread
that made the Work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int, int], None]
"""Is told the bytes that were read, and how many there are to read as far as is known."""


class Work:
    """Runs tasks, `jobs` at a time, and gives their results in the order of the tasks.

    No more than twice `jobs` results are under way, so that memory does not grow with the number of tasks.
    """

    def __init__(self, jobs: int, progress: Progress | None = None) -> None:
        self._jobs = jobs
        self._pool = ThreadPoolExecutor(jobs, "check") if jobs > 1 else None
        self._progress = progress
        self.done_bytes = 0
        self.total_bytes = 0

    def __enter__(self) -> Work:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def ordered(self, function: Callable[[T], R], tasks: Iterable[T]) -> Iterator[R]:
        """`function` of each task; what it raises is raised here."""
        if self._pool is None:
            yield from map(function, tasks)
            return
        under_way: deque[Future[R]] = deque()
        for task in tasks:
            under_way.append(self._pool.submit(function, task))
            if len(under_way) >= 2 * self._jobs:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def expect(self, n_bytes: int) -> None:
        """So many bytes more will be read."""
        self.total_bytes += n_bytes

    def advance(self, n_bytes: int) -> None:
        """So many bytes were read."""
        self.done_bytes += n_bytes
        if self._progress is not None:
            self._progress(self.done_bytes, self.total_bytes)
