"""Asking a mount that may be dead, or whose daemon may hang, without hanging along.

A process that waits for a file system that does not answer cannot always be woken, not even by SIGKILL; so a process of
its own asks, and is left behind when it takes too long. Forks: for commands, and before any thread is started.
"""

from __future__ import annotations

import errno
import os
import select
import signal
import time

ANSWER_LIMIT_S = 5.0
"""A daemon that reads from a slow source still answers at once."""

KILL_LIMIT_S = 1.0
"""A killed process mostly ends at once, unless the daemon has taken its question and keeps it."""


class Question:
    """An extended attribute of a path, being asked for."""

    def __init__(self, path: str, name: str) -> None:
        self._readable, writable = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _ask(path, name, writable)
        os.close(writable)

    def answer(self, deadline: float) -> bytes:
        """The value; raises the OSError, TimeoutError when there is no answer before `deadline` (time.monotonic)."""
        received = bytearray()
        try:
            while select.select([self._readable], [], [], max(0.0, deadline - time.monotonic()))[0]:
                part = os.read(self._readable, 1 << 16)
                if not part:
                    os.waitpid(self._pid, 0)
                    return _answer(bytes(received))
                received += part
        finally:
            os.close(self._readable)
        os.kill(self._pid, signal.SIGKILL)
        self._see_it_die()
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    def _see_it_die(self) -> None:
        """As long as it lives it keeps the mount busy, and who asked is perhaps about to unmount that."""
        end = time.monotonic() + KILL_LIMIT_S
        while os.waitpid(self._pid, os.WNOHANG) == (0, 0) and time.monotonic() < end:
            time.sleep(0.005)


def ask(path: str, name: str, limit_s: float = ANSWER_LIMIT_S) -> bytes:
    """The value of an extended attribute; raises the OSError, TimeoutError when it takes longer than `limit_s`."""
    return Question(path, name).answer(time.monotonic() + limit_s)


def _ask(path: str, name: str, writable: int) -> None:
    number = errno.EIO
    try:
        try:
            reply = b"0 " + os.getxattr(path, name)
        except OSError as error:
            reply = b"%d " % (error.errno or number)
        with os.fdopen(writable, "wb") as pipe:
            pipe.write(reply)
    finally:
        os._exit(0)


def _answer(received: bytes) -> bytes:
    number, _, value = received.partition(b" ")
    if number != b"0":
        code = int(number or errno.EIO)
        raise OSError(code, os.strerror(code))
    return value
