"""A data set appended to an archive of several, in place, with the archive readable at every moment.

Owns the order of the writes. The entries are first made in an unnamed temporary file beside the archive, as their size
must be known; the archive itself is touched only when that has succeeded. Belongs to one thread.

The last bytes of a ZIP archive say where its directory is, so they must be right whatever has been written so far. The
file is L bytes long, its directory D. After each step stands what a reader finds that opens the archive then:

1.  End records beyond everything that will come, at E, in one disk sector: one small write makes the file longer and
    ends it properly. They still name D where it is.                                                          (old)
2.  A copy of D directly before them.                                                                         (old)
3.  The end records name that copy, by a write of one number. Now everything is where strict readers want it. (old)
4.  The new entries from L on; their directory lines directly before the copy of D.                           (old)
5.  The end records name the new lines and the copy together, by a write of 32 bytes.                         (new)

Each step is on disk before the next begins (fsync). Nothing that was in the file is ever overwritten, so that before
step 5 cutting it to L bytes takes everything back; after a kill it merely has some dead bytes. Between steps 1 and 3,
some milliseconds, readers that look for the directory only where the end records begin (Python's zipfile) find none.
New entries come first in the directory, which no reader minds. The old D stays behind as dead bytes.

Facts: ZipFormat documentation (append-only; the new directory is written before the entry), APPNOTE 4.3.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from dafmount.errors import CorruptArchive, DestinationBusy, SourceChanged, UnsupportedFormat
from dafmount.pack.zip_sink import BUFFER_BYTES
from dafmount.pack.zip_writer import (
    ALIGNMENT,
    COUNTS_OFFSET,
    END_BYTES,
    OFFSET_OFFSET,
    EntryFile,
    ZipWriter,
    directory_counts,
    end_records,
)
from dafmount.source.local import LocalFile
from dafmount.source.zip_directory import Location, find_directory

_SECTOR_BYTES = 512
_COPY_BYTES = 1 << 20


class Disk(Protocol):
    """The writes that an archive undergoes."""

    def write(self, data: bytes, offset: int) -> None:
        """All of `data` at `offset`."""

    def sync(self) -> None:
        """What was written is on disk when this returns."""


class AppendSink:
    """New entries for the archive at `target`, every path under `prefix`. See Sink."""

    wants_metadata = False

    def __init__(self, target: Path, prefix: str, disk: Callable[[int], Disk] | None = None) -> None:
        """Locks the archive against other writers until the sink is left.

        Raises DestinationBusy where it is locked, and as `find_directory` does. `prefix` ends in `/`; that the archive
        has nothing of that name has been checked. `disk` makes a Disk of the archive's descriptor.
        """
        self._disk = disk or FileDisk
        self._prefix = prefix
        self._name = str(target)
        with contextlib.ExitStack() as stack:
            self._fd = _locked(target)
            stack.callback(os.close, self._fd)
            self._location = _find(target)
            self._old_size = os.fstat(self._fd).st_size
            self._spool = stack.enter_context(tempfile.TemporaryFile(dir=target.parent, buffering=BUFFER_BYTES))
            self._start = -(-self._old_size // ALIGNMENT) * ALIGNMENT
            self._writer = ZipWriter(self._spool, self._start)
            self._stack = stack.pop_all()
        self._is_touched = False

    def make_directory(self, path: str) -> None:
        """Archives have files only."""

    def create(self, path: str) -> EntryFile:
        """See Sink."""
        return self._writer.create(self._prefix + path)

    def commit(self, point_of_no_return: Callable[[], None]) -> None:
        """See Sink."""
        self._spool.flush()
        if os.fstat(self._fd).st_size != self._old_size:
            raise SourceChanged(f"{self._name}: another program has changed the archive meanwhile")
        self._is_touched = True
        append(self._disk(self._fd), self, point_of_no_return)
        self._is_touched = False

    @property
    def location(self) -> Location:
        """Where the old directory is."""
        return self._location

    @property
    def old_size(self) -> int:
        """Bytes of the archive as it was."""
        return self._old_size

    @property
    def start(self) -> int:
        """Where the new entries begin."""
        return self._start

    @property
    def entries(self) -> ZipWriter:
        """The new entries."""
        return self._writer

    def old_directory(self) -> bytes:
        """The old directory's bytes."""
        return _read(self._fd, self._location.start, self._location.size)

    def read_entries(self, offset: int) -> bytes:
        """Some of the bytes that go to `start`, from `offset` on; none at their end."""
        return os.pread(self._spool.fileno(), min(_COPY_BYTES, self._writer.size - offset), offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_touched:
            os.ftruncate(self._fd, self._old_size)
            os.fsync(self._fd)
        with contextlib.suppress(OSError):  # the spool's last bytes, which nobody wants, may not fit the disk
            self._stack.close()


class _Appended(Protocol):
    """What `append` needs to know; see AppendSink."""

    @property
    def location(self) -> Location: ...
    @property
    def old_size(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def entries(self) -> ZipWriter: ...
    def old_directory(self) -> bytes: ...
    def read_entries(self, offset: int) -> bytes: ...


def append(disk: Disk, new: _Appended, point_of_no_return: Callable[[], None]) -> None:
    """The steps of this module's docstring."""
    old, lines = new.location, new.entries.directory
    size = old.size + len(lines)
    end = _end_position(new.start + new.entries.size + size, len(old.comment))
    disk.write(end_records(end, old.start, old.size, old.n_entries, old.comment), end)
    disk.sync()
    disk.write(new.old_directory(), end - old.size)
    disk.sync()
    disk.write((end - old.size).to_bytes(8, "little"), end + OFFSET_OFFSET)
    disk.sync()
    at = 0
    while data := new.read_entries(at):
        disk.write(data, new.start + at)
        at += len(data)
    disk.write(lines, end - size)
    disk.sync()
    point_of_no_return()
    disk.write(directory_counts(end - size, size, old.n_entries + new.entries.n_entries), end + COUNTS_OFFSET)
    disk.sync()


def _end_position(least: int, comment_bytes: int) -> int:
    """The first place from `least` on where the end records do not cross from one sector to the next.

    A long comment does not fit a sector; then at least the records before it do.
    """
    within = least % _SECTOR_BYTES
    fits = within + min(END_BYTES + comment_bytes, _SECTOR_BYTES) <= _SECTOR_BYTES
    return least if fits else least + _SECTOR_BYTES - within


class FileDisk:
    """The archive's file as a Disk."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def write(self, data: bytes, offset: int) -> None:
        """See Disk."""
        view = memoryview(data)
        while view:
            n = os.pwrite(self._fd, view, offset)
            view, offset = view[n:], offset + n

    def sync(self) -> None:
        """See Disk."""
        os.fsync(self._fd)


def _locked(target: Path) -> int:
    fd = os.open(target, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(fd), os.stat(target)):
            raise SourceChanged(f"{target}: the archive was replaced this very moment")
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DestinationBusy(f"{target}: another process is writing to the archive") from error
        raise
    except SourceChanged:
        os.close(fd)
        raise
    return fd


def _find(target: Path) -> Location:
    file = LocalFile(target, str(target))
    try:
        location = find_directory(file, name=str(target))
        if location.shift:
            raise UnsupportedFormat(f"{target}: {location.shift} bytes were put before the archive; it takes no more")
        return location
    finally:
        file.close()


def _read(fd: int, offset: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise CorruptArchive(f"its directory of {length} bytes at {offset} is cut short")
        data += more
    return data
