"""The entries of an archive that is one ZIP file: local headers against the directory, checksums, names, overlaps.

Owns what a sound outer archive is; must not know Daf. Entries are checked in threads, a bounded number at a time.

Facts about ZIP come from PKWARE's APPNOTE.TXT (its section numbers are given).
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from dafmount.check.findings import Emit, Sink
from dafmount.check.work import Work
from dafmount.errors import Corrupt, UnsupportedFormat
from dafmount.source.base import ByteSource
from dafmount.source.names import shown
from dafmount.source.zip import ZipArchive
from dafmount.source.zip_directory import FLAG_ENCRYPTED, LOCAL_SIGNATURE, Record, unicode_path
from dafmount.source.zip_entries import check_crc, decoded_chunks, read_chunks
from dafmount.source.zip_methods import STORED, check_method

_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7
_FLAG_STREAMED = 1 << 3  # 4.4.4: CRC and sizes follow the data
_FLAG_UTF8 = 1 << 11
_COMPARED_FLAGS = FLAG_ENCRYPTED | _FLAG_STREAMED | _FLAG_UTF8
_SENTINEL_32 = 0xFFFFFFFF
_ZIP64 = 0x0001


class _Outcome(NamedTuple):
    """What became of one entry."""

    ordinal: int
    path: str
    faults: list[str]
    start: int
    stop: int
    """Where in the archive header and data lie."""


def check_entries(archive: ZipArchive, root: str, emit: Emit, work: Work, *, quick: bool) -> None:
    """Report what is wrong with the entries below the directory `root`; with `quick` no data are read."""
    directory = archive.directory
    whole = Sink(archive.name, "", emit)
    for reason, n in directory.left_out.items():
        whole.error(f"{n} of its names cannot be shown: {reason}")
    indices = _indices(archive, root)
    starts, stops, members = array("Q"), array("Q"), array("Q")
    for outcome in work.ordered(partial(_check_entry, archive, quick), indices):
        sink = Sink(archive.name, outcome.path, emit)
        for fault in outcome.faults:
            sink.error(fault)
        if directory.is_hidden(outcome.ordinal):
            sink.warning("another entry of the same name comes later in the directory and hides this one")
        work.advance(outcome.stop - outcome.start)
        starts.append(outcome.start)
        stops.append(outcome.stop)
        members.append(outcome.ordinal)
    _check_overlaps(archive, starts, stops, members, emit)
    whole.close()


def expected_bytes(archive: ZipArchive, root: str) -> int:
    """About how many bytes `check_entries` reads."""
    return archive.source.size if not root else 0


def _indices(archive: ZipArchive, root: str) -> Iterator[int]:
    prefix = f"{root}/" if root else ""
    for index in range(len(archive.directory)):
        if not prefix or archive.directory.path(index).startswith(prefix):
            yield index


def _check_entry(archive: ZipArchive, quick: bool, index: int) -> _Outcome:
    """One entry; never raises for what is wrong with it."""
    path = archive.directory.path(index)
    called = f"{shown(archive.name)}: {shown(path)}"
    faults: list[str] = []
    start = stop = 0
    try:
        record = archive.directory.record(index)
        start = stop = record.header_offset
        data_start = _check_header(archive, record, faults)
        stop = data_start + record.compressed_size
        if not quick:
            _check_data(archive.source, record, data_start, called)
    except (Corrupt, UnsupportedFormat, OSError) as error:
        faults.append(str(error))
    return _Outcome(index, path, faults, start, stop)


def _check_header(archive: ZipArchive, record: Record, faults: list[str]) -> int:
    """Where the data begins; raises Corrupt where there is no local header, adds to `faults` where it differs."""
    source = archive.source
    if record.header_offset + _LOCAL.size > source.size:
        raise Corrupt(f"its local header at byte {record.header_offset} is outside the archive")
    fields = _LOCAL.unpack(source.read(record.header_offset, _LOCAL.size))
    signature, _, flags, method, _, _, crc, compressed_size, size, name_length, extra_length = fields
    if signature != LOCAL_SIGNATURE:
        raise Corrupt(f"at byte {record.header_offset} there is {signature!r}, expected a local header")
    start = int(record.header_offset + _LOCAL.size + name_length + extra_length)
    if start + record.compressed_size > source.size:
        raise Corrupt(f"{record.compressed_size} bytes at byte {start}, the archive has {source.size}")
    rest = source.read(record.header_offset + _LOCAL.size, name_length + extra_length)
    name, extra = rest[:name_length], rest[name_length:]
    if name != record.raw_name:
        faults.append(f"its local header has the name {name!r}, its directory entry {record.raw_name!r}")
    for what, found, expected in (
        ("flags", flags & _COMPARED_FLAGS, record.flags & _COMPARED_FLAGS),
        ("method", method, record.method),
    ):
        if found != expected:
            faults.append(f"its local header has the {what} {found:#x}, its directory entry {expected:#x}")
    unicode_name = archive.directory.name_extra(record.ordinal)
    if unicode_name and unicode_path(extra) != unicode_name:
        faults.append("its local header and its directory entry have different Unicode names")
    if not flags & _FLAG_STREAMED:
        compressed_size, size = _sizes(extra, compressed_size, size)
        if (crc, compressed_size, size) != (record.crc, record.compressed_size, record.size):
            faults.append(
                f"its local header has CRC-32 {crc:08x} and {size} bytes in {compressed_size}, "
                f"its directory entry {record.crc:08x} and {record.size} in {record.compressed_size}"
            )
    return start


def _sizes(extra: bytes, compressed_size: int, size: int) -> tuple[int, int]:
    """The sizes of a local header, from its ZIP64 field (4.5.3) where the header itself cannot say them."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == _ZIP64 and at + 4 + length <= len(extra):
            numbers = iter(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            size = next(numbers, size) if size == _SENTINEL_32 else size
            compressed_size = next(numbers, compressed_size) if compressed_size == _SENTINEL_32 else compressed_size
            break
        at += 4 + length
    return compressed_size, size


def _check_data(source: ByteSource, record: Record, start: int, called: str) -> None:
    """Raises where the data are not those that the directory promises."""
    if record.flags & FLAG_ENCRYPTED:
        raise UnsupportedFormat(f"{called}: the entry is encrypted, which is not supported")
    check_method(record.method, called)
    blocks = read_chunks(source, start, record.compressed_size)
    if record.method != STORED:
        for _ in decoded_chunks(record, blocks, called):
            pass
        return
    if record.compressed_size != record.size:
        raise Corrupt(f"{called}: stored, yet of {record.compressed_size} bytes for {record.size}")
    crc = 0
    for block in blocks:
        crc = zlib.crc32(block, crc)
    check_crc(record, crc, called)


def _check_overlaps(
    archive: ZipArchive, starts: array[int], stops: array[int], members: array[int], emit: Emit
) -> None:
    """Entries that share bytes."""
    order = np.argsort(np.frombuffer(starts, np.uint64), kind="stable") if starts else np.zeros(0, np.int64)
    first = np.frombuffer(starts, np.uint64)[order] if starts else np.zeros(0, np.uint64)
    last = np.frombuffer(stops, np.uint64)[order] if starts else first
    for at in np.flatnonzero(first[1:] < np.maximum.accumulate(last)[:-1]).tolist():
        one, other = (archive.directory.path(members[int(order[place])]) for place in (at, at + 1))
        Sink(archive.name, other, emit).error(f"begins at byte {first[at + 1]}, within the entry {shown(one)}")
