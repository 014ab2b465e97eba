"""A ZIP archive of data sets as an `Archive`, over any byte source.

Owns local headers, which checks an entry undergoes before it is served, and where decoded entries are kept. Reads only
the end of the archive, its directory and what is asked for. Knows nothing of Daf, files or HTTP. Threads may share it:
its lock guards small tables and is never held during I/O or decoding.

Facts about ZIP come from PKWARE's APPNOTE.TXT (its section numbers are given).
"""

from __future__ import annotations

import contextlib
import struct
import threading
import weakref
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, TypeAlias, TypeVar, cast

from dafmount.errors import Corrupt, CorruptArchive, DafmountError, NotFound, UnsupportedFormat, UsageError
from dafmount.source.ahead import Ahead
from dafmount.source.base import ByteSource, Entry, Range, Stamp
from dafmount.source.fetchers import Fetchers, fetchers_of
from dafmount.source.names import shown
from dafmount.source.spool import Spool
from dafmount.source.warm import FarSource, Warm
from dafmount.source.zip_directory import FLAG_ENCRYPTED, LOCAL_SIGNATURE, Record, ZipDirectory, read_directory
from dafmount.source.zip_entries import (
    DecodedEntry,
    MemorySource,
    StoredEntry,
    check_crc,
    decoded_chunks,
    read_chunks,
)
from dafmount.source.zip_methods import STORED, check_method

VERIFY = ("off", "auto", "all")
"""Which stored entries have their CRC-32 checked before they are served: none; those up to 64 KiB and those whose CRC
was never filled in; all. Compressed entries always are."""

T = TypeVar("T")
_Read: TypeAlias = Callable[[int, int], bytes]

_LOCAL = struct.Struct("<4s5H3L2H")  # 4.3.7

_TINY_BYTES = 4096
"""Stored entries up to this size are read together with their header, as one read costs as much as another."""

_EXTRA_GUESS = 64
"""Room for the extra field of the local header, which only it tells the length of: ZIP64, times, alignment."""

_FAR_BYTES = 16 * 1024
"""How much of an entry of a far archive is fetched with its local header: small ones, and the Zarr index of most shards
that are not large, are then here as a whole."""

_LARGE_BYTES = 4 << 20
_FAR_BYTES_OF_LARGE = 1024
"""The same of entries that are larger than `_LARGE_BYTES`: the index of such a shard mostly is so long that there is
little use for its first part."""

_CHECKED_BYTES = 64 * 1024
"""Stored entries up to this size are checked by their first read, whatever it asks for."""

_SMALL_BYTES = 256 * 1024
"""Decoded entries up to this size are kept in memory, larger ones in the spool."""

_SMALL_CACHE_BYTES = 8 << 20

_WARM_BYTES = 8 << 20
"""Most bytes of small entries of a far archive that are fetched before they are read, one by one."""
_LINK_BYTES = 4096
_MAX_LINKS = 10_000
_MAX_UNFINISHED = 64


class _WouldWait(Exception):
    """Bytes would have to be waited for."""


class StampedSource(ByteSource, Protocol):
    """A byte source that can tell whether what it reads from is still the same."""

    def stamp(self) -> Stamp:
        """The present state, asked anew."""


class ZipArchive:
    """An archive that is one ZIP file.

    A damaged entry raises when it is opened or read, and costs nothing else. Compressed entries are decoded as a whole,
    once however many threads ask, and served only after size and CRC-32 were found right.
    """

    def __init__(
        self,
        source: StampedSource,
        name: str,
        mtime_ns: int,
        spool: Spool,
        *,
        verify: str = "auto",
        on_directory: Callable[[ZipDirectory], None] | None = None,
        is_known: bool = False,
    ) -> None:
        """Reads the directory; raises as `read_directory` does. The archive closes `source`, also when this fails.

        `verify` is one of `VERIFY`. `on_directory` hears of the directory before anything else is read. Of an archive
        that `is_known` nothing is logged.
        """
        if verify not in VERIFY:
            raise UsageError(f"verify={verify}: expected one of {', '.join(VERIFY)}")
        self._fetchers = fetchers_of(source)
        self._warm: Warm | None = None
        if self._fetchers is not None:
            source = self._warm = Warm(cast(FarSource, source), _WARM_BYTES)
        self._source = source
        self._name = name
        self._mtime_ns = mtime_ns
        self._spool = spool
        self._verify = verify
        self._owner = object()
        # An archive that was replaced by its next state goes when the last file opened from it is closed.
        self._give_up_copies = weakref.finalize(self, spool.forget, self._owner)
        self._give_up_copies.atexit = False
        self._flights = _Flights()
        self._small = _SmallCache(_SMALL_CACHE_BYTES)
        try:
            self._directory = read_directory(source, name=name, mtime_ns=mtime_ns)
            if on_directory is not None:
                on_directory(self._directory)
            self._verified = bytearray(len(self._directory))
            self._add_links()
        except Exception:
            source.close()
            raise
        if not is_known:
            self._directory.log_left_out()

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._name

    @property
    def mtime_ns(self) -> int:
        """The archive's own time."""
        return self._mtime_ns

    def listdir(self, path: str) -> list[Entry]:
        """Directories, then files, each in the archive's order; raises NotFound."""
        return self._directory.listdir(path)

    def directories_holding(self, name: str) -> list[str]:
        """Every directory ('' is the root) with a file `name`, sorted, without listing any."""
        return self._directory.directories_holding(name)

    @property
    def directory(self) -> ZipDirectory:
        """Every entry, those that are not shown included."""
        return self._directory

    @property
    def source(self) -> ByteSource:
        """The bytes of the archive itself."""
        return self._source

    def open(self, path: str) -> ByteSource:
        """Opens an entry after a look at its local header.

        Raises NotFound, UnsupportedFormat (encrypted, or an unknown method), CorruptArchive, or what the source raises.
        """
        return self._open(self._record(path), self._called(path), self._source.read)

    def open_nowait(self, path: str) -> ByteSource | None:
        """As `open`, but None where the source would have to wait, or a whole entry must be checked first."""
        try:
            return self._open(self._record(path), self._called(path), self._read_nowait)
        except _WouldWait:
            return None

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """The whole of an entry, with one read of the archive where that can do.

        Raises Corrupt where it is larger than `limit_bytes`, and as `open` and reading do.
        """
        record, called = self._record(path), self._called(path)
        if record.size > limit_bytes:
            raise Corrupt(f"{called}: {record.size} bytes, expected at most {limit_bytes}")
        return self._read_whole(record, called)

    def expect(self, paths: Sequence[str]) -> None:
        """Hear that small files will be read soon: of a far archive near ones come together, the others at once.

        What cannot be had now is told to whoever reads it.
        """
        if self._warm is None:
            return
        ranges = []
        for path in paths:
            found = self._directory.find(path)
            if found is not None:
                record = self._directory.record(found)
                start = record.header_offset
                stop = start + _LOCAL.size + len(record.raw_name) + _EXTRA_GUESS + record.compressed_size
                if record.compressed_size <= _TINY_BYTES and start < self._source.size:
                    ranges.append(Range(start, min(stop, self._source.size)))
        with contextlib.suppress(DafmountError):
            self._warm.warm(ranges)

    def stamp(self, path: str = "") -> Stamp:
        """The present state of the archive's file, whatever the path."""
        return self._source.stamp()

    def continues(self, older: ZipArchive) -> bool:
        """Whether this is what became of `older` by appending: its entries are all there, where they were."""
        return older._directory.goes_on_in(self._directory)

    def unfinished_since(self, older: ZipArchive) -> str | None:
        """The name of an entry that `older` had not and that its writer has not completed; None where there is none.

        Looks at the last few entries only.
        """
        for record in older._directory.added_in(self._directory, _MAX_UNFINISHED):
            called = shown(record.raw_name.decode("utf-8", "surrogateescape"))
            try:
                self._data_start(record, called, self._source.read)
            except CorruptArchive:
                return called
            if record.crc == 0 and record.size:
                return called
        return None

    def close(self) -> None:
        """Gives up decoded entries and closes the source."""
        self._give_up_copies()
        self._source.close()

    def _called(self, path: str) -> str:
        return f"{shown(self._name)}: {shown(path)}"

    def _record(self, path: str) -> Record:
        found = self._directory.find(path)
        if found is None:
            what = "is a directory" if self._directory.is_directory(path) else "no such entry"
            raise NotFound(f"{self._called(path)}: {what}")
        return self._directory.record(found)

    def _read_whole(self, record: Record, called: str) -> bytes:
        entry = self._open(record, called, self._source.read)
        try:
            return entry.read(0, entry.size)
        finally:
            entry.close()

    def _read_nowait(self, offset: int, length: int) -> bytes:
        data = self._source.read_nowait(offset, length)
        if data is None:
            raise _WouldWait
        return data

    def _open(self, record: Record, called: str, read: _Read) -> ByteSource:
        if record.flags & FLAG_ENCRYPTED:
            raise UnsupportedFormat(f"{called}: the entry is encrypted, which is not supported")
        check_method(record.method, called)
        if record.method != STORED:
            start = self._data_start(record, called, read)
            gap_bytes = self._source.gap_bytes
            return DecodedEntry(record, gap_bytes, called, lambda: self._decoded_copy(record, start, called))
        if record.compressed_size != record.size:
            raise CorruptArchive(f"{called}: stored, yet of {record.compressed_size} bytes for {record.size}")
        if record.size <= _TINY_BYTES:
            return MemorySource(called, self._read_tiny(record, called, read))
        if self._fetchers is not None:
            if read != self._source.read:
                raise _WouldWait
            return self._open_far(record, self._fetchers, called)
        start = self._data_start(record, called, read)
        if self._must_check_first(record):
            if read != self._source.read:
                raise _WouldWait
            self._check_stored(record, start, called)
        return StoredEntry(self._source, record, start, called, self._first_read_check(record))

    def _open_far(self, record: Record, fetchers: Fetchers, called: str) -> Ahead:
        """A stored entry of a far archive; its first bytes come with its local header, by one request."""
        more = _FAR_BYTES if record.size <= _LARGE_BYTES else _FAR_BYTES_OF_LARGE
        length = _LOCAL.size + len(record.raw_name) + _EXTRA_GUESS + more
        block = self._read_header(record, length, called, self._source.read)
        start = self._parse_local(record, block, called)
        if self._must_check_first(record):
            self._check_stored(record, start, called)
        first = block[start - record.header_offset :][: record.size]
        if record.size == len(first) and self._first_read_check(record) is not None:
            check_crc(record, zlib.crc32(first), called)
            self._verified[record.ordinal] = 1
        entry = Ahead(StoredEntry(self._source, record, start, called, self._first_read_check(record)), fetchers)
        entry.seed(0, first)
        return entry

    def _sequential(self, record: Record, start: int, called: str) -> ByteSource:
        """The compressed bytes of an entry, to be read from the first to the last."""
        stored = record._replace(size=record.compressed_size)
        entry = StoredEntry(self._source, stored, start, called, None)
        return entry if self._fetchers is None else Ahead(entry, self._fetchers)

    # Local headers.

    def _data_start(self, record: Record, called: str, read: _Read) -> int:
        length = _LOCAL.size + len(record.raw_name)
        return self._parse_local(record, self._read_header(record, length, called, read), called)

    def _read_header(self, record: Record, length: int, called: str, read: _Read) -> bytes:
        """`length` bytes from the local header on, or what the file has of them."""
        there = self._source.size - record.header_offset
        if there < _LOCAL.size + len(record.raw_name):
            raise CorruptArchive(f"{called}: its local header at byte {record.header_offset} is outside the archive")
        return read(record.header_offset, min(length, there))

    def _parse_local(self, record: Record, header: bytes, called: str) -> int:
        """Where the data starts; raises CorruptArchive where the header is not the entry's.

        Two entries that share a header have different names, so that one of them is found out here.
        """
        fields: tuple[bytes | int, ...] = _LOCAL.unpack_from(header)
        signature, name_length, extra_length = fields[0], int(fields[9]), int(fields[10])
        where = f"{called}: at byte {record.header_offset}"
        if signature != LOCAL_SIGNATURE:
            if not any(header[: _LOCAL.size]):
                raise CorruptArchive(f"{where} there are zeros instead of its local header: it was never completed")
            raise CorruptArchive(f"{where} there is {signature!r}, expected a local header")
        raw_name = header[_LOCAL.size : _LOCAL.size + name_length]
        if name_length != len(record.raw_name) or raw_name != record.raw_name:
            found = ascii(raw_name.decode("utf-8", "surrogateescape"))
            raise CorruptArchive(f"{where} there is the local header of another entry, {found}")
        start = record.header_offset + _LOCAL.size + name_length + extra_length
        if start + record.compressed_size > self._source.size:
            raise CorruptArchive(
                f"{called}: {record.compressed_size} bytes at byte {start}, the archive has {self._source.size}"
            )
        return start

    # Stored entries.

    def _read_tiny(self, record: Record, called: str, read: _Read) -> bytes:
        guess = _LOCAL.size + len(record.raw_name) + _EXTRA_GUESS + record.size
        block = self._read_header(record, guess, called, read)
        start = self._parse_local(record, block, called)
        skip = start - record.header_offset
        data = block[skip : skip + record.size]
        if len(data) < record.size:
            data = read(start, record.size)
        if self._verify != "off":
            check_crc(record, zlib.crc32(data), called)
        return data

    def _must_check_first(self, record: Record) -> bool:
        if self._verified[record.ordinal] or self._verify == "off":
            return False
        # An entry's checksum is filled in last, so that zero mostly means that its writer did not get there.
        return self._verify == "all" or record.crc == 0

    def _check_stored(self, record: Record, start: int, called: str) -> None:
        def check() -> bool:
            crc = 0
            for chunk in read_chunks(self._sequential(record, start, called), 0, record.compressed_size):
                crc = zlib.crc32(chunk, crc)
            check_crc(record, crc, called)
            self._verified[record.ordinal] = 1
            return True

        self._flights.run(("check", record.ordinal), lambda: bool(self._verified[record.ordinal]) or None, check)

    def _first_read_check(self, record: Record) -> Callable[[], None] | None:
        """What to call once the first read has checked the entry; None where it need not."""
        if self._verify == "off" or record.size > _CHECKED_BYTES or self._verified[record.ordinal]:
            return None
        return lambda: self._verified.__setitem__(record.ordinal, 1)

    # Compressed entries.

    def _decoded_copy(self, record: Record, start: int, called: str) -> ByteSource:
        key = (self._owner, record.ordinal)

        def ready() -> ByteSource | None:
            if record.size > _SMALL_BYTES:
                return self._spool.get(key, name=called)
            data = self._small.get(record.ordinal)
            return None if data is None else MemorySource(called, data)

        def decode() -> ByteSource:
            source = self._sequential(record, start, called)
            compressed = read_chunks(source, 0, record.compressed_size)
            chunks = decoded_chunks(record, compressed, called)
            if record.size > _SMALL_BYTES:
                return self._spool.put(key, record.size, chunks, name=called)
            data = b"".join(chunks)
            self._small.put(record.ordinal, data)
            return MemorySource(called, data)

        return self._flights.run(("decode", record.ordinal), ready, decode)

    # Symbolic links.

    def _add_links(self) -> None:
        pending = self._directory.pending_links
        if pending:
            self._directory.add_links(
                (ordinal, self._link_text(ordinal) if count < _MAX_LINKS else None)
                for count, ordinal in enumerate(pending)
            )

    def _link_text(self, ordinal: int) -> bytes | None:
        """Where a link leads; None where that cannot be read, which leaves out the link and nothing else."""
        try:
            record = self._directory.record(ordinal)
            return self._read_whole(record, "a symbolic link") if record.size <= _LINK_BYTES else None
        except (Corrupt, UnsupportedFormat):
            return None


class _SmallCache:
    """The decoded entries used last, bounded by their bytes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, bytes] = OrderedDict()
        self._used_bytes = 0

    def get(self, ordinal: int) -> bytes | None:
        with self._lock:
            data = self._entries.get(ordinal)
            if data is not None:
                self._entries.move_to_end(ordinal)
            return data

    def put(self, ordinal: int, data: bytes) -> None:
        with self._lock:
            if ordinal not in self._entries:
                self._entries[ordinal] = data
                self._used_bytes += len(data)
            while self._used_bytes > self._limit_bytes:
                self._used_bytes -= len(self._entries.popitem(last=False)[1])


class _Flight:
    """Work under way, for others to wait for."""

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: DafmountError | OSError | None = None


class _Flights:
    """Does a piece of work once however many threads ask for it at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, _Flight] = {}

    def run(self, key: Hashable, ready: Callable[[], T | None], make: Callable[[], T]) -> T:
        """What `ready` has, else what `make` makes; the error of the thread that works is raised in those that wait.

        `ready` is called with a lock held and must not block; it is asked again after waiting, as what was made may be
        gone again.
        """
        while True:
            with self._lock:
                found = ready()
                if found is not None:
                    return found
                flight = self._under_way.get(key)
                mine = flight is None
                if flight is None:
                    flight = self._under_way[key] = _Flight()
            if mine:
                return self._work(key, flight, make)
            flight.done.wait()
            if flight.error is not None:
                raise flight.error

    def _work(self, key: Hashable, flight: _Flight, make: Callable[[], T]) -> T:
        try:
            return make()
        except (DafmountError, OSError) as error:
            flight.error = error
            raise
        finally:
            with self._lock:
                del self._under_way[key]
            flight.done.set()
