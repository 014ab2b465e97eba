"""The one table from exceptions to errno values and log levels."""

from __future__ import annotations

import errno
import logging
from typing import NamedTuple

from dafmount.errors import (
    Corrupt,
    NotADaf,
    NotFound,
    SourceChanged,
    SourceDenied,
    SourceTimeout,
    SourceUnavailable,
    SpoolFull,
    UnsupportedFormat,
)

log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """What the caller of a system call gets, and how loudly the log says why."""

    errno: int
    level: int


TABLE: tuple[tuple[type[Exception], Answer], ...] = (
    (NotFound, Answer(errno.ENOENT, logging.DEBUG)),
    (UnsupportedFormat, Answer(errno.EOPNOTSUPP, logging.WARNING)),
    (Corrupt, Answer(errno.EIO, logging.ERROR)),
    (NotADaf, Answer(errno.EIO, logging.ERROR)),
    (SourceChanged, Answer(errno.ESTALE, logging.WARNING)),
    (SourceDenied, Answer(errno.EACCES, logging.WARNING)),
    (SourceTimeout, Answer(errno.ETIMEDOUT, logging.WARNING)),
    (SourceUnavailable, Answer(errno.EIO, logging.WARNING)),
    (SpoolFull, Answer(errno.ENOSPC, logging.ERROR)),
    (MemoryError, Answer(errno.ENOMEM, logging.ERROR)),
)

MAX_REMEMBERED = 1000


class ErrorLog:
    """Logs an error once for each file and message, so that a program that tries again and again fills no log."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def answer(self, error: Exception, path: str) -> int:
        """The errno for `error`, which is logged as the table says; `path` is the file as mounted."""
        for kind, answer in TABLE:
            if isinstance(error, kind):
                self._say(answer.level, f"{path}: {error}" if str(error) else f"{path}: {type(error).__name__}")
                return answer.errno
        if isinstance(error, OSError) and error.errno:
            self._say(logging.WARNING, f"{path}: {error}")
            return error.errno
        log.error("%s: unexpected %s, please report it", path, type(error).__name__, exc_info=error)
        return errno.EIO

    def _say(self, level: int, message: str) -> None:
        if level > logging.DEBUG:
            if message in self._said:
                return
            while len(self._said) >= MAX_REMEMBERED:
                del self._said[next(iter(self._said))]
            self._said[message] = None
        log.log(level, "%s", message)
