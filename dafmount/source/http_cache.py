"""Fetched ranges of files on web servers, kept on disk from mount to mount.

Owns a directory of small immutable files, one a range: `<file's key>/<start>-<stop>`, each its bytes and then their
CRC-32. They appear by renaming, so that neither a kill nor another mount on the same directory can show half of one,
and what a full or failing disk does to them is a miss. Nothing here raises: without its disk the program is slower, no
more. Threads may share a cache; its lock guards tables only.
"""

from __future__ import annotations

import bisect
import contextlib
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dafmount.source.base import Range

_log = logging.getLogger(__name__)

MAX_RANGE_BYTES = 1 << 20
"""Longer ranges are kept in pieces, so that reading a little of one does not check all of it."""

_CRC_BYTES = 4
_BLOCK_BYTES = 4096
_LOWERED_TO = 0.9
"""A full cache is emptied to this part of its limit, so that it is not searched for the oldest file each time."""

_RELIST_S = 10.0
_RETRY_WRITING_S = 60.0
_OLD_TEMPORARY_S = 3600.0
_TEMPORARY = ".new-"


class _Kept(NamedTuple):
    """A range on disk; ordered by where it starts."""

    start: int
    stop: int


class DiskCache:
    """A bounded directory of ranges."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        """Touches no disk. Several mounts may use one directory, each bounds it by the limit of its own."""
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._tables: dict[str, list[_Kept]] = {}
        """What is known to be there of each file."""
        self._listed_at_s: dict[str, float] = {}
        self._used_bytes: int | None = None
        self._written_bytes = 0
        """Since all files were counted the last time."""
        self._no_writing_before = 0.0
        self._has_complained = False
        self._count = 0

    def get(self, key: str, wanted: Range) -> bytes | None:
        """The bytes of a range if all of them are here."""
        try:
            parts = []
            position = wanted.start
            while position < wanted.stop:
                kept = self._find(key, position)
                data = None if kept is None else self._read(key, kept)
                if kept is None or data is None:
                    return None
                parts.append(memoryview(data)[position - kept.start : wanted.stop - kept.start])
                position = min(kept.stop, wanted.stop)
            return b"".join(parts)
        except OSError as error:
            self._complain(error)
            return None

    def put(self, key: str, start: int, data: bytes | memoryview) -> None:
        """Keeps a range if there is room and the disk plays along."""
        if not data or time.monotonic() < self._no_writing_before:
            return
        try:
            for at in range(0, len(data), MAX_RANGE_BYTES):
                self._write(key, start + at, data[at : at + MAX_RANGE_BYTES])
        except OSError as error:
            self._no_writing_before = time.monotonic() + _RETRY_WRITING_S
            self._complain(error)

    # Reading.

    def _find(self, key: str, position: int) -> _Kept | None:
        kept = self._find_known(key, position)
        return kept if kept is not None or not self._relist(key) else self._find_known(key, position)

    def _find_known(self, key: str, position: int) -> _Kept | None:
        with self._lock:
            table = self._tables.get(key, [])
            at = bisect.bisect_right(table, (position, 1 << 63)) - 1
            # Ranges may overlap, but only those that start within the longest possible range before can hold it.
            while at >= 0 and table[at].start > position - MAX_RANGE_BYTES:
                if table[at].stop > position:
                    return table[at]
                at -= 1
        return None

    def _relist(self, key: str) -> bool:
        """Looks for what another mount, or an earlier one, left of a file; False where that was done a moment ago."""
        now = time.monotonic()
        with self._lock:
            if now < self._listed_at_s.get(key, float("-inf")) + _RELIST_S:
                return False
            self._listed_at_s[key] = now
        try:
            names = os.listdir(self._directory / key)
        except FileNotFoundError:
            return False
        table = sorted(kept for name in names if (kept := _parse(name)) is not None)
        with self._lock:
            self._tables[key] = table
        return True

    def _read(self, key: str, kept: _Kept) -> bytes | None:
        path = self._directory / key / _name(kept)
        try:
            raw = path.read_bytes()
            now = time.time()
            if now - path.stat().st_mtime > 60:
                os.utime(path, (now, now))  # the time of its last use
        except FileNotFoundError:
            self._forget(key, kept)  # another mount made room
            return None
        data = raw[:-_CRC_BYTES]
        if len(data) != kept.stop - kept.start or zlib.crc32(data) != int.from_bytes(raw[-_CRC_BYTES:], "little"):
            _log.warning("%s: damaged, taken out of the cache", path)
            path.unlink(missing_ok=True)
            self._forget(key, kept)
            return None
        return data

    def _forget(self, key: str, kept: _Kept) -> None:
        with self._lock:
            table = self._tables.get(key, [])
            if kept in table:
                table.remove(kept)

    # Writing.

    def _write(self, key: str, start: int, data: bytes | memoryview) -> None:
        kept = _Kept(start, start + len(data))
        size = _on_disk(len(data))
        if size > self._limit_bytes or not self._make_room(size):
            return
        place = self._directory / key
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        place.mkdir(mode=0o700, exist_ok=True)
        with self._lock:
            self._count += 1
            count = self._count
        temporary = place / f"{_TEMPORARY}{os.getpid()}-{count}"
        try:
            with open(temporary, "xb", opener=_private) as file:
                file.write(data)
                file.write(zlib.crc32(data).to_bytes(_CRC_BYTES, "little"))
            os.rename(temporary, place / _name(kept))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        with self._lock:
            table = self._tables.setdefault(key, [])
            if kept not in table:
                bisect.insort(table, kept)
            self._used_bytes = (self._used_bytes or 0) + size
            self._written_bytes += size

    def _make_room(self, size: int) -> bool:
        with self._lock:
            used = self._used_bytes
            is_recent = self._written_bytes <= self._limit_bytes * (1 - _LOWERED_TO)
        if used is not None and is_recent and used + size <= self._limit_bytes:
            return True
        # What other mounts wrote and removed is counted as well.
        files = sorted(self._files())
        used = sum(size for _, size, _ in files)
        target = self._limit_bytes if used + size <= self._limit_bytes else self._limit_bytes * _LOWERED_TO
        for _, old, path in files:
            if used + size <= target:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= old
        with self._lock:
            self._used_bytes = used
            self._written_bytes = 0
        return used + size <= self._limit_bytes

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Time of last use, size and path of every file; what a killed mount left half written is removed."""
        now = time.time()
        with contextlib.suppress(FileNotFoundError), os.scandir(self._directory) as places:
            for place in places:
                if not place.is_dir(follow_symlinks=False):
                    continue
                with os.scandir(place.path) as files:
                    for file in files:
                        with contextlib.suppress(FileNotFoundError):
                            status = file.stat(follow_symlinks=False)
                            if file.name.startswith(_TEMPORARY) and now - status.st_mtime > _OLD_TEMPORARY_S:
                                os.unlink(file.path)
                            elif _parse(file.name) is not None:
                                yield status.st_mtime, _on_disk(status.st_size), file.path

    def _complain(self, error: OSError) -> None:
        with self._lock:
            if self._has_complained:
                return
            self._has_complained = True
        _log.warning("%s: the cache directory does not work and is done without: %s", self._directory, error.strerror)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _name(kept: _Kept) -> str:
    return f"{kept.start:x}-{kept.stop:x}"


def _parse(name: str) -> _Kept | None:
    start, dash, stop = name.partition("-")
    try:
        kept = _Kept(int(start, 16), int(stop, 16))
    except ValueError:
        return None
    return kept if dash and 0 <= kept.start < kept.stop and _name(kept) == name else None


def _on_disk(n_bytes: int) -> int:
    """What a file takes: whole blocks."""
    return -(-(n_bytes + _CRC_BYTES) // _BLOCK_BYTES) * _BLOCK_BYTES
