"""The bytes of one entry of an outer ZIP archive, as byte sources.

Owns how an entry is read: a stored one as a range of the archive, a compressed one out of its decoded copy, and when
checksums are checked. Knows nothing of directories or of where copies are kept. Threads may share each class.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Sequence

from dafmount.errors import CorruptArchive, ShortRead
from dafmount.source.base import ByteSource, Range
from dafmount.source.fetchers import Fetchers, fetchers_of
from dafmount.source.names import shown
from dafmount.source.zip_directory import Record
from dafmount.source.zip_methods import CHUNK_BYTES, decompress


def read_chunks(source: ByteSource, start: int, length: int) -> Iterator[bytes]:
    """`length` bytes of `source` from `start` on, in chunks."""
    for offset in range(start, start + length, CHUNK_BYTES):
        yield source.read(offset, min(CHUNK_BYTES, start + length - offset))


def decoded_chunks(record: Record, compressed: Iterator[bytes], name: str) -> Iterator[bytes]:
    """The decompressed bytes of an entry, never more than it declares.

    Raises CorruptArchive at the latest after the last chunk, where size or CRC-32 are not those declared.
    """
    size, crc = 0, 0
    for chunk in decompress(record.method, compressed, name):
        size += len(chunk)
        if size > record.size:
            raise CorruptArchive(
                f"{name}: decompresses to more than the {record.size} bytes its directory entry declares"
            )
        crc = zlib.crc32(chunk, crc)
        yield chunk
    if size != record.size:
        raise CorruptArchive(f"{name}: decompresses to {size} bytes, its directory entry declares {record.size}")
    check_crc(record, crc, name)


def check_crc(record: Record, crc: int, name: str) -> None:
    """Raises CorruptArchive where `crc` is not the entry's."""
    if crc != record.crc:
        raise CorruptArchive(f"{name}: CRC-32 {crc:08x}, its directory entry declares {record.crc:08x}")


class MemorySource:
    """Bytes at hand as a byte source."""

    def __init__(self, name: str, data: bytes) -> None:
        self._name = name
        self._data = data

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self._data)

    @property
    def gap_bytes(self) -> int:
        """Nothing is gained by joining reads of memory."""
        return 0

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead."""
        check_bounds(self, offset, length)
        return self._data[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`."""
        return self.read(offset, length)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """A slice each."""
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        """Nothing to let go of."""


class StoredEntry:
    """A stored entry: the range of the archive that holds it. Closing it leaves the archive open."""

    def __init__(self, source: ByteSource, record: Record, start: int, name: str, passed: Callable[[], None] | None):
        """`start` is where its data begins. With `passed` the first read checks the whole entry, and then calls it."""
        self._source = source
        self._record = record
        self._start = start
        self._name = name
        self._passed = passed

    @property
    def name(self) -> str:
        """The archive and the entry."""
        return self._name

    @property
    def size(self) -> int:
        """Length in bytes."""
        return self._record.size

    @property
    def gap_bytes(self) -> int:
        """The archive's."""
        return self._source.gap_bytes

    @property
    def fetchers(self) -> Fetchers | None:
        """The archive's; None where it is near."""
        return fetchers_of(self._source)

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead, CorruptArchive, or what the archive's source raises."""
        check_bounds(self, offset, length)
        if self._passed is None:
            return self._source.read(self._start + offset, length)
        return self._checked(self._source.read(self._start, self.size))[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None where the archive's source would have to wait."""
        check_bounds(self, offset, length)
        if self._passed is None:
            return self._source.read_nowait(self._start + offset, length)
        data = self._source.read_nowait(self._start, self.size)
        return None if data is None else self._checked(data)[offset : offset + length]

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """One request to the archive's source, which may fetch them at the same time."""
        for start, stop in ranges:
            check_bounds(self, start, stop - start)
        if self._passed is not None:
            return [self.read(start, stop - start) for start, stop in ranges]
        return self._source.read_ranges([Range(self._start + start, self._start + stop) for start, stop in ranges])

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        """See Filling."""
        check_bounds(self, offset, len(buffer))
        fill: Callable[[int, memoryview, Callable[[int], None]], None] | None = getattr(self._source, "read_into", None)
        if fill is not None and self._passed is None:
            fill(self._start + offset, buffer, arrived)
            return
        buffer[:] = self.read(offset, len(buffer))
        arrived(len(buffer))

    def close(self) -> None:
        """Nothing to let go of."""

    def _checked(self, whole: bytes) -> bytes:
        check_crc(self._record, zlib.crc32(whole), self._name)
        passed, self._passed = self._passed, None
        if passed is not None:
            passed()
        return whole


class DecodedEntry:
    """A compressed entry, decoded as a whole by the first read, whichever thread does it."""

    def __init__(self, record: Record, gap_bytes: int, name: str, fetch: Callable[[], ByteSource]) -> None:
        """`fetch` opens the decoded copy, making it if need be."""
        self._record = record
        self._gap_bytes = gap_bytes
        self._name = name
        self._fetch = fetch
        self._lock = threading.Lock()
        self._copy: ByteSource | None = None

    @property
    def name(self) -> str:
        """The archive and the entry."""
        return self._name

    @property
    def size(self) -> int:
        """Length in bytes as declared; what is served has been found to have it."""
        return self._record.size

    @property
    def gap_bytes(self) -> int:
        """See ByteSource."""
        return self._gap_bytes

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead, CorruptArchive, SpoolFull, or the source's errors."""
        check_bounds(self, offset, length)
        return self._decoded().read(offset, length)

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None until the entry is decoded."""
        check_bounds(self, offset, length)
        copy = self._copy
        return None if copy is None else copy.read_nowait(offset, length)

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """From the decoded copy."""
        for start, stop in ranges:
            check_bounds(self, start, stop - start)
        return self._decoded().read_ranges(ranges)

    def close(self) -> None:
        """Lets go of the decoded copy."""
        with self._lock:
            copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()

    def _decoded(self) -> ByteSource:
        if self._copy is not None:
            return self._copy
        fetched = self._fetch()
        with self._lock:
            if self._copy is None:
                self._copy = fetched
                return fetched
            copy = self._copy
        fetched.close()
        return copy


def check_bounds(source: ByteSource, offset: int, length: int) -> None:
    """Raises ShortRead for a range that does not lie within `source`."""
    if offset < 0 or length < 0 or offset + length > source.size:
        raise ShortRead(f"{shown(source.name)}: asked for {length} bytes at byte {offset}, it has {source.size}")
