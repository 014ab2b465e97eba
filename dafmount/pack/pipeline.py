"""Runs the units of a plan, several at a time, and hands their results on in order.

Owns threads and how far they may run ahead. Knows nothing of formats or destinations. Memory: at most `jobs + 2` units
and their results, whatever a file's size.

Threads and not processes: the compressors and the bit shuffle let go of Python's lock, and nothing has to be copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from dafmount.pack.plan import Document, FlatFile, Planned, ShardFile
from dafmount.pack.units import Encoded, Unit, flat_units, shard_units
from dafmount.tree.content import Content


@dataclass(frozen=True, slots=True)
class Begin:
    """What follows is of this file."""

    file: Planned


@dataclass(frozen=True, slots=True)
class Part:
    """The next part of a file."""

    data: bytes | memoryview | list[Encoded]
    size: int
    """Flat bytes it covers."""


@dataclass(frozen=True, slots=True)
class End:
    """The file is complete."""

    file: Planned


@dataclass(frozen=True, slots=True)
class _Close:
    """The file is complete, and its content has been used."""

    file: Planned
    content: Content


_Step = Begin | Unit | _Close | End
_Waiting = tuple[_Step, Callable[[], bytes | memoryview | list[Encoded]] | None]


def run(files: Iterable[Planned], jobs: int) -> Iterator[Begin | Part | End]:
    """All files in order, each as a Begin, its Parts and an End; one job runs in the caller's thread."""
    with _pool(jobs) as pool:
        steps = _steps(files)
        waiting: deque[_Waiting] = deque()
        n_units = 0
        try:
            while True:
                while n_units < (jobs + 2 if pool else 1) and (step := next(steps, None)) is not None:
                    waiting.append((step, _start(step, pool)))
                    n_units += isinstance(step, Unit)
                if not waiting:
                    return
                step, result = waiting.popleft()
                if isinstance(step, Unit):
                    assert result is not None
                    n_units -= 1
                    yield Part(result(), step.size)
                elif isinstance(step, _Close):
                    step.content.close()
                    yield End(step.file)
                else:
                    yield step
        finally:
            if pool is not None:
                pool.shutdown(cancel_futures=True)


def _pool(jobs: int) -> AbstractContextManager[ThreadPoolExecutor | None]:
    return ThreadPoolExecutor(jobs, "pack") if jobs > 1 else nullcontext(None)


def _start(
    step: _Step, pool: ThreadPoolExecutor | None
) -> Callable[[], bytes | memoryview | list[Encoded]] | None:
    if not isinstance(step, Unit):
        return None
    return step.work if pool is None else pool.submit(step.work).result


def _steps(files: Iterable[Planned]) -> Iterator[_Step]:
    for file in files:
        yield Begin(file)
        if isinstance(file, Document):
            yield Unit(lambda file=file: file.data, 0)  # type: ignore[misc]
            yield End(file)
            continue
        content = file.open()
        yield from _units(file, content)
        yield _Close(file, content)


def _units(file: FlatFile | ShardFile, content: Content) -> Iterator[Unit]:
    return shard_units(file, content) if isinstance(file, ShardFile) else flat_units(file, content)
