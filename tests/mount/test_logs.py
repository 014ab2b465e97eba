"""Where the log goes, without a mount; journals and system logs are sockets of the test's own."""

from __future__ import annotations

import io
import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dafmount.errors import UsageError
from dafmount.mount import logs
from dafmount.mount.notify import notify

log = logging.getLogger("dafmount.test_logs")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:], logging.raiseExceptions = handlers, raises
    root.setLevel(level)
    logging.captureWarnings(False)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    """A datagram socket at `tmp_path / "socket"`."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.settimeout(30)
        yield listening


def fields(datagram: bytes) -> dict[str, str]:
    """The journal's protocol, as systemd's documentation of it describes the form with lengths."""
    found = {}
    while datagram:
        name, _, rest = datagram.partition(b"\n")
        (length,) = struct.unpack_from("<Q", rest)
        found[name.decode()] = rest[8 : 8 + length].decode()
        assert rest[8 + length : 9 + length] == b"\n"
        datagram = rest[9 + length :]
    return found


def test_a_message_to_the_journal_has_its_priority_and_all_its_lines(tmp_path: Path, listener: socket.socket) -> None:
    handler = logs.Journal(str(tmp_path / "socket"))
    handler.emit(logging.LogRecord("x", logging.ERROR, "", 0, "two\nlines: %s", ("\udcff",), None))
    found = fields(listener.recv(1 << 16))
    assert found["MESSAGE"] == "two\nlines: \\udcff"
    assert (found["PRIORITY"], found["SYSLOG_IDENTIFIER"]) == ("3", "dafmount")
    assert found["SYSLOG_PID"] == str(os.getpid())
    handler.emit(logging.LogRecord("x", logging.INFO, "", 0, "x" * 1_000_000, (), None))
    assert fields(listener.recv(1 << 20))["MESSAGE"].startswith("xxx")
    handler.close()


def test_the_background_logs_to_the_journal_where_there_is_one(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = logs.Journal(str(tmp_path / "socket"))
    monkeypatch.setattr(logs, "Journal", lambda: handler)
    logs.start(logging.INFO, log_file=None, is_foreground=False)
    log.debug("not this")
    log.warning("but this")
    assert fields(listener.recv(1 << 16))["MESSAGE"] == "but this"


def no_journal() -> logs.Journal:
    raise FileNotFoundError


def test_the_background_logs_to_the_system_log_where_there_is_no_journal(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "Journal", no_journal)
    monkeypatch.setattr(logs, "SYSTEM_LOG", str(tmp_path / "socket"))
    logs.start(logging.INFO, log_file=None, is_foreground=False)
    log.error("hello")
    daemon_error = b"<27>"  # 3 * 8 + 3 (RFC 3164)
    message = b"dafmount[%d]: ERROR: hello" % os.getpid()
    assert listener.recv(1 << 16).rstrip(b"\0") == daemon_error + message


def test_the_background_logs_nowhere_in_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "Journal", no_journal)
    monkeypatch.setattr(logs, "SYSTEM_LOG", str(tmp_path / "missing"))
    logs.start(logging.INFO, log_file=None, is_foreground=False)
    log.error("hello")
    assert capfd.readouterr() == ("", "")


def test_lines_for_systemd_begin_with_their_priority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "stderr").open("w+") as stream:
        status = os.fstat(stream.fileno())
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
        logs.start(logging.INFO, log_file=None, is_foreground=True)
        log.warning("two\nlines")
        log.info("one")
    assert (tmp_path / "stderr").read_text() == "<4>two\n<4>lines\n<6>one\n"


def test_a_terminal_is_not_taken_for_the_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("JOURNAL_STREAM", "8:1234")
    logs.start(logging.INFO, log_file=None, is_foreground=True)
    log.warning("hello")
    assert stream.getvalue() == "dafmount: WARNING: hello\n"


def test_a_log_file_that_was_moved_away_is_opened_anew(tmp_path: Path) -> None:
    place = tmp_path / "log"
    logs.start(logging.INFO, log_file=str(place), is_foreground=False)
    log.info("first")
    place.rename(tmp_path / "log.1")
    log.info("second")
    assert logs.reopen()
    log.info("third")
    assert [line.split()[-1] for line in (tmp_path / "log.1").read_text().splitlines()] == ["first", "second"]
    assert [line.split()[-1] for line in place.read_text().splitlines()] == ["third"]


def test_a_log_file_that_cannot_be_opened_anew_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "there" / "log"
    place.parent.mkdir()
    logs.start(logging.INFO, log_file=str(place), is_foreground=False)
    place.parent.rename(tmp_path / "away")
    assert logs.reopen()
    log.info("still here")
    assert "still here" in (tmp_path / "away" / "log").read_text()


def test_a_log_file_that_cannot_be_opened_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing/log: No such file or directory"):
        logs.start(logging.INFO, log_file=str(tmp_path / "missing" / "log"), is_foreground=False)


def test_systemd_is_told_where_it_asked(
    tmp_path: Path, listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "socket"))
    notify("READY=1")
    assert listener.recv(100) == b"READY=1"
    name = f"dafmount-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind(f"\0{name}")
        abstract.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("STOPPING=1")
        assert abstract.recv(100) == b"STOPPING=1"
    notify("nobody listens any more")
    monkeypatch.delenv("NOTIFY_SOCKET")
    notify("nobody asked")
