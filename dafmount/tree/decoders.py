"""Processes that decode ahead of programs that read on and on.

Owns the processes, the memory shared with them, and what is on its way. Must not know what is decoded or where it comes
from: it gets stored chunks that were read here, and puts what becomes of them into the cache. Whatever goes wrong, a
damaged chunk or a process that was killed, leaves them undecoded; whoever needs them decodes them and finds out why.
Used from one thread, that of the requests, which waits for a process at most for `PATIENCE_S`.

Processes, because threads of Python would take turns: one that decodes beside the requests halved the speed. They
start when somebody has read on for a while, and end when nothing was to be done for `IDLE_S`.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np

from dafmount import __version__
from dafmount.shard.codecs import Decoder, StoredRun
from dafmount.tree.cache import ChunkCache

log = logging.getLogger(__name__)

N_SLOTS = 4
"""Blocks on their way to one process, so that it always has the next one."""

IN_BYTES = 2 << 20
OUT_BYTES = 1 << 20
"""The room for stored and for decoded bytes of one block."""

MAX_PROCESSES = 4
"""More decode faster than one process can answer requests."""

PATIENCE_S = 0.05
"""How long the requests wait for a block that is on its way; a process decodes it in some 2 ms. Then they go on without
that process, until it answers."""

MAX_FAILURES = 3
"""So many processes may end before they have done anything."""

IDLE_S = 30.0
END_LIMIT_S = 5.0

UNUSED_S = 5.0
"""After this time a block that nobody used is thrown away."""

_N_COLUMNS = 5

_HELLO = f"{__version__} {N_SLOTS} {IN_BYTES} {OUT_BYTES} {_N_COLUMNS}".encode()
"""What a process says first: one started later may be of a version that was installed meanwhile."""

_RUN = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import main; main()"
"""With the modules of this process, whatever lies in the working directory or is said by the environment."""


def most_processes() -> int:
    """How many are of use here: one core is for the requests, and the readers have something to do as well."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)) - 1)


class _Part(NamedTuple):
    """What a process is told of chunks whose numbers and bytes lie in its memory."""

    decoder: Decoder
    chunk_bytes: int
    kind: str
    n_chunks: int
    n_bytes: int
    places: Sequence[int]


class _Job(NamedTuple):
    slot: int
    out_bytes: int
    parts: list[_Part]


class Decoders:
    """Some processes, started when they are first needed."""

    def __init__(self, cache: ChunkCache, n_processes: int) -> None:
        """With no processes nothing is ever decoded ahead. What they decode goes into `cache`, up to half of it."""
        self._cache = cache
        self._processes: list[_Process | None] = [None] * n_processes
        self._flying: dict[int, _Process] = {}
        self._landed: dict[int, float] = {}
        """Keys of what was decoded and perhaps not used yet, and when."""
        self._n_failures = 0

    @property
    def depth(self) -> int:
        """How many blocks are worth asking for ahead of one reader."""
        return min(N_SLOTS * len(self._processes), 2 * N_SLOTS)

    def start(self, key: int, runs: Sequence[StoredRun], places: Sequence[Sequence[int]], out_bytes: int) -> bool:
        """Have chunks decoded to their places in a buffer, kept under `key`; False where that cannot be now."""
        if key in self._flying:
            return True
        if out_bytes > OUT_BYTES or sum(_room(run) for run in runs) > IN_BYTES:
            return False
        process = max(filter(None, self._processes), key=_n_free, default=None)
        if process is None or not process.send(key, runs, places, out_bytes):
            return False
        self._flying[key] = process
        return True

    def has_room(self, block_bytes: int) -> bool:
        """Whether `start` can take a block of so many bytes now; starts processes, which can a while later."""
        self.collect()
        processes = self._processes
        for at, process in enumerate(processes):
            if process is None:
                processes[at] = self._started()
        used = (len(self._flying) + self._n_unused()) * block_bytes
        return used < self._cache.limit_bytes // 2 and any(map(_n_free, filter(None, self._processes)))

    def wait(self, key: int) -> None:
        """Return when what was started for `key` is in the cache, or is not going to be soon."""
        if self._cache.has((key,)):
            return
        self.collect()
        process = self._flying.get(key)
        if process is None:
            return
        end_s = time.monotonic() + PATIENCE_S
        while key in self._flying and process.wait(end_s - time.monotonic()):
            self._collect_from(process)

    def collect(self) -> None:
        """Put what has been decoded into the cache."""
        for process in self._processes:
            if process is not None:
                self._collect_from(process)

    def close(self) -> None:
        """End the processes; returns within `END_LIMIT_S`."""
        ended = self._stop()
        end_s = time.monotonic() + END_LIMIT_S
        for process in ended:
            process.join(end_s - time.monotonic())

    def _stop(self) -> list[_Process]:
        ended = [process for process in self._processes if process is not None]
        self._processes = []
        self._flying.clear()
        for process in ended:
            process.end()
        return ended

    def _started(self) -> _Process | None:
        process = _Process.started()
        if process is None:
            self._failed()
        return process

    def _failed(self) -> None:
        """A process that did nothing."""
        self._n_failures += 1
        if self._n_failures >= MAX_FAILURES and self._processes:
            log.warning("nothing is decoded ahead any more: the processes for it cannot be started, or end at once")
            self._stop()

    def _n_unused(self) -> int:
        """How many blocks wait in the cache for their reader; those of readers who left are thrown away."""
        too_old_s = time.monotonic() - UNUSED_S
        for key, landed_s in list(self._landed.items()):
            if landed_s < too_old_s:
                self._cache.discard(key)
            if not self._cache.has((key,)):
                del self._landed[key]
        return len(self._landed)

    def _collect_from(self, process: _Process) -> None:
        for key, data in process.received():
            del self._flying[key]
            if data is not None:
                self._cache.add(key, data)
                self._landed[key] = time.monotonic()
        if process.is_gone and process in self._processes:
            self._flying = {key: other for key, other in self._flying.items() if other is not process}
            self._processes[self._processes.index(process)] = None
            if not process.was_ready:
                self._failed()


class _Process:
    """One process, its memory, and what it has to do.

    A thread waits for its end and lets go of the memory then, whether or not anybody reads on.
    """

    def __init__(self, channel: socket.socket, memory: mmap.mmap, process: subprocess.Popen[bytes]) -> None:
        self.is_gone = False
        self.was_ready = False
        """It says when it is, and speaks the same language; until then it gets nothing to do."""
        self._free: list[int] = []
        self._is_late = False
        self._channel = channel
        self._memory = memory
        self._process = process
        self._keys: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._lock = threading.Lock()
        self._reaper = threading.Thread(target=self._reap, name="decoder-end", daemon=True)
        self._reaper.start()

    @staticmethod
    def started() -> _Process | None:
        """None where the system gives no process or no memory for it."""
        with ExitStack() as opened:
            try:
                memory = os.memfd_create("dafmount", os.MFD_CLOEXEC)
                opened.callback(os.close, memory)
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                opened.callback(theirs.close)
                not_needed = opened.enter_context(ExitStack())
                not_needed.callback(ours.close)
                os.ftruncate(memory, N_SLOTS * (IN_BYTES + OUT_BYTES))
                mapped = mmap.mmap(memory, 0)
                modules = json.dumps([path for path in sys.path if path])
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _RUN, modules, str(theirs.fileno()), str(memory)],
                    cwd="/",
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            except OSError as error:
                log.debug("nothing is decoded ahead: %s", error)
                return None
            not_needed.pop_all()
        ours.setblocking(False)
        return _Process(ours, mapped, process)

    @property
    def n_free(self) -> int:
        """How much more it can be told to do now; nothing while it is late, stopped perhaps."""
        return 0 if self._is_late or self.is_gone else len(self._free)

    def send(self, key: int, runs: Sequence[StoredRun], places: Sequence[Sequence[int]], out_bytes: int) -> bool:
        """Whether the process was told to; not when it is gone or has enough to do."""
        with self._lock:
            if not self.n_free:
                return False
            slot = self._free.pop()
            self._keys[slot] = (key, out_bytes)
            job = _Job(slot, out_bytes, self._put(slot, runs, places))
            try:
                self._channel.send(pickle.dumps(job))
            except OSError:  # it is gone, as is soon found out, or has not taken what it was sent
                del self._keys[slot]
                self._free.append(slot)
                return False
            return True

    def _put(self, slot: int, runs: Sequence[StoredRun], places: Sequence[Sequence[int]]) -> list[_Part]:
        at = slot * (IN_BYTES + OUT_BYTES)
        parts = []
        for run, where in zip(runs, places, strict=True):
            columns = run.columns.tobytes()
            self._memory[at : at + len(columns)] = columns
            at += len(columns)
            self._memory[at : at + len(run.data)] = bytes(run.data)
            at += _room(run) - len(columns)
            parts.append(_Part(run.decoder, run.chunk_bytes, run.kind, run.columns.shape[1], len(run.data), where))
        return parts

    def wait(self, seconds: float) -> bool:
        """Whether an answer, or the end, comes before so many seconds are over; who is late is not waited for."""
        if self.is_gone or self._is_late:
            return False
        self._is_late = not self._poll.poll(max(0.0, seconds) * 1000)
        return not self._is_late

    def received(self) -> list[tuple[int, bytes | None]]:
        """The blocks that are done: their keys, and their bytes or None."""
        done: list[tuple[int, bytes | None]] = []
        with self._lock:
            while not self.is_gone:
                try:
                    answer = self._channel.recv(len(_HELLO) + 1)
                except BlockingIOError:
                    break
                except OSError:
                    answer = b""
                if answer == _HELLO:
                    self.was_ready = True
                    self._free = list(range(N_SLOTS))
                elif len(answer) == 2 and self.was_ready and answer[0] in self._keys:
                    done.append(self._taken(*answer))
                else:  # it ended, or is of another version
                    self._end()
        return done

    def _taken(self, slot: int, is_good: int) -> tuple[int, bytes | None]:
        key, out_bytes = self._keys.pop(slot)
        at = slot * (IN_BYTES + OUT_BYTES) + IN_BYTES
        data = self._memory[at : at + out_bytes] if is_good else None
        self._free.append(slot)
        self._is_late = False
        return key, data

    def end(self) -> None:
        """Have the process end, which it does when nobody listens."""
        with self._lock:
            self._end()

    def join(self, seconds: float) -> None:
        """Wait for its end, and make sure of it."""
        self._reaper.join(max(0.0, seconds))
        if self._reaper.is_alive():
            self._process.kill()

    def _end(self) -> None:
        self.is_gone = True
        self._channel.close()

    def _reap(self) -> None:
        self._process.wait()
        with self._lock:
            self.is_gone = True
            self._memory.close()


def _n_free(process: _Process) -> int:
    return process.n_free


def _room(run: StoredRun) -> int:
    """Bytes of memory that a run takes, so that the next one's numbers are aligned."""
    return run.columns.nbytes + -(-len(run.data) // 8) * 8


def _decode(job: _Job, memory: memoryview) -> bool:
    """Decode what lies in the memory, to the memory; False where it is damaged."""
    at = job.slot * (IN_BYTES + OUT_BYTES)
    out = memory[at + IN_BYTES : at + IN_BYTES + job.out_bytes]
    for part in job.parts:
        columns = np.frombuffer(memory, np.int64, _N_COLUMNS * part.n_chunks, at).reshape(_N_COLUMNS, -1)
        at += columns.nbytes
        data = bytes(memory[at : at + part.n_bytes])
        at += -(-part.n_bytes // 8) * 8
        run = StoredRun(part.decoder, data, columns, part.chunk_bytes, part.kind).prepared()
        try:
            run.decode(0, part.n_chunks, out, part.places, str)
        except Exception:  # the process that asked will meet it again, and knows how to call it
            return False
    return True


def main() -> None:
    """Decode what comes through the socket, until nobody is at its other end or nothing came for a while."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the mount decides when it ends
    memory = memoryview(mmap.mmap(int(sys.argv[3]), 0))
    with socket.socket(fileno=int(sys.argv[2])) as channel, suppress(TimeoutError, OSError):
        channel.send(_HELLO)
        channel.settimeout(IDLE_S)
        while message := channel.recv(1 << 18):
            job: _Job = pickle.loads(message)
            channel.send(bytes([job.slot, _decode(job, memory)]))

