"""Where the log goes: a file, the terminal, systemd's journal, or the system's log.

Owns the choice and the formats. Threads may log; `LogFile.reopen` may be called at any time.

In the foreground the log goes to standard error; where that is the journal, each line begins with its priority
(sd-daemon(3)). In the background it goes to the journal's own socket, else to /dev/log, else nowhere (as in a
container).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import sys
from logging.handlers import SysLogHandler
from pathlib import Path

from dafmount.errors import UsageError

JOURNAL = "/run/systemd/journal/socket"
SYSTEM_LOG = "/dev/log"

IDENTIFIER = "dafmount"

_MAX_MESSAGE_BYTES = 48 * 1024
"""Less than a datagram may hold."""

_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_DEBUG_PRIORITY = 7


def start(level: int, *, log_file: str | None, is_foreground: bool) -> None:
    """Send everything that this process logs from now on to its place; UsageError where the file cannot be opened."""
    logging.raiseExceptions = False  # a log that cannot be written must not write to anywhere else
    logging.basicConfig(level=level, handlers=[_handler(log_file, is_foreground)], force=True)
    logging.captureWarnings(True)


def reopen() -> bool:
    """Open the log file anew, as after it was moved away; whether there is one."""
    files = [handler for handler in logging.getLogger().handlers if isinstance(handler, LogFile)]
    for file in files:
        file.reopen()
    return bool(files)


class LogFile(logging.FileHandler):
    """Appends to a file."""

    def reopen(self) -> None:
        """Go on in whatever now has the file's name; in the old one where that cannot be opened."""
        try:
            stream = self._open()
        except OSError as error:
            logging.getLogger(__name__).warning("the log file cannot be opened anew: %s", error)
            return
        old = self.setStream(stream)
        if old is not None:
            old.close()


class JournalStream(logging.StreamHandler):  # type: ignore[type-arg]
    """Standard error, read by the journal: the priority leads each line."""

    def format(self, record: logging.LogRecord) -> str:
        """Every line of the message, each with its priority."""
        prefix = f"<{priority(record.levelno)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines())


class Journal(logging.Handler):
    """The journal's own protocol: one datagram of fields for each message."""

    def __init__(self, path: str = JOURNAL) -> None:
        """Raises the OSError where no journal listens."""
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def emit(self, record: logging.LogRecord) -> None:
        """Send one message."""
        try:
            fields = {
                "MESSAGE": self.format(record),
                "PRIORITY": str(priority(record.levelno)),
                "SYSLOG_IDENTIFIER": IDENTIFIER,
                "SYSLOG_PID": str(os.getpid()),
                "SYSLOG_FACILITY": str(SysLogHandler.LOG_DAEMON),
            }
            self._socket.send(b"".join(_field(name, value) for name, value in fields.items()))
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
        super().close()


def priority(level: int) -> int:
    """The priority of syslog(3) for a level of Python's."""
    return next((number for least, number in _PRIORITIES if level >= least), _DEBUG_PRIORITY)


def _field(name: str, value: str) -> bytes:
    """A field with its length, so that a message may have several lines."""
    data = value.encode("utf-8", "backslashreplace")[:_MAX_MESSAGE_BYTES]
    return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"


def _handler(log_file: str | None, is_foreground: bool) -> logging.Handler:
    if log_file is not None:
        return _formatted(_log_file(log_file), "%(asctime)s dafmount[%(process)d] %(levelname)s %(message)s")
    if is_foreground:
        if _stderr_is_journal():
            return _formatted(JournalStream(), "%(message)s")
        return _formatted(logging.StreamHandler(), "dafmount: %(levelname)s: %(message)s")
    with contextlib.suppress(OSError):
        return _formatted(Journal(), "%(message)s")
    if not Path(SYSTEM_LOG).exists():
        return logging.NullHandler()
    system_log = SysLogHandler(SYSTEM_LOG, facility=SysLogHandler.LOG_DAEMON)
    return _formatted(system_log, "dafmount[%(process)d]: %(levelname)s: %(message)s")


def _log_file(path: str) -> LogFile:
    try:
        return LogFile(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise UsageError(f"log file {path}: {os.strerror(error.errno or 0)}") from error


def _formatted(handler: logging.Handler, layout: str) -> logging.Handler:
    handler.setFormatter(logging.Formatter(layout))
    return handler


def _stderr_is_journal() -> bool:
    """Whether standard error is the stream that systemd said it is (systemd.exec(5), JOURNAL_STREAM)."""
    device, _, inode = os.environ.get("JOURNAL_STREAM", "").partition(":")
    try:
        status = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError, AttributeError):
        return False
    return (device, inode) == (str(status.st_dev), str(status.st_ino))
