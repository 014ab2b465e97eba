"""Processes that decode ahead of programs that read on and on.

Owns the processes, the memory shared with them, and what is on its way. Must not know what is decoded or where it comes
from: it gets stored chunks that were read here, and puts what becomes of them into the cache. Whatever goes wrong, a
damaged chunk or a process that was killed, leaves them undecoded; whoever needs them decodes them and finds out why.
Used from one thread, that of the requests, which waits for a process at most for `PATIENCE_S`.

Processes, because threads of Python would take turns: one that decodes beside the requests halved the speed. They
start when somebody has read on for a while, and end when nothing was to be done for `IDLE_S`.
"""

from __future__ import annotations

import logging
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

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
"""How long the requests wait for a block that is on its way; a process decodes it in some 2 ms."""

MAX_FAILURES = 3
"""So many processes may end before they have done anything."""

IDLE_S = 30.0
END_LIMIT_S = 5.0

_N_COLUMNS = 5


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
        """With no processes nothing is ever decoded ahead. What they decode goes into `cache`."""
        self._cache = cache
        self._processes: list[_Process | None] = [None] * n_processes
        self._flying: dict[int, _Process] = {}
        self._n_failures = 0

    @property
    def depth(self) -> int:
        """How many blocks are worth asking for ahead of one reader."""
        return min(N_SLOTS * len(self._processes), 2 * N_SLOTS)

    def has_room(self) -> bool:
        """Whether `start` can take a block now."""
        return any(self._n_free(at) for at in range(len(self._processes)))

    def start(self, key: int, runs: Sequence[StoredRun], places: Sequence[Sequence[int]], out_bytes: int) -> bool:
        """Have chunks decoded to their places in a buffer, kept under `key`; False where that cannot be now."""
        if key in self._flying:
            return True
        if out_bytes > OUT_BYTES or sum(_room(run) for run in runs) > IN_BYTES:
            return False
        process = self._freest()
        if process is None or not process.send(key, runs, places, out_bytes):
            return False
        self._flying[key] = process
        return True

    def wait(self, key: int) -> None:
        """Return when what was started for `key` is in the cache, or is not going to be soon."""
        self.collect()
        process = self._flying.get(key)
        if process is None:
            return
        end_s = time.monotonic() + PATIENCE_S
        while key in self._flying and process.wait(end_s - time.monotonic()):
            self._collect_from(process)

    def collect(self) -> None:
        """Put what has been decoded into the cache."""
        for process in {*self._flying.values()}:
            self._collect_from(process)

    def close(self) -> None:
        """End the processes."""
        self._flying.clear()
        for process in self._processes:
            if process is not None:
                process.close()
        self._processes = []

    def _freest(self) -> _Process | None:
        """The process with the least to do, started if need be."""
        if not self._processes:
            return None
        at = max(range(len(self._processes)), key=self._n_free)
        process = self._processes[at]
        if process is not None and process.is_gone and process.n_done == 0:
            self._n_failures += 1
            if self._n_failures >= MAX_FAILURES:
                log.warning("nothing is decoded ahead any more: the processes for it end at once")
                self.close()
                return None
        if process is None or process.is_gone:
            process = self._processes[at] = _Process.started()
        return process

    def _n_free(self, at: int) -> int:
        process = self._processes[at]
        return N_SLOTS if process is None or process.is_gone else len(process.free)

    def _collect_from(self, process: _Process) -> None:
        for key, data in process.received():
            del self._flying[key]
            if data is not None:
                self._cache.add(key, data)
        if process.is_gone:
            self._flying = {key: other for key, other in self._flying.items() if other is not process}


class _Process:
    """One process, its memory, and what it has to do."""

    def __init__(self, channel: socket.socket, memory: mmap.mmap, process: subprocess.Popen[bytes]) -> None:
        self.free = list(range(N_SLOTS))
        self.is_gone = False
        self.n_done = 0
        self._channel = channel
        self._memory = memoryview(memory)
        self._process = process
        self._keys: dict[int, tuple[int, int]] = {}
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)

    @staticmethod
    def started() -> _Process | None:
        """None where the system gives no process or no memory for it."""
        try:
            memory = os.memfd_create("dafmount", os.MFD_CLOEXEC)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                os.ftruncate(memory, N_SLOTS * (IN_BYTES + OUT_BYTES))
                mapped = mmap.mmap(memory, 0)
                command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(memory)]
                package = str(Path(__file__).parents[2])
                process = subprocess.Popen(
                    command,
                    cwd="/",
                    env=os.environ | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
                    pass_fds=(theirs.fileno(), memory),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            os.close(memory)
        except OSError as error:
            log.debug("nothing is decoded ahead: %s", error)
            return None
        ours.setblocking(False)
        return _Process(ours, mapped, process)

    def send(self, key: int, runs: Sequence[StoredRun], places: Sequence[Sequence[int]], out_bytes: int) -> bool:
        """Whether the process was told to; not when it is gone or has enough to do."""
        if not self.free:
            return False
        slot = self.free.pop()
        at = slot * (IN_BYTES + OUT_BYTES)
        parts = []
        for run, where in zip(runs, places, strict=True):
            columns = run.columns.tobytes()
            self._memory[at : at + len(columns)] = columns
            at += len(columns)
            self._memory[at : at + len(run.data)] = run.data
            at += _room(run) - len(columns)
            parts.append(_Part(run.decoder, run.chunk_bytes, run.kind, run.columns.shape[1], len(run.data), where))
        try:
            self._channel.send(pickle.dumps(_Job(slot, out_bytes, parts)))
        except BlockingIOError:
            self.free.append(slot)
            return False
        except OSError:
            self._end()
            return False
        self._keys[slot] = (key, out_bytes)
        return True

    def wait(self, seconds: float) -> bool:
        """Whether there is an answer, or will be none, before so many seconds are over."""
        return not self.is_gone and bool(self._poll.poll(max(0.0, seconds) * 1000))

    def received(self) -> list[tuple[int, bytes | None]]:
        """The blocks that are done: their keys, and their bytes or None."""
        done: list[tuple[int, bytes | None]] = []
        while not self.is_gone:
            try:
                answer = self._channel.recv(2)
            except BlockingIOError:
                break
            except OSError:
                answer = b""
            if len(answer) != 2:
                self._end()
                break
            slot, is_good = answer
            key, out_bytes = self._keys.pop(slot)
            at = slot * (IN_BYTES + OUT_BYTES) + IN_BYTES
            done.append((key, bytes(self._memory[at : at + out_bytes]) if is_good else None))
            self.free.append(slot)
            self.n_done += 1
        return done

    def close(self) -> None:
        """End the process, which ends by itself when nobody listens."""
        self._end()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _end(self) -> None:
        self.is_gone = True
        self.free = []
        self._channel.close()
        self._process.poll()


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
    memory = memoryview(mmap.mmap(int(sys.argv[2]), 0))
    with socket.socket(fileno=int(sys.argv[1])) as channel, suppress(TimeoutError, OSError):
        channel.settimeout(IDLE_S)
        while message := channel.recv(1 << 18):
            job: _Job = pickle.loads(message)
            channel.send(bytes([job.slot, _decode(job, memory)]))


if __name__ == "__main__":
    main()
