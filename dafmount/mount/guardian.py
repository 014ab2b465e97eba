"""A process that ends the connection to the kernel when this one is killed.

A thread that gives the kernel pages waits, where somebody has asked this process for the same ones, until they are
answered, and cannot be killed meanwhile (wait channel `__filemap_get_folio`, seen with Linux 6.18). A daemon that is
killed at such a moment answers no more, its thread keeps /dev/fuse open, and whoever waits for the daemon waits for
ever. So nothing is given without a guardian: it holds the connection's `abort` file (fusectl), which only root and who
mounted may write to, and is told by the kernel when the daemon's main thread is dead (prctl(2), PR_SET_PDEATHSIG).

Must be started by the main thread.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

CONNECTIONS = Path("/sys/fs/fuse/connections")
"""One directory for each mount, named by the minor number of its device."""

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # on all processors; linux/mount.h has the rest
_CLOEXEC = 1
_CREATE = 6

_LABEL = "dafmount-guardian"
"""What an administrator finds in a list of processes."""

_READY = b"r"
_ABORT = b"1"

_PROGRAM = f"""
import ctypes, os, signal, sys, time
abort, ready, parent = map(int, sys.argv[1:4])

def is_dead():
    try:
        with open(f"/proc/{{parent}}/stat") as stat:
            return os.getppid() != parent or stat.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True

# Whatever is sent to a whole service or terminal is none of its business: the daemon ends this process.
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
if ctypes.CDLL(None).prctl(1, signal.SIGRTMIN, 0, 0, 0):
    sys.exit(1)
if not is_dead():
    os.write(ready, {_READY!r})
while not is_dead():
    signal.sigwait([signal.SIGRTMIN])
    for _ in range(100):  # told a moment before it is
        if is_dead():
            break
        time.sleep(0.01)
os.write(abort, {_ABORT!r})
"""


class Guardian:
    """The process, and the file that ends the connection."""

    def __init__(self, abort: int, ready: int, process: subprocess.Popen[bytes]) -> None:
        self._abort = abort
        self._ready = ready
        self._process = process
        self._poll = select.poll()
        self._poll.register(ready, select.POLLIN)
        self._is_ready = False

    @staticmethod
    def started(connection: str, connections: Path = CONNECTIONS) -> Guardian | None:
        """Of one of the connections; None where it cannot be ended by us, or no process is to be had."""
        try:
            abort = _open(connection, connections)
        except OSError as error:
            log.debug("nothing is given to the kernel before it asks: %s", error)
            return None
        ready, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _PROGRAM, str(abort), str(theirs), str(os.getpid()), _LABEL],
                cwd="/",
                pass_fds=(abort, theirs),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            log.debug("nothing is given to the kernel before it asks: %s", error)
            os.close(abort)
            os.close(ready)
            return None
        finally:
            os.close(theirs)
        return Guardian(abort, ready, process)

    def is_on_guard(self) -> bool:
        """Whether it has begun to, and was not killed since."""
        if self._poll.poll(0):
            self._is_ready = os.read(self._ready, 1) == _READY  # no byte: it has ended
        return self._is_ready

    def abort(self) -> None:
        """End the connection: whoever waits for an answer gets ENOTCONN."""
        with suppress(OSError):
            os.write(self._abort, _ABORT)

    def close(self) -> None:
        """End the process."""
        self._is_ready = False
        self._process.kill()
        self._process.wait()
        self._poll.unregister(self._ready)
        os.close(self._ready)
        os.close(self._abort)


def _open(connection: str, connections: Path) -> int:
    """The file that ends a connection, open for writing."""
    flags, name = os.O_WRONLY | os.O_CLOEXEC, f"{connection}/abort"
    try:
        return os.open(connections / name, flags)
    except FileNotFoundError:
        if os.geteuid() != 0:
            raise
    # Where nobody has mounted fusectl, root can do so for itself alone (Linux 5.2).
    call = ctypes.CDLL(None, use_errno=True).syscall
    context = _checked(call(_FSOPEN, b"fusectl", _CLOEXEC))
    try:
        _checked(call(_FSCONFIG, context, _CREATE, None, None, 0))
        root = _checked(call(_FSMOUNT, context, _CLOEXEC, 0))
    finally:
        os.close(context)
    try:
        return os.open(name, flags, dir_fd=root)
    finally:
        os.close(root)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
