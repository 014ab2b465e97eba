"""Running in the background, truthfully: the parent ends when the mount is usable, or with the child's error.

Forks, so it must be called before any thread is started, and imports nothing that starts one (numpy, trio, blosc2).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

EXIT_UNEXPECTED = 1


class Outcome(NamedTuple):
    """What a starting daemon reports: exit code 0 when the mount is usable, else one line of text."""

    exit_code: int
    message: str


def run(child: Callable[[Callable[[Outcome], None]], int]) -> Outcome:
    """Fork; the child runs `child(report)` and never returns from here, the parent returns what was reported.

    The child is in a session of its own, so that the end of the terminal does not end it. After reporting success its
    standard streams are /dev/null.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.close(readable)
        _be_child(child, writable)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        report = pipe.read()
    if not report:
        return Outcome(EXIT_UNEXPECTED, "the daemon ended before the mount was usable")
    code, _, message = report.partition(b" ")
    return Outcome(int(code), message.decode("utf-8", "surrogateescape"))


def _be_child(child: Callable[[Callable[[Outcome], None]], int], writable: int) -> None:
    code = EXIT_UNEXPECTED
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)

        def report(outcome: Outcome) -> None:
            if outcome.exit_code == 0:
                _silence()
            os.write(writable, f"{outcome.exit_code} {outcome.message}".encode("utf-8", "surrogateescape"))
            os.close(writable)

        code = child(report)
    finally:
        os._exit(code)


def _silence() -> None:
    """Hold no terminal and no working directory."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    if null > 2:
        os.close(null)
    os.chdir("/")
