"""Decoded copies of compressed archive entries, on disk, bounded.

Owns unlinked temporary files (nothing is left behind, however the process ends), their total size and their number,
and which of them to give up first. Knows nothing of ZIP or Daf. Threads may share a Spool: its lock guards the table
only and is never held while bytes are read, written or freed.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dafmount.errors import CorruptArchive, ShortRead, SourceUnavailable, SpoolFull
from dafmount.source.base import Range
from dafmount.source.local import GAP_BYTES, Descriptor
from dafmount.source.names import shown

SpoolKey = tuple[Hashable, int]
"""Whose entry it is, and which one."""

LIMIT_BYTES = 4 << 30
MAX_FILES = 128

_STREAM_STEP_BYTES = 64 << 20
"""Room reserved at once for a copy of unknown length."""

_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT})
"""What file systems and kernels answer that know no O_TMPFILE; ENOENT may also be a missing directory."""


class _Copy:
    """One decoded entry; its fields are guarded by the spool's lock."""

    __slots__ = ("descriptor", "forgotten", "n_open", "size")

    def __init__(self, descriptor: Descriptor, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self.n_open = 0
        self.forgotten = False


class Spool:
    """A bounded store of temporary files that are given up least recently used first, those in use never."""

    def __init__(
        self, directory: Path | None = None, limit_bytes: int = LIMIT_BYTES, *, max_files: int = MAX_FILES
    ) -> None:
        """Touches no disk. The default directory is $TMPDIR, else /var/tmp, which is not in memory as /tmp may be."""
        self._directory = directory or Path(os.environ.get("TMPDIR") or "/var/tmp")
        self._limit_bytes = limit_bytes
        self._max_files = max_files
        self._lock = threading.Lock()
        self._unwanted: deque[Hashable] = deque()
        """Owners that whoever has the lock, or had it last, forgets."""
        self._copies: OrderedDict[SpoolKey, _Copy] = OrderedDict()
        self._used_bytes = 0
        self._n_files = 0
        self.relieve: Callable[[], None] | None = None
        """Called, without the lock, where all copies are in use: closes those that are kept open for later only."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all copies, those being written at their full size."""
        return self._used_bytes

    def get(self, key: SpoolKey, *, name: str) -> SpooledFile | None:
        """The copy of an entry, opened, or None where there is none (any more)."""
        with self._locked():
            copy = self._copies.get(key)
            if copy is None:
                return None
            self._copies.move_to_end(key)
            return self._opened(copy, name)

    def put(self, key: SpoolKey, size: int, chunks: Iterator[bytes], *, name: str) -> SpooledFile:
        """Writes `chunks`, together `size` bytes, and opens the copy.

        Raises SpoolFull where it does not fit, CorruptArchive where the chunks are not `size` bytes, and what `chunks`
        raises; nothing is kept then. Where another thread put the same key meanwhile, that copy is opened.
        """
        self._reserve(size, name)
        descriptor = None
        try:
            descriptor = self._write(size, chunks, name)
        finally:
            if descriptor is None:
                self._release(size)
        return self._keep(key, descriptor, size, name)

    def put_stream(self, key: SpoolKey, chunks: Iterator[bytes], *, name: str) -> SpooledFile:
        """As `put`, for chunks whose total length nobody knows before the last of them."""
        reserved, size = 0, 0
        self._reserve(0, name)
        descriptor = None
        try:
            writing = self._temporary(name)
            for chunk in chunks:
                size += len(chunk)
                if size > reserved:
                    step = max(size - reserved, min(_STREAM_STEP_BYTES, self._limit_bytes - reserved))
                    self._reserve(step, name)
                    self._n_files_less_one()
                    reserved += step
                try:
                    _write_all(writing.fd, chunk)
                except OSError as error:
                    raise self._failed(name, error) from error
            descriptor = writing
        finally:
            if descriptor is None:
                self._release(reserved)
        with self._locked():
            self._used_bytes -= reserved - size
        return self._keep(key, descriptor, size, name)

    def forget(self, owner: Hashable) -> None:
        """Gives up every copy of `owner`; those open, once they are closed.

        Never waits, so that finalizers may call it, also one that runs in a thread that holds the lock.
        """
        self._unwanted.append(owner)
        self._forget_unwanted()

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        finally:
            self._forget_unwanted()  # what was not wanted any more while the lock was held

    def _forget_unwanted(self) -> None:
        given_up: list[_Copy] = []  # freed after the lock
        while self._unwanted and self._lock.acquire(blocking=False):
            try:
                while self._unwanted:
                    given_up += self._forget(self._unwanted.popleft())
            finally:
                self._lock.release()

    def _forget(self, owner: Hashable) -> Iterator[_Copy]:
        for key in [key for key in self._copies if key[0] == owner]:
            copy = self._copies.pop(key)
            copy.forgotten = True
            if not copy.n_open:
                yield self._discount(copy)

    def _keep(self, key: SpoolKey, descriptor: Descriptor, size: int, name: str) -> SpooledFile:
        with self._locked():
            copy = self._copies.get(key)
            if copy is None:
                copy = self._copies[key] = _Copy(descriptor, size)
            else:
                self._used_bytes -= size
                self._n_files -= 1
            self._copies.move_to_end(key)
            return self._opened(copy, name)

    def _opened(self, copy: _Copy, name: str) -> SpooledFile:
        copy.n_open += 1
        return SpooledFile(self, copy, name)

    def _closed(self, copy: _Copy) -> None:
        with self._locked():
            copy.n_open -= 1
            if copy.forgotten and not copy.n_open:
                self._discount(copy)

    def _discount(self, copy: _Copy) -> _Copy:
        self._used_bytes -= copy.size
        self._n_files -= 1
        return copy

    def _reserve(self, size: int, name: str) -> None:
        """Makes room for one more file of `size` bytes; raises SpoolFull."""
        if size > self._limit_bytes:
            raise SpoolFull(
                f"{shown(name)}: {size} bytes when decompressed, the spool holds {self._limit_bytes}; "
                "a larger one is given by -o spool-size="
            )
        if self._has_made_room(size):
            return
        if self.relieve is not None:
            self.relieve()
            if self._has_made_room(size):
                return
        raise SpoolFull(
            f"{shown(name)}: no room for {size} decompressed bytes, {self._n_files} files with {self._used_bytes} "
            f"bytes are in use (at most {self._max_files} files, {self._limit_bytes} bytes); "
            "a larger spool is given by -o spool-size="
        )

    def _has_made_room(self, size: int) -> bool:
        """Whether there is room for `size` bytes, now counted as used, be it that other copies are given up for it."""
        given_up = []  # freed after the lock: freeing gigabytes takes the file system a while
        with self._locked():
            while self._used_bytes + size > self._limit_bytes or self._n_files >= self._max_files:
                oldest = next((key for key, copy in self._copies.items() if not copy.n_open), None)
                if oldest is None:
                    return False
                given_up.append(self._discount(self._copies.pop(oldest)))
            self._used_bytes += size
            self._n_files += 1
        return True

    def _release(self, size: int) -> None:
        with self._locked():
            self._used_bytes -= size
            self._n_files -= 1

    def _n_files_less_one(self) -> None:
        """The room just reserved is for a file that is counted already."""
        with self._locked():
            self._n_files -= 1

    def _write(self, size: int, chunks: Iterator[bytes], name: str) -> Descriptor:
        written = 0
        descriptor = self._temporary(name)
        for chunk in chunks:
            written += len(chunk)
            if written > size:
                break
            try:
                _write_all(descriptor.fd, chunk)
            except OSError as error:
                raise self._failed(name, error) from error
        if written != size:
            more = "more than " if written > size else ""
            raise CorruptArchive(f"{shown(name)}: decompresses to {more}{min(written, size)} bytes, expected {size}")
        return descriptor

    def _temporary(self, name: str) -> Descriptor:
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            return Descriptor(os.open(self._directory, flags | os.O_TMPFILE, 0o600))
        except OSError as error:
            if error.errno not in _NO_TMPFILE:
                raise self._failed(name, error) from error
        import tempfile  # rarely needed, and slow to import

        try:
            fd, path = tempfile.mkstemp(prefix="dafmount-", dir=self._directory)
            descriptor = Descriptor(fd)
            os.unlink(path)
        except OSError as error:
            raise self._failed(name, error) from error
        return descriptor

    def _failed(self, name: str, error: OSError) -> SpoolFull:
        return SpoolFull(
            f"{shown(name)}: cannot be decompressed into {shown(str(self._directory))}: {error.strerror}; "
            "another directory is given by -o spool="
        )


class SpooledFile:
    """An opened copy: a byte source. Until `close` its copy is not given up."""

    def __init__(self, spool: Spool, copy: _Copy, name: str) -> None:
        """Only a Spool makes these, holding its lock."""
        self._spool = spool
        self._copy: _Copy | None = copy
        self._size = copy.size
        self._name = name

    @property
    def name(self) -> str:
        """The entry's name."""
        return self._name

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._size

    @property
    def gap_bytes(self) -> int:
        """See ByteSource."""
        return GAP_BYTES

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead."""
        data = self._descriptor(offset, length).read(offset, length)
        if len(data) != length:
            raise ShortRead(f"{shown(self._name)}: {len(data)} bytes of its copy at byte {offset}, expected {length}")
        return data

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None where the disk would have to be asked."""
        return self._descriptor(offset, length).read_nowait(offset, length)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """One read after the other."""
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        """Lets the spool give up the copy when it needs the room."""
        copy, self._copy = self._copy, None
        if copy is not None:
            self._spool._closed(copy)

    def _descriptor(self, offset: int, length: int) -> Descriptor:
        copy = self._copy
        if copy is None:
            raise SourceUnavailable(f"{shown(self._name)}: read after it was closed")
        if offset < 0 or length < 0 or offset + length > self._size:
            raise ShortRead(f"{shown(self._name)}: asked for {length} bytes at byte {offset}, it has {self._size}")
        return copy.descriptor


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
