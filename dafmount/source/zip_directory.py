"""The central directory of an outer ZIP archive: found, checked, indexed, and asked for names.

Owns where the directory lies, what each entry's fields mean, and how names make a tree. Never reads an entry's data or
local header. The directory stays the bytes that were read; beside them an entry costs about twenty bytes, and Python
objects are made only for the names a caller lists. Immutable once made, except for `add_links`: threads may share it.

Facts come from PKWARE's APPNOTE.TXT (its section numbers are given) and, for extra fields 0x5455, 0x7075 and 0x000A,
from Info-ZIP's extrafld.txt.
"""

from __future__ import annotations

import logging
import struct
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import lru_cache
from itertools import count, repeat
from operator import itemgetter, methodcaller
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dafmount.errors import CorruptArchive, EmptyFile, NotADaf, NotFound, UnsupportedFormat
from dafmount.source.base import ByteSource, Entry
from dafmount.source.names import all_plain, clean, decode, encode, shown

_log = logging.getLogger(__name__)

LOCAL_SIGNATURE = b"PK\3\4"
FLAG_ENCRYPTED = 1 << 0
_FLAG_UTF8 = 1 << 11

_HEADER = struct.Struct("<4s6H3L5H2L")  # 4.3.12
_HEADER_SIGNATURE = b"PK\1\2"
_DIGITAL_SIGNATURE = b"PK\5\5"  # 4.3.13
_END = struct.Struct("<4s4H2LH")  # 4.3.16
_END_SIGNATURE = b"PK\5\6"
_END64 = struct.Struct("<4sQ2H2L4Q")  # 4.3.14
_END64_SIGNATURE = b"PK\6\6"
_LOCATOR = struct.Struct("<4sLQL")  # 4.3.15
_LOCATOR_SIGNATURE = b"PK\6\7"

_TAIL_BYTES = 0xFFFF + _END.size + _LOCATOR.size + _END64.size
"""The longest comment and all three end records: one read finds them."""

_MAX_DIRECTORY_BYTES = 1 << 30
"""Some ten million entries. Also keeps every offset within 32 bits."""

_MAX_PATH_BYTES = 1 << 28
"""Of all directories' paths together: one entry of four kilobytes can imply a hundred directories."""

_MAX_END_CANDIDATES = 16
_BATCH = 16384
_SCAN_BYTES = 1 << 20
_SENTINEL16, _SENTINEL32 = 0xFFFF, 0xFFFFFFFF

_EXTRA_ZIP64, _EXTRA_NTFS, _EXTRA_UNIX_TIME, _EXTRA_UNICODE_PATH = 0x0001, 0x000A, 0x5455, 0x7075
_HOST_UNIX, _HOST_OSX = 3, 19  # 4.4.2
_HOSTS_DOS = frozenset({0, 10, 14})
_S_IFMT, _S_IFLNK = 0xF000, 0xA000
_S_IXUSR = 0o100
_DOS_EPOCH = (1 << 5 | 1) << 16
"""1980-01-01 00:00:00 as date << 16 | time: what writers put that know no time."""

_NTFS_EPOCH_TICKS = 116_444_736_000_000_000
"""1970 in units of 100 ns since 1601."""

Integers = npt.NDArray[np.int64]


class Record(NamedTuple):
    """The fields of one entry, ZIP64 and prepended data accounted for."""

    ordinal: int
    """Its place in the directory, from 0."""
    raw_name: bytes
    flags: int
    method: int
    crc: int
    compressed_size: int
    size: int
    header_offset: int
    """Of the local header, from the start of the file."""


class Location(NamedTuple):
    """Where the directory is. `shift` is how many bytes were put before the archive after it was made."""

    start: int
    size: int
    n_entries: int
    shift: int
    is_zip64: bool
    comment: bytes


class _Tail(NamedTuple):
    """The end of the file, read once."""

    data: bytes
    start: int

    def read(self, source: ByteSource, offset: int, length: int) -> bytes:
        """Bytes of the file, out of the tail where it holds them."""
        if offset >= self.start:
            return self.data[offset - self.start : offset - self.start + length]
        return source.read(offset, length)


def read_directory(source: ByteSource, *, name: str, mtime_ns: int) -> ZipDirectory:
    """Reads and indexes the directory of `source`; messages call the archive `name`.

    Two reads, or one where the directory lies in the last 64 KiB. Raises EmptyFile, NotADaf (not a ZIP archive),
    CorruptArchive, UnsupportedFormat, or what the source raises. `mtime_ns` is for entries without a time.
    """
    called = shown(name)
    size = source.size
    if size == 0:
        raise EmptyFile(f"{called}: an empty file, expected a ZIP archive")
    tail = _read_tail(source)
    location = _locate(source, tail, called)
    raw = tail.read(source, location.start, location.size)
    return ZipDirectory(raw, location, name, mtime_ns)


def find_directory(source: ByteSource, *, name: str) -> Location:
    """Where the directory of `source` is; raises as `read_directory` does for what is no whole ZIP archive."""
    return _locate(source, _read_tail(source), shown(name))


def _read_tail(source: ByteSource) -> _Tail:
    start = max(0, source.size - _TAIL_BYTES)
    return _Tail(source.read(start, source.size - start), start)


def _locate(source: ByteSource, tail: _Tail, called: str) -> Location:
    """The directory that the last sound end record tells of."""
    exact, other = _end_candidates(tail.data)
    first_error: CorruptArchive | UnsupportedFormat | None = None
    for position in exact + other:
        try:
            location = _parse_end(source, tail, position, called)
            if location.shift and _begins_as_zip(source):
                # A cut through an archive leaves whatever archive was stored inside, with offsets of its own.
                raise CorruptArchive(
                    f"{called}: its last ZIP directory belongs to an archive that begins at byte {location.shift}, "
                    "expected 0: cut short or still being written"
                )
        except (CorruptArchive, UnsupportedFormat) as error:
            first_error = first_error or error
        else:
            return location
    if first_error is not None and (exact or _begins_as_zip(source)):
        raise first_error
    if _begins_as_zip(source):
        raise CorruptArchive(
            f"{called}: begins like a ZIP archive but has no end record: cut short or still being written"
        )
    raise NotADaf(f"{called}: not a ZIP archive: no ZIP signature at its start, no ZIP end record at its end")


def _begins_as_zip(source: ByteSource) -> bool:
    return LOCAL_SIGNATURE.startswith(source.read(0, min(len(LOCAL_SIGNATURE), source.size)))


def _end_candidates(tail: bytes) -> tuple[list[int], list[int]]:
    """Positions of possible end records, the last first: those whose comment ends the file, and others."""
    exact: list[int] = []
    other: list[int] = []
    position = tail.rfind(_END_SIGNATURE)
    while position >= 0:
        after = position + _END.size
        if after <= len(tail):
            comment_length = int.from_bytes(tail[after - 2 : after], "little")
            (exact if after + comment_length == len(tail) else other).append(position)
        position = tail.rfind(_END_SIGNATURE, 0, position)
    return exact[:_MAX_END_CANDIDATES], other[:_MAX_END_CANDIDATES]


def _parse_end(source: ByteSource, tail: _Tail, position: int, called: str) -> Location:
    _, disk, first_disk, _, n_entries, size, start, comment_bytes = _END.unpack_from(tail.data, position)
    comment = tail.data[position + _END.size : position + _END.size + comment_bytes]
    end = tail.start + position
    zip64 = _parse_end64(source, tail, end, called)
    if zip64 is not None:
        end, (disk64, first_disk64, n_entries64, size64, start64) = zip64
        disk = disk64 if disk == _SENTINEL16 else disk
        first_disk = first_disk64 if first_disk == _SENTINEL16 else first_disk
        n_entries = n_entries64 if n_entries == _SENTINEL16 else n_entries
        size = size64 if size == _SENTINEL32 else size
        start = start64 if start == _SENTINEL32 else start
    if disk or first_disk:
        raise UnsupportedFormat(f"{called}: one part of a ZIP archive split into several, expected a whole one")
    actual = end - size
    if not (0 <= start <= actual and n_entries * _HEADER.size <= size):
        raise CorruptArchive(
            f"{called}: the end record at byte {end} claims a directory of {n_entries} entries and {size} bytes at "
            f"byte {start}, which does not fit before it: cut short or still being written"
        )
    if size > _MAX_DIRECTORY_BYTES:
        raise UnsupportedFormat(f"{called}: a ZIP directory of {size} bytes, supported are {_MAX_DIRECTORY_BYTES}")
    # Where a directory stands at both places, the one that is claimed counts: an archive that is being appended to has
    # a copy of it directly before the end record.
    for at in (start, actual) if size else (actual,):
        # Where both agree and the tail does not show it, reading the directory will tell: no request is spent on it.
        unseen = actual == start < tail.start
        if size == 0 or unseen or tail.read(source, at, 4) == _HEADER_SIGNATURE:
            return Location(at, size, n_entries, at - start, zip64 is not None, comment)
    raise CorruptArchive(f"{called}: no ZIP directory at byte {start}, where the end record claims it")


def _parse_end64(
    source: ByteSource, tail: _Tail, end: int, called: str
) -> tuple[int, tuple[int, int, int, int, int]] | None:
    """Position and fields of the ZIP64 end record that belongs to the end record at byte `end`, if there is one."""
    at = end - _LOCATOR.size
    if at < tail.start:
        return None
    signature, _, claimed, _ = _LOCATOR.unpack(tail.read(source, at, _LOCATOR.size))
    if signature != _LOCATOR_SIGNATURE:
        return None
    for position in (at - _END64.size, claimed):
        if 0 <= position <= at - _END64.size:
            fields = _END64.unpack(tail.read(source, position, _END64.size))
            if fields[0] == _END64_SIGNATURE:
                return position, (fields[4], fields[5], fields[7], fields[8], fields[9])
    raise CorruptArchive(f"{called}: no ZIP64 end record at byte {claimed}, where its locator claims it")


class _Raw:
    """The directory's bytes, and views that read a little-endian number at any of their positions."""

    __slots__ = ("data", "u8", "u16", "u32", "u64")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.u8 = self._view("<u1", 1)
        self.u16 = self._view("<u2", 2)
        self.u32 = self._view("<u4", 4)
        self.u64 = self._view("<u8", 8)

    def _view(self, dtype: str, width: int) -> npt.NDArray[Any]:
        n = max(0, len(self.data) - width + 1)
        # One element a byte, overlapping: numpy then gathers fields without regard to alignment, and without copies.
        return np.ndarray((n,), dtype, self.data if n else b"\0" * width, 0, (1,))


def _entry_offsets(raw: _Raw, location: Location, called: str) -> npt.NDArray[np.uint32]:
    """Where each entry begins."""
    offsets = _offsets_by_signature(raw)
    if offsets is None:
        offsets = _offsets_by_walking(raw.data, called)
    n = len(offsets)
    # Writers without ZIP64 let the count wrap.
    if n != location.n_entries and (location.is_zip64 or n % 0x10000 != location.n_entries):
        raise CorruptArchive(f"{called}: the ZIP directory holds {n} entries, its end record says {location.n_entries}")
    return offsets.astype(np.uint32)


def _offsets_by_signature(raw: _Raw) -> Integers | None:
    """All places where the signature stands, if each of them begins where the entry before ends; else None."""
    if not raw.data:
        return np.zeros(0, np.int64)
    signature = int.from_bytes(_HEADER_SIGNATURE, "little")
    found = []
    for first in range(0, len(raw.data) - _HEADER.size + 1, _SCAN_BYTES):
        last = min(first + _SCAN_BYTES, len(raw.data) - _HEADER.size + 1)
        candidates = first + np.flatnonzero(raw.u8[first:last] == _HEADER_SIGNATURE[0])
        found.append(candidates[raw.u32[candidates] == signature])
    at = np.concatenate(found) if found else np.zeros(0, np.int64)
    if not len(at) or at[0]:
        return None
    ends = at + _HEADER.size + raw.u16[at + 28] + raw.u16[at + 30] + raw.u16[at + 32]
    return at if ends[-1] == len(raw.data) and np.array_equal(ends[:-1], at[1:]) else None


def _offsets_by_walking(data: bytes, called: str) -> Integers:
    """One entry after the other: for directories whose names or extra fields hold the signature, and damaged ones."""
    lengths = struct.Struct("<4s24x3H")
    offsets: list[int] = []
    at = 0
    while at < len(data) and not data.startswith(_DIGITAL_SIGNATURE, at):
        end = at + _HEADER.size
        signature, *variable = lengths.unpack_from(data, at) if end <= len(data) else (b"", 0)
        end += sum(variable)
        if signature != _HEADER_SIGNATURE or end > len(data):
            raise CorruptArchive(f"{called}: entry {len(offsets)} of the ZIP directory, {at} bytes into it, is damaged")
        offsets.append(at)
        at = end
    return np.array(offsets, np.int64)


class ZipDirectory:
    """The tree of names of an archive, over the bytes of its directory.

    Of entries with one name the last counts. Left out, with one log line an archive: names that are absolute, climb out
    or that Linux cannot have; a file with the name of a directory; symbolic links until `add_links` finds them sound.
    """

    def __init__(self, data: bytes, location: Location, name: str, mtime_ns: int) -> None:
        """Use `read_directory`."""
        self._raw = _Raw(data)
        self._shift = location.shift
        self._start = location.start
        self._called = shown(name)
        self._mtime_ns = mtime_ns
        self._offsets = _entry_offsets(self._raw, location, self._called)
        self._renamed: dict[int, bytes] = {}
        """Clean paths of the entries whose raw name is another."""
        self._left_out: Counter[str] = Counter()
        self._example = ""
        # While the index is made, asking for a directory numbers it.
        self._directories: dict[bytes, int] = defaultdict(count(1).__next__, {b"": 0})
        self._directory_entry: dict[int, int] = {}
        self._files_by_key = np.zeros(0, np.uint32)
        self._sorted_keys = np.zeros(0, np.int64)
        self._links: dict[bytes, bytes] = {}
        """Clean path of each sound link -> clean path, free of links, of the file or directory it stands for."""
        self._header_order: tuple[Integers, Integers] | None = None
        self._offset_at = self._offsets.data
        """The same numbers; a single one is had faster this way."""
        self._index()
        self._directories = dict(self._directories)
        self._file_at, self._key_at = self._files_by_key.data, self._sorted_keys.data

    def __len__(self) -> int:
        """How many entries the directory has, those left out included."""
        return len(self._offsets)

    def find(self, path: str) -> int | None:
        """The index of the file `path`, or None where there is no such file."""
        return self._find(self._followed(encode(path)))

    def is_directory(self, path: str) -> bool:
        """Whether there is a directory `path`, in so many words or implied by a name below it; '' always is one."""
        return self._followed(encode(path)) in self._directories

    def record(self, index: int) -> Record:
        """The fields of the entry `index`; raises CorruptArchive where its ZIP64 field lacks what it must hold."""
        data, at = self._raw.data, self._offset_at[index]
        fields = _HEADER.unpack_from(data, at)
        flags, method, crc, compressed_size, size, name_length, extra_length = fields[3], fields[4], *fields[7:12]
        header_offset = fields[16]
        extra_start = at + _HEADER.size + name_length
        if _SENTINEL32 in (size, compressed_size, header_offset):
            extra = _extra(data, extra_start, extra_length, _EXTRA_ZIP64)
            numbers = iter(struct.unpack_from(f"<{len(extra) // 8}Q", extra))
            try:  # 4.5.3: the field holds, in this order, only what has a sentinel in the header
                size = next(numbers) if size == _SENTINEL32 and extra else size
                compressed_size = next(numbers) if compressed_size == _SENTINEL32 and extra else compressed_size
                header_offset = next(numbers) if header_offset == _SENTINEL32 and extra else header_offset
            except StopIteration as error:
                raise CorruptArchive(
                    f"{self._called}: {shown(decode(self._path(index)))}: its ZIP64 field of {len(extra)} bytes lacks "
                    "a size or the offset"
                ) from error
        raw_name = data[at + _HEADER.size : extra_start]
        return Record(index, raw_name, flags, method, crc, compressed_size, size, header_offset + self._shift)

    def name_extra(self, index: int) -> bytes:
        """Info-ZIP's Unicode path field of the entry `index`, which says what it is called; empty where it has none."""
        at = self._offset_at[index] + _HEADER.size
        name_length, extra_length = struct.unpack_from("<2H", self._raw.data, at - 18)
        return _extra(self._raw.data, at + name_length, extra_length, _EXTRA_UNICODE_PATH)

    def is_hidden(self, index: int) -> bool:
        """Whether another entry is the file that is found under the name of the entry `index`."""
        found = self._find(self._path(index))
        return found is not None and found != index

    def path(self, index: int) -> str:
        """What the entry `index` is called, with `/` at its end where it is a directory."""
        return decode(self._path(index))

    @property
    def left_out(self) -> dict[str, int]:
        """Why names are not shown, and how many for each reason."""
        return dict(self._left_out)

    def listdir(self, path: str) -> list[Entry]:
        """Directories, then files, each in the archive's order; raises NotFound."""
        directory = self._followed(encode(path))
        number = self._directories.get(directory)
        if number is None:
            raise NotFound(f"{self._called}: {shown(path)}: no such directory")
        entries = [
            Entry(decode(_leaf(child)), True, 0, self._directory_mtime_ns(child))
            for child in self._subdirectories.get(directory, ())
        ]
        entries.extend(self._file_entries(directory, number))
        for link in self._links_in.get(directory, ()):
            entries.append(self._link_entry(link))
        return entries

    def directories_holding(self, name: str) -> list[str]:
        """Every directory with a file `name`, sorted; costs time for each directory, not for each entry."""
        leaf = b"/" + encode(name)
        candidates = [
            *self._directories,
            *(link for link, target in self._links.items() if target in self._directories),
        ]
        return sorted(
            decode(path) for path in candidates if self._find(self._followed((path + leaf).lstrip(b"/"))) is not None
        )

    def goes_on_in(self, newer: ZipDirectory) -> bool:
        """Whether `newer`, of the same file later, has every file as it is here, or a new one behind the old end."""
        if newer._shift == self._shift and newer._raw.data.startswith(self._raw.data):
            return True
        return all(self._is_in(newer, index) for index in self._files_by_key.tolist())

    def added_in(self, newer: ZipDirectory, limit: int) -> list[Record]:
        """Up to `limit` of the last entries of `newer` that are not here."""
        known = set(self._header_offsets()[0].tolist())
        last = range(len(newer) - 1, max(-1, len(newer) - 1 - limit), -1)
        return [record for record in map(newer.record, last) if record.header_offset not in known]

    def record_at(self, position: int) -> Record | None:
        """The last entry whose local header does not begin behind byte `position` of the archive."""
        offsets, order = self._header_offsets()
        at = int(np.searchsorted(offsets, position, "right")) - 1
        return None if at < 0 else self.record(int(order[at]))

    def _is_in(self, newer: ZipDirectory, index: int) -> bool:
        found = newer._find(self._path(index))
        if found is None:
            return False
        before, after = self.record(index), newer.record(found)
        # A checksum that was not yet filled in says nothing, and what it belongs to was not served.
        same_crc = before.crc in (0, after.crc)
        same = (before.header_offset, before.compressed_size) == (after.header_offset, after.compressed_size)
        return (same and same_crc) or after.header_offset >= self._start

    def _header_offsets(self) -> tuple[Integers, Integers]:
        """The offsets of all local headers in ascending order, and whose they are."""
        if self._header_order is None:
            offsets = self._offsets_of_headers(np.arange(len(self._offsets), dtype=np.int64))
            order = np.argsort(offsets, kind="stable")
            self._header_order = (offsets[order], order)
        return self._header_order

    def _offsets_of_headers(self, index: Integers) -> Integers:
        raw = self._raw
        at = self._offsets[index].astype(np.int64)
        offsets = raw.u32[at + 42].astype(np.int64)
        large = np.flatnonzero(offsets == _SENTINEL32)
        if len(large):
            field = self._find_extras(index[large], (_EXTRA_ZIP64,))[_EXTRA_ZIP64]
            here = at[large]  # 4.5.3: sizes come first, where the header has sentinels for them
            skip = 8 * ((raw.u32[here + 20] == _SENTINEL32).astype(np.int64) + (raw.u32[here + 24] == _SENTINEL32))
            there = field.length >= skip + 8
            offsets[large[there]] = raw.u64[(field.start + skip)[there]].astype(np.int64)
        return offsets + self._shift

    @property
    def pending_links(self) -> list[int]:
        """Entries that are symbolic links and wait for `add_links`."""
        return self._pending_links

    def add_links(self, targets: Iterable[tuple[int, bytes | None]]) -> None:
        """Takes the text of each pending link (None where it cannot be read) and shows those that lead to something.

        A link is shown as the file or directory it leads to. A directory that holds links itself is none of these: that
        keeps trees finite. To be called once, before the directory is shared.
        """
        wanted = {self._path(index): target for index, target in targets}
        lexical = {
            link: clean_target
            for link, target in wanted.items()
            if target is not None and (clean_target := _joined(link.rpartition(b"/")[0], target)) is not None
        }
        above_links = {directory for link in wanted for directory in _directories_above(link)}
        for link in wanted:
            final = _chased(link, lexical)
            if final is not None and self._can_stand_for(final, above_links):
                self._links[link] = final
                self._links_in.setdefault(link.rpartition(b"/")[0], []).append(link)
            else:
                self._leave_out("a symbolic link that leads nowhere, outside or to where links are", link)

    def _can_stand_for(self, target: bytes, above_links: set[bytes]) -> bool:
        is_directory = target in self._directories and target not in above_links
        return is_directory or self._find(target) is not None

    def log_left_out(self) -> None:
        """One warning that says how much of the archive is not shown, and why."""
        if self._left_out:
            reasons = "; ".join(f"{n}: {why}" for why, n in self._left_out.most_common())
            total = sum(self._left_out.values())
            _log.warning(
                "%s: left out %d of %d entries, such as %s (%s)",
                self._called, total, len(self), self._example, reasons,
            )  # fmt: skip

    # Building the index.

    def _index(self) -> None:
        n = len(self._offsets)
        keys = np.zeros(n, np.int64)
        """Hash of each file's clean path: Python's own, keyed anew by each process, so no archive can aim at it."""
        directory_of = np.full(n, -1, np.int32)
        """Number of the directory that holds each file; -1 for entries that are no files."""
        is_link = self._link_mask()
        unicode_names = self._unicode_names()
        for first in range(0, n, _BATCH):
            batch = range(first, min(first + _BATCH, n))
            self._index_batch(batch, unicode_names, keys, directory_of)
        self._subdirectories = self._make_tree()
        self._keep_last(keys, directory_of)
        self._drop_files_named_as_directories(directory_of)
        links = np.flatnonzero(is_link & (directory_of >= 0))
        self._pending_links: list[int] = links.tolist()
        self._links_in: dict[bytes, list[bytes]] = {}
        directory_of[links] = -1
        files = directory_of[self._files_by_key] >= 0
        self._files_by_key, self._sorted_keys = self._files_by_key[files], self._sorted_keys[files]
        in_order = np.argsort(directory_of, kind="stable").astype(np.uint32)
        n_files = int(np.count_nonzero(directory_of >= 0))
        self._by_directory = in_order[n - n_files :]
        self._bounds = np.searchsorted(
            directory_of[self._by_directory], np.arange(len(self._directories) + 1, dtype=np.int32)
        ).astype(np.uint32)

    def _index_batch(
        self, batch: range, unicode_names: dict[int, bytes], keys: Integers, directory_of: npt.NDArray[np.int32]
    ) -> None:
        """Hash and directory of the entries `batch`, with as little Python for each as can be."""
        raw, data = self._raw, self._raw.data
        part = slice(batch.start, batch.stop)
        starts = self._offsets[part].astype(np.int64) + _HEADER.size
        ends = starts + raw.u16[starts - _HEADER.size + 28]
        is_directory = (ends > starts) & (raw.u8[ends - 1] == ord("/"))
        names = [data[start:end] for start, end in zip(starts.tolist(), (ends - is_directory).tolist(), strict=True)]
        if not all_plain(names) or not unicode_names.keys().isdisjoint(batch if unicode_names else ()):
            self._index_odd_batch(batch, names, is_directory, unicode_names, keys, directory_of)
            return
        keys[part] = np.fromiter(map(hash, names), np.int64, len(names))
        directories = map(itemgetter(0), map(methodcaller("rpartition", b"/"), names))
        numbers = np.fromiter(map(self._directories.__getitem__, directories), np.int32, len(names))
        directory_of[part] = np.where(is_directory, -1, numbers)
        for position in np.flatnonzero(is_directory).tolist():
            self._directory_entry[self._directories[names[position]]] = batch.start + position

    def _index_odd_batch(
        self,
        batch: range,
        names: list[bytes],
        is_directory: npt.NDArray[np.bool_],
        unicode_names: dict[int, bytes],
        keys: Integers,
        directory_of: npt.NDArray[np.int32],
    ) -> None:
        """As `_index_batch` does, name by name, where some name is not what it is to be called."""
        for index, raw_name, directory in zip(batch, names, is_directory.tolist(), strict=True):
            name = unicode_names.get(index) or self._translated(index, raw_name)
            directory = directory or name.endswith(b"/")
            path = clean(name) if raw_name or directory else "an empty name"
            if isinstance(path, str):
                self._leave_out(path, raw_name)
                continue
            if directory:
                self._directory_entry[self._directories[path]] = index
                continue
            if not path:
                self._leave_out("an empty name", raw_name)
                continue
            if path != raw_name:
                self._renamed[index] = path
            keys[index] = hash(path)
            directory_of[index] = self._directories[path.rpartition(b"/")[0]]

    def _translated(self, index: int, name: bytes) -> bytes:
        """A raw name as UTF-8 with `/` between components; bytes stay where the entry claims UTF-8 and it is not."""
        at = int(self._offsets[index])
        _, made_by, _, flags, *_ = _HEADER.unpack_from(self._raw.data, at)
        if made_by >> 8 in _HOSTS_DOS and b"/" not in name:
            name = name.replace(b"\\", b"/")
        if not flags & _FLAG_UTF8 and not name.isascii():
            try:
                name.decode("utf-8")
            except UnicodeDecodeError:
                return name.decode("cp437").encode("utf-8")  # appendix D.1
        return name

    def _unicode_names(self) -> dict[int, bytes]:
        """Names out of Info-ZIP's Unicode path field, where it is about the name that stands in the header."""
        if b"up" not in self._raw.data:  # the field's number
            return {}
        index = np.flatnonzero(self._raw.u16[self._offsets.astype(np.int64) + 8] & _FLAG_UTF8 == 0)
        fields = self._find_extras(index, (_EXTRA_UNICODE_PATH,))[_EXTRA_UNICODE_PATH]
        names = {}
        for position in np.flatnonzero(fields.start >= 0).tolist():
            start, length = int(fields.start[position]), int(fields.length[position])
            field = self._raw.data[start : start + length]
            at = int(self._offsets[index[position]]) + _HEADER.size
            raw_name = self._raw.data[at : at + int(self._raw.u16[at - _HEADER.size + 28])]
            if length > 5 and field[0] == 1 and int.from_bytes(field[1:5], "little") == zlib.crc32(raw_name):
                names[int(index[position])] = field[5:]
        return names

    def _link_mask(self) -> npt.NDArray[np.bool_]:
        mask: npt.NDArray[np.bool_] = self._unix_modes(self._offsets) & _S_IFMT == _S_IFLNK
        return mask

    def _executables(self, index: Integers) -> list[bool]:
        """Which of some files their owner may run."""
        runnable: list[bool] = (self._unix_modes(self._offsets[index]) & _S_IXUSR != 0).tolist()
        return runnable

    def _unix_modes(self, offsets: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
        """The modes of the entries at `offsets`; 0 for those not made on Unix."""
        at = offsets.astype(np.int64)
        host = self._raw.u8[at + 5]
        made_on_unix = (host == _HOST_UNIX) | (host == _HOST_OSX)
        return np.where(made_on_unix, self._raw.u16[at + 40], 0).astype(np.uint16)

    def _make_tree(self) -> dict[bytes, list[bytes]]:
        """Adds the directories that others imply; gives each directory's subdirectories."""
        children: dict[bytes, list[bytes]] = {}
        total = 0
        for path in list(self._directories):
            while path:
                parent = path.rpartition(b"/")[0]
                known = parent in self._directories
                self._directories[parent]
                children.setdefault(parent, []).append(path)
                total += len(path)
                if known:
                    break
                path = parent
            if total > _MAX_PATH_BYTES:
                raise UnsupportedFormat(
                    f"{self._called}: the paths of its directories take more than {_MAX_PATH_BYTES} bytes"
                )
        return children

    def _keep_last(self, keys: Integers, directory_of: npt.NDArray[np.int32]) -> None:
        """Sorts the files' hashes for `_find` and drops all but the last of each name."""
        files = np.flatnonzero(directory_of >= 0).astype(np.uint32)
        order = np.argsort(keys[files], kind="stable")
        files = files[order]
        sorted_keys = keys[files]
        keep = np.ones(len(files), np.bool_)
        for position in np.flatnonzero(sorted_keys[:-1] == sorted_keys[1:]).tolist():
            if self._path(int(files[position])) == self._path(int(files[position + 1])):
                keep[position] = False
        directory_of[files[~keep]] = -1
        self._files_by_key = files[keep]
        self._sorted_keys = sorted_keys[keep]

    def _drop_files_named_as_directories(self, directory_of: npt.NDArray[np.int32]) -> None:
        paths = list(self._directories)
        hashes = np.fromiter(map(hash, paths), np.int64, len(paths))
        first, after = (np.searchsorted(self._sorted_keys, hashes, side) for side in ("left", "right"))
        for position in np.flatnonzero(first < after).tolist():
            for index in self._files_by_key[first[position] : after[position]].tolist():
                if self._path(index) == paths[position]:
                    self._leave_out("a file with the name of a directory", paths[position])
                    directory_of[index] = -1

    def _leave_out(self, why: str, path: bytes) -> None:
        self._example = self._example or shown(decode(path)) or "''"
        self._left_out[why] += 1

    # Answering.

    def _find(self, path: bytes) -> int | None:
        """The file with this clean path, free of links."""
        key = hash(path)
        for at in range(bisect_left(self._key_at, key), len(self._key_at)):
            if self._key_at[at] != key:
                break
            index = self._file_at[at]
            if self._path(index) == path:
                return index
        return None

    def _path(self, index: int) -> bytes:
        """The clean path of a file."""
        renamed = self._renamed.get(index)
        if renamed is not None:
            return renamed
        at = self._offset_at[index] + _HEADER.size
        data = self._raw.data
        return data[at : at + int.from_bytes(data[at - 18 : at - 16], "little")]

    def _followed(self, path: bytes) -> bytes:
        """`path` with the link in it, if there is one, replaced; what links stand for holds no further one."""
        if not self._links:
            return path
        head = path
        while head:
            target = self._links.get(head)
            if target is not None:
                return (target + path[len(head) :]).lstrip(b"/")
            head = head.rpartition(b"/")[0]
        return path

    def _file_entries(self, directory: bytes, number: int) -> Iterable[Entry]:
        index = self._by_directory[int(self._bounds[number]) : int(self._bounds[number + 1])].astype(np.int64)
        skip = len(directory) + 1 if directory else 0
        sizes, mtimes_ns = self._sizes(index), self._mtimes_ns(index)
        executables, identities = self._executables(index), self._identities(index)
        fields = zip(self._leaves(index, skip), repeat(False), sizes, mtimes_ns, executables, identities, strict=False)
        # As Entry(*fields) does, without a call of Python for each.
        return map(tuple.__new__, repeat(Entry), fields)

    def _leaves(self, index: Integers, skip: int) -> list[str]:
        """The names of files below their directory, whose path and `/` take `skip` bytes."""
        data, renamed = self._raw.data, self._renamed
        at = self._offsets[index].astype(np.int64)
        starts = at + _HEADER.size
        ends = starts + self._raw.u16[at + 28]
        names = [data[start:end] for start, end in zip((starts + skip).tolist(), ends.tolist(), strict=True)]
        if renamed:
            names = [
                renamed[one][skip:] if one in renamed else name
                for one, name in zip(index.tolist(), names, strict=True)
            ]
        # No name holds a slash, and decoding all at once takes a tenth of the time.
        return decode(b"/".join(names)).split("/") if names else []

    def _link_entry(self, link: bytes) -> Entry:
        target = self._links[link]
        name = decode(_leaf(link))
        index = self._find(target)
        if index is None:
            return Entry(name, True, 0, self._directory_mtime_ns(target))
        one = np.array([index], np.int64)
        size, mtime_ns = self._sizes(one)[0], self._mtimes_ns(one)[0]
        return Entry(name, False, size, mtime_ns, self._executables(one)[0], self._identities(one)[0])

    def _directory_mtime_ns(self, path: bytes) -> int:
        index = self._directory_entry.get(self._directories[path])
        return self._mtime_ns if index is None else self._mtimes_ns(np.array([index], np.int64))[0]

    def _identities(self, index: Integers) -> list[int]:
        """Offset and checksum of each entry in one number."""
        offsets, crcs = self._offsets_of_headers(index), self._raw.u32[self._offsets[index].astype(np.int64) + 16]
        numbers: list[int]
        if len(offsets) and int(offsets.max()) >= 1 << 31:  # they do not fit into numpy's numbers
            numbers = [offset << 32 | crc for offset, crc in zip(offsets.tolist(), crcs.tolist(), strict=True)]
        else:
            numbers = (offsets << 32 | crcs).tolist()
        return numbers

    def _sizes(self, index: Integers) -> list[int]:
        raw = self._raw
        sizes = raw.u32[self._offsets[index].astype(np.int64) + 24].astype(np.uint64)
        large = np.flatnonzero(sizes == _SENTINEL32)
        if len(large):
            field = self._find_extras(index[large], (_EXTRA_ZIP64,))[_EXTRA_ZIP64]
            there = field.length >= 8
            sizes[large[there]] = raw.u64[field.start[there]]
        numbers: list[int] = sizes.tolist()
        return numbers

    def _mtimes_ns(self, index: Integers) -> list[int]:
        raw = self._raw
        at = self._offsets[index].astype(np.int64)
        dos, which = np.unique(raw.u32[at + 12], return_inverse=True)
        times = np.array([_dos_time_ns(stamp, self._mtime_ns) for stamp in dos.tolist()], np.int64)[which]
        with_extra = np.flatnonzero(raw.u16[at + 30])
        if len(with_extra):
            fields = self._find_extras(index[with_extra], (_EXTRA_NTFS, _EXTRA_UNIX_TIME))
            self._use_ntfs_times(times, with_extra, fields[_EXTRA_NTFS])
            self._use_unix_times(times, with_extra, fields[_EXTRA_UNIX_TIME])
        numbers: list[int] = times.tolist()
        return numbers

    def _use_ntfs_times(self, times: Integers, which: Integers, field: _Fields) -> None:
        raw = self._raw
        there = np.flatnonzero(field.length >= 16)
        there = there[raw.u32[field.start[there] + 4] == 24 << 16 | 1]  # tag 1, its three times
        ticks = raw.u64[field.start[there] + 8].astype(np.int64) - _NTFS_EPOCH_TICKS
        sound = (ticks > 0) & (ticks < 1 << 56)
        times[which[there[sound]]] = ticks[sound] * 100

    def _use_unix_times(self, times: Integers, which: Integers, field: _Fields) -> None:
        raw = self._raw
        there = np.flatnonzero(field.length >= 5)
        there = there[raw.u8[field.start[there]] & 1 == 1]
        seconds = raw.u32[field.start[there] + 1].astype(np.int32).astype(np.int64)
        times[which[there]] = seconds * 1_000_000_000

    def _find_extras(self, index: Integers, kinds: tuple[int, ...]) -> dict[int, _Fields]:
        """The first extra field of each kind in each of the entries `index`, all entries walked side by side."""
        raw = self._raw
        at = self._offsets[index].astype(np.int64)
        cursor = at + _HEADER.size + raw.u16[at + 28]
        end = cursor + raw.u16[at + 30]
        found = {kind: _Fields(np.full(len(at), -1, np.int64), np.zeros(len(at), np.int64)) for kind in kinds}
        active = np.flatnonzero(cursor + 4 <= end)
        while len(active):
            here = cursor[active]
            kind, start = raw.u16[here], here + 4
            length = raw.u16[here + 2].astype(np.int64)
            fits = start + length <= end[active]
            for wanted, fields in found.items():
                hit = fits & (kind == wanted) & (fields.start[active] < 0)
                fields.start[active[hit]] = start[hit]
                fields.length[active[hit]] = length[hit]
            cursor[active] = start + length
            active = active[fits & (start + length + 4 <= end[active])]
        return found


class _Fields(NamedTuple):
    """Extra fields of one kind, an element an entry: where their data starts (-1 for none), and its length."""

    start: Integers
    length: Integers


def unicode_path(extra: bytes) -> bytes:
    """The Unicode path field of an entry's or local header's extra fields; empty where there is none."""
    return _extra(extra, 0, len(extra), _EXTRA_UNICODE_PATH)


def _extra(data: bytes, start: int, length: int, wanted: int) -> bytes:
    """The data of the first extra field of kind `wanted`; empty where there is none."""
    end = start + length
    while start + 4 <= end:
        kind, size = struct.unpack_from("<2H", data, start)
        start += 4
        if kind == wanted and start + size <= end:
            return data[start : start + size]
        start += size
    return b""


@lru_cache(maxsize=4096)
def _dos_time_ns(stamp: int, default: int) -> int:
    """Nanoseconds since 1970 of date << 16 | time, in local time (4.4.6); `default` for the epoch and for no date."""
    if stamp == _DOS_EPOCH:
        return default
    date, time = stamp >> 16, stamp & 0xFFFF
    try:
        when = datetime(
            (date >> 9) + 1980, date >> 5 & 15, date & 31, time >> 11, time >> 5 & 63, (time & 31) * 2
        )  # fmt: skip
        return int(when.timestamp()) * 1_000_000_000
    except (ValueError, OverflowError):
        return default


def _leaf(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]


def _directories_above(path: bytes) -> Iterator[bytes]:
    while path:
        path = path.rpartition(b"/")[0]
        yield path


def _joined(directory: bytes, target: bytes) -> bytes | None:
    """A link's target as a clean path from the root; None where it leads outside."""
    if target.startswith(b"/") or b"\0" in target:
        return None
    components = [component for component in directory.split(b"/") if component]
    for component in target.split(b"/"):
        if component == b"..":
            if not components:
                return None
            components.pop()
        elif component not in (b"", b"."):
            components.append(component)
    return b"/".join(components)


def _chased(link: bytes, targets: dict[bytes, bytes], hops: int = 40) -> bytes | None:
    """Where a link leads in the end, links in the middle followed too; None where it goes in a circle."""
    path = link
    for _ in range(hops):
        parts = path.split(b"/")
        heads = (b"/".join(parts[:k]) for k in range(1, len(parts) + 1))
        head = next((head for head in heads if head in targets), None)
        if head is None:
            return path if path != link else None
        path = (targets[head] + path[len(head) :]).lstrip(b"/")
    return None
