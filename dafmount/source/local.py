"""Local files and directories as byte sources and archives.

Owns descriptors, the check that a file is still the one that was opened, and the rule that nothing outside the
directory is served. Knows nothing of ZIP or Daf. Every class may be shared by threads: reads use explicit offsets and
hold no lock, and a descriptor is closed only after the last read that uses it.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence

from dafmount.errors import Corrupt, NotFound, ShortRead, SourceChanged, SourceUnavailable
from dafmount.source.base import Entry, Range, Stamp
from dafmount.source.names import shown
from dafmount.source.traffic import TRAFFIC

_log = logging.getLogger(__name__)

GAP_BYTES = 64 * 1024
"""Reading this much in vain costs a local file less than a second system call and a seek."""

_RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)

_NOWAIT_BYTES = 4 << 20
"""Copying more than this is waiting, too."""

_thread = threading.local()

_NEVER_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})
"""What kernels and file systems answer that know no RWF_NOWAIT."""


class Descriptor:
    """A file descriptor that is closed when the last reference to this object goes.

    A reader holds a reference while it reads, so no number is reused under it, and none of them needs a lock.
    """

    __slots__ = ("_knows_nowait", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._knows_nowait = _RWF_NOWAIT != 0

    def __del__(self) -> None:
        os.close(self.fd)

    def read(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes at `offset`; fewer only where the file ends."""
        data = os.pread(self.fd, length, offset)
        if len(data) == length or not data:
            return data
        parts = [data]
        missing = length - len(data)
        while missing and (data := os.pread(self.fd, missing, offset + length - missing)):
            parts.append(data)
            missing -= len(data)
        return b"".join(parts)

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """Exactly `length` bytes at `offset` when all of them are in the page cache, else None."""
        if not self._knows_nowait or length > _NOWAIT_BYTES:
            return None
        buffer = _nowait_buffer(length)
        try:
            count = os.preadv(self.fd, [buffer], offset, _RWF_NOWAIT)
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _NEVER_NOWAIT:
                raise
            self._knows_nowait = False
            return None
        return bytes(buffer) if count == length else None


def _nowait_buffer(length: int) -> memoryview:
    """This thread's buffer for `Descriptor.read_nowait`, kept: a new one of 1 MiB costs more than reading into it."""
    buffer: bytearray | None = getattr(_thread, "buffer", None)
    if buffer is None or len(buffer) < length:
        buffer = _thread.buffer = bytearray(length)
    return memoryview(buffer)[:length]


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a local file or directory."""
    return Stamp((status.st_dev, status.st_ino), status.st_size, status.st_mtime_ns)


class LocalFile:
    """A byte source over a local file, as long as it was when it was opened.

    The file may grow, unless `may_grow` is False. Once it shrank, or was written to without growing, every read raises
    SourceChanged, until that state of the file is accepted. The check follows the read, so bytes are handed out only if
    they were read before any change. Data is never mapped: truncating a mapped file would kill the process.
    """

    def __init__(self, path: str | os.PathLike[str], name: str, *, may_grow: bool = True) -> None:
        """Opens `path`; raises NotFound where that is no regular file, or the OSError. Messages call it `name`."""
        self._path = os.path.abspath(os.fspath(path))
        self._name = name
        # O_NONBLOCK: a pipe that took the file's place must not stop the opening thread. It changes no read of a file.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            descriptor = Descriptor(os.open(self._path, flags))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{shown(name)}: no such file") from error
        status = os.fstat(descriptor.fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{shown(name)}: not a regular file")
        self._descriptor: Descriptor | None = descriptor
        self._opened = stamp_of(status)
        self._may_grow = may_grow
        self._accepted = (status.st_size, status.st_mtime_ns)

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    @property
    def size(self) -> int:
        """Length in bytes at the time of opening."""
        return self._opened.size

    @property
    def mtime_ns(self) -> int:
        """Time of the last change before opening, nanoseconds since 1970."""
        return self._opened.mtime_ns

    @property
    def gap_bytes(self) -> int:
        """See ByteSource."""
        return GAP_BYTES

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead, SourceChanged or the OSError."""
        descriptor = self._held(offset, length)
        data = descriptor.read(offset, length)
        TRAFFIC.fetched(len(data))
        self._check_unchanged(descriptor)
        if len(data) != length:
            raise ShortRead(
                f"{shown(self._name)}: {len(data)} bytes at byte {offset}, expected {length} (the file has {self.size})"
            )
        return data

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None where the disk would have to be asked."""
        descriptor = self._held(offset, length)
        data = descriptor.read_nowait(offset, length)
        if data is not None:
            TRAFFIC.fetched(length)
            self._check_unchanged(descriptor)
        return data

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """One read after the other."""
        return [self.read(start, stop - start) for start, stop in ranges]

    def read_anyway(self, offset: int, length: int) -> bytes:
        """As `read`, whatever was written to the file, and fewer bytes where it ends: the caller knows how to judge."""
        return self._held(offset, length).read(offset, length)

    def present(self) -> Stamp:
        """The present state of the open file, wherever it is by now."""
        return stamp_of(os.fstat(self._held(0, 0).fd))

    def fileno(self) -> int:
        """The descriptor."""
        return self._held(0, 0).fd

    def accept(self, state: Stamp) -> None:
        """Reads go on while the file is in this state."""
        self._accepted = (state.size, state.mtime_ns)

    def real_path(self) -> str:
        """Where the open file lies, all links followed, as the kernel tells it."""
        return os.readlink(f"/proc/self/fd/{self._held(0, 0).fd}")

    def stamp(self) -> Stamp:
        """The present state of whatever now has this file's path; raises NotFound, or the OSError."""
        try:
            return stamp_of(os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{shown(self._name)}: the file is gone") from error

    def close(self) -> None:
        """Lets go of the descriptor; reads in progress still end well."""
        self._descriptor = None

    def _held(self, offset: int, length: int) -> Descriptor:
        descriptor = self._descriptor
        if descriptor is None:
            raise SourceUnavailable(f"{shown(self._name)}: read after it was closed")
        if offset < 0 or length < 0 or offset + length > self._opened.size:
            raise ShortRead(f"{shown(self._name)}: asked for {length} bytes at byte {offset}, the file has {self.size}")
        return descriptor

    def _check_unchanged(self, descriptor: Descriptor) -> None:
        now = os.fstat(descriptor.fd)
        if (now.st_size, now.st_mtime_ns) == self._accepted:
            return
        opened = self._opened
        if self._may_grow and now.st_size > opened.size:
            return
        what = f"shrank from {opened.size} to {now.st_size} bytes" if now.st_size < opened.size else "was written to"
        raise SourceChanged(f"{shown(self._name)}: the file {what} after it was opened")


class LocalDirectory:
    """A directory as an archive; each directory is listed when asked for.

    Symbolic links are followed where they lead to a file or directory inside; others, dangling ones, and those to a
    directory that holds the link, are left out and logged once. So are sockets, pipes and devices, without the log.
    """

    def __init__(
        self, path: str | os.PathLike[str], name: str | None = None, *, logged: set[str] | None = None
    ) -> None:
        """Raises NotFound where `path` is no directory, or the OSError. `logged` are links that need no log line."""
        self._path = os.path.abspath(os.fspath(path))
        self._root = os.path.realpath(self._path)
        self._name = os.fspath(path) if name is None else name
        self._logged: set[str] = set() if logged is None else logged
        status = self._stat("")
        if not stat.S_ISDIR(status.st_mode):
            raise NotFound(f"{shown(self._name)}: not a directory")
        self._mtime_ns = status.st_mtime_ns

    @property
    def name(self) -> str:
        """The directory as it was given."""
        return self._name

    @property
    def mtime_ns(self) -> int:
        """Of the directory itself, when it was opened."""
        return self._mtime_ns

    def listdir(self, path: str) -> list[Entry]:
        """Entries by name; raises NotFound, or the OSError."""
        full = self._inside(path)
        try:
            with os.scandir(full) as found:
                entries = list(self._entries(path, found))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{self._called(path)}: no such directory") from error
        entries.sort(key=lambda entry: entry.name)
        return entries

    def open(self, path: str) -> LocalFile:
        """Opens a regular file; raises NotFound, or the OSError."""
        full = self._below(path)
        called = self._called(path)
        try:
            # Before it is opened: opening a device may do something.
            regular = stat.S_ISREG(os.stat(full).st_mode)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{called}: no such file") from error
        if not regular:
            raise NotFound(f"{called}: not a regular file")
        file = LocalFile(full, called, may_grow=False)
        # Asked of the open file, not of the path, which may lead elsewhere by now.
        if not self._holds(file.real_path()):
            file.close()
            raise NotFound(f"{called}: no such file, a link leads outside the directory")
        return file

    def open_nowait(self, path: str) -> LocalFile | None:
        """Always None: the directory may lie on a network, and no flag tells whether a name is known without asking."""
        return None

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """The whole of a file; raises Corrupt where it is larger than `limit_bytes`."""
        file = self.open(path)
        try:
            if file.size > limit_bytes:
                raise Corrupt(f"{self._called(path)}: {file.size} bytes, expected at most {limit_bytes}")
            return file.read(0, file.size)
        finally:
            file.close()

    def expect(self, paths: Sequence[str]) -> None:
        """Nothing: they are near."""

    def stamp(self, path: str = "") -> Stamp:
        """The present state of a file or directory; raises NotFound, or the OSError."""
        return stamp_of(self._stat(path))

    def close(self) -> None:
        """Nothing is held open."""

    def _called(self, path: str) -> str:
        return shown(f"{self._name}/{path}" if path else self._name)

    def _below(self, path: str) -> str:
        """The full path; raises NotFound for one that is not plainly relative."""
        if "\0" in path or any(component in ("", ".", "..") for component in path.split("/")):
            raise NotFound(f"{self._called(path)}: no such file, not a plain relative path")
        return f"{self._root}/{path}"

    def _inside(self, path: str) -> str:
        """As `_below`, '' being the root; raises NotFound for a path whose links lead outside too."""
        if not path:
            return self._root
        full = self._below(path)
        if not self._holds(os.path.realpath(full)):
            raise NotFound(f"{self._called(path)}: no such file, a link leads outside the directory")
        return full

    def _holds(self, real: str) -> bool:
        return real == self._root or real.startswith(self._root.rstrip("/") + "/")

    def _stat(self, path: str) -> os.stat_result:
        try:
            return os.stat(self._inside(path) if path else self._path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFound(f"{self._called(path)}: no such file or directory") from error

    def _entries(self, path: str, found: Iterator[os.DirEntry[str]]) -> Iterator[Entry]:
        for item in found:
            try:
                status = self._followed(path, item) if item.is_symlink() else item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since the directory was read
            if status is None:
                continue
            is_directory = stat.S_ISDIR(status.st_mode)
            if is_directory or stat.S_ISREG(status.st_mode):
                size, stamp = (0, None) if is_directory else (status.st_size, stamp_of(status))
                is_executable = bool(status.st_mode & stat.S_IXUSR)
                yield Entry(item.name, is_directory, size, status.st_mtime_ns, is_executable, stamp)

    def _followed(self, path: str, link: os.DirEntry[str]) -> os.stat_result | None:
        """The status of what a link leads to, or None where the link is left out."""
        called = f"{path}/{link.name}" if path else link.name
        real = os.path.realpath(link.path)
        if not self._holds(real):
            self._left_out(called, "a symbolic link that leads outside")
            return None
        try:
            status = os.stat(real)
        except OSError:
            self._left_out(called, "a symbolic link that leads nowhere")
            return None
        if stat.S_ISDIR(status.st_mode) and real in self._directories_above(path):
            self._left_out(called, "a symbolic link to a directory that holds it")
            return None
        return status

    def _directories_above(self, path: str) -> set[str]:
        """Real paths of the directory `path` and of all above it, up to the root."""
        above = {self._root}
        while path:
            above.add(os.path.realpath(f"{self._root}/{path}"))
            path = path.rpartition("/")[0]
        return above

    def _left_out(self, path: str, why: str) -> None:
        if path not in self._logged:
            self._logged.add(path)
            _log.warning("%s: left out, %s", self._called(path), why)
