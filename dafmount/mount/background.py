"""Running in the background, truthfully: the parent ends when the mount is usable, or with the child's error.

Forks, so it must be called before any thread is started, and imports nothing that starts one (numpy, trio, blosc2).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

log = logging.getLogger(__name__)

EXIT_UNEXPECTED = 1
EXIT_INTERRUPTED = 130


class Outcome(NamedTuple):
    """What a starting daemon reports: exit code 0 when the mount is usable, else one line of text."""

    exit_code: int
    message: str


Report: TypeAlias = Callable[[Outcome], bool]
"""Tells the waiting parent; False where it has been told before and waits no more."""


def hold_standard_streams() -> None:
    """Give a process that was started with closed standard streams /dev/null instead.

    Otherwise the next file that it opens becomes its standard output, and what is meant for people ends up in there.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def run(child: Callable[[Report], int]) -> Outcome:
    """Fork; the child runs `child(report)` and never returns from here, the parent returns what was reported.

    After reporting success the child is in a session of its own, so that the end of the terminal does not end it, and
    its standard streams are /dev/null.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        _be_child(child, writable)
    try:
        os.close(writable)
        with os.fdopen(readable, "rb") as pipe:
            report = pipe.read()
    except KeyboardInterrupt:
        os.kill(pid, signal.SIGTERM)
        return Outcome(EXIT_INTERRUPTED, "interrupted")
    if not report:
        return Outcome(EXIT_UNEXPECTED, "the daemon ended before the mount was usable")
    code, _, message = report.partition(b" ")
    return Outcome(int(code), message.decode("utf-8", "surrogateescape"))


def _be_child(child: Callable[[Report], int], writable: int) -> None:
    code = EXIT_UNEXPECTED
    waiting = [writable]

    def report(outcome: Outcome) -> bool:
        if not waiting:
            return False
        if outcome.exit_code == 0:
            _silence()
        pipe = waiting.pop()
        try:
            os.write(pipe, f"{outcome.exit_code} {outcome.message}".encode("utf-8", "surrogateescape"))
        finally:
            os.close(pipe)
        return True

    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's is the parent's to answer, which ends the child
        code = child(report)
    except BaseException as error:
        log.critical("the daemon ends for something unexpected", exc_info=error)
        with contextlib.suppress(OSError):
            report(Outcome(EXIT_UNEXPECTED, f"unexpected {type(error).__name__}: {error}"))
    finally:
        os._exit(code)


def _silence() -> None:
    """Hold no terminal and no working directory.

    Only now: an automounter lets none but its own process group to the mount point until something is mounted there.
    """
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    os.chdir("/")
