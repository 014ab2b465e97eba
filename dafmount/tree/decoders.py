"""Threads that decode ahead of programs that read on and on.

Owns the threads and what is on its way. Must not know what is decoded or where it comes from: it gets jobs that wait
for nothing but the processor, and perhaps the kernel. Whatever goes wrong, a damaged chunk for instance, leaves blocks
undecoded; whoever needs them decodes them and finds out why.

What is decoded together (see `dafmount.shard.together`) leaves the GIL to the requests meanwhile.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from dafmount.errors import DafmountError
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import WouldWait

if TYPE_CHECKING:
    from dafmount.tree.nodes import File

log = logging.getLogger(__name__)

MAX_THREADS = 4
"""More decode faster than requests are answered."""

JOBS_A_THREAD = 2
"""Jobs asked for in advance, so that a thread always has the next one."""

UNUSED_S = 5.0
"""After this time a block that nobody used is thrown away."""

Store = Callable[[int, memoryview], bool]
"""Gives the kernel bytes of a file, at an offset, before it asks; False where it does not take them."""


class Kernel(Protocol):
    """Whoever can give the kernel bytes before it asks."""

    def is_ready(self) -> bool:
        """Whether bytes can be given now; asked by the thread of the requests."""

    def store(self, file: File, offset: int, data: memoryview) -> bool:
        """Whether the kernel has taken `data` as the bytes of `file` at `offset`; may wait, but not for long."""


def most_threads() -> int:
    """How many are of use here. On a single core they would only take turns with the requests."""
    n_cores = len(os.sched_getaffinity(0))
    return min(MAX_THREADS, n_cores) if n_cores > 1 else 0


class Job:
    """Blocks to decode, kept in the cache under `keys`, `n_bytes` together; and what is done with them after that."""

    def __init__(self, keys: Sequence[int], n_bytes: int) -> None:
        self.keys = keys
        self.n_bytes = n_bytes
        """What it takes, or has taken: less once it was done and some of it is with the kernel."""
        self.decoded = threading.Event()
        """What can be decoded is in the cache."""
        self.done = threading.Event()
        self.decoded_s = 0.0
        self._taken = threading.Lock()

    def work(self) -> None:
        """Do it. May set `decoded` before the end; may raise what reading and decoding raise."""
        raise NotImplementedError

    def take(self) -> bool:
        """Whether nobody has taken the job yet; then it is the caller's, or nobody's where the caller lets it be."""
        return self._taken.acquire(blocking=False)


class Decoders:
    """Some threads, started when they are first needed. Jobs are started from one thread, that of the requests."""

    def __init__(self, cache: ChunkCache, n_threads: int) -> None:
        """With no threads nothing is ever decoded ahead. What they decode goes into `cache`, three quarters at most."""
        self.n_threads = n_threads
        self.kernel: Kernel | None = None
        self._cache = cache
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._jobs: list[Job] = []
        """Those under way, and those of which something is in the cache."""

    def store_for(self, file: File) -> Store:
        """How the kernel gets bytes of one file."""

        def store(offset: int, data: memoryview) -> bool:
            return self.kernel is not None and self.kernel.store(file, offset, data)

        return store

    @property
    def can_give(self) -> bool:
        """Whether the kernel can be given bytes now."""
        return self.kernel is not None and self.kernel.is_ready()

    def has_room(self, n_bytes: int, is_due: bool = False) -> bool:
        """Whether a job of so many bytes can be started now, one that somebody waits for where it `is_due`."""
        self._forget_used()
        n_waiting = sum(not job.decoded.is_set() for job in self._jobs)
        used = n_bytes + sum(job.n_bytes for job in self._jobs)
        n_jobs = JOBS_A_THREAD * self.n_threads * (2 if is_due else 1)
        return n_waiting < n_jobs and used <= self._cache.limit_bytes * 3 // 4

    def start(self, job: Job) -> bool:
        """Have a job done, unless somebody takes it before; False where there is no thread to be had."""
        if len(self._threads) < self.n_threads:
            # Not waited for when the process ends: a thread may be stuck in the kernel.
            thread = threading.Thread(target=self._work, name="decoder", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # a limit on processes; the next job may find room
                log.debug("no thread to decode ahead: %s", error)
            else:
                self._threads.append(thread)
        if not self._threads:
            return False
        self._jobs.append(job)
        self._queue.put(job)
        return True

    def close(self) -> None:
        """Let the threads end."""
        for _ in self._threads:
            self._queue.put(None)

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if not job.take():
                continue
            try:
                job.work()
            except (DafmountError, OSError, WouldWait, MemoryError) as error:
                log.debug("not decoded ahead: %s", error)
            except Exception:
                log.exception("unexpected error, please report it")
            finally:
                job.decoded_s = time.monotonic()
                job.decoded.set()
                job.done.set()

    def _forget_used(self) -> None:
        """Forget jobs that came to nothing or whose blocks were all used; throw away what readers who left did not."""
        too_old_s = time.monotonic() - UNUSED_S
        kept = []
        for job in self._jobs:
            if job.done.is_set():
                if job.decoded_s < too_old_s:
                    for key in job.keys:
                        self._cache.discard(key)
                if not any(self._cache.has((key,)) for key in job.keys):
                    continue
            kept.append(job)
        self._jobs = kept
