"""The entries of a ZIP archive as DataAxesFormats.jl writes them, and the records that end it.

Owns the bytes: STORED entries, ZIP64 everywhere, data at multiples of 8 by a padding field in the local header only,
fixed dates. Must not know where they go: it gets a seekable file that has nothing else in it, and may be told that this
file will stand at some offset of another one. Belongs to one thread.

Facts: ZipFormat documentation, PKWARE's APPNOTE (section numbers are given), archives that dafr wrote.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable
from typing import IO

from dafmount.errors import UsageError

try:  # many times as fast; has no wheels for some machines
    from isal.isal_zlib import crc32
except ImportError:
    from zlib import crc32

ALIGNMENT = 8
PADDING_ID = 0xDAF1

_VERSION = 45  # 4.4.3.2: ZIP64
_MADE_BY = 3 << 8 | 30  # UNIX, 3.0
_UTF8_FLAG = 0x0800
_DATE = 0x0021  # 1980-01-01, so that equal content gives equal bytes
_MODE = 0o100644 << 16
_SENTINEL_32 = 0xFFFFFFFF
_LOCAL = struct.Struct("<IHHHHHIIIHH")  # 4.3.7
_LOCAL_ZIP64 = struct.Struct("<HHQQ")  # 4.5.3
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")  # 4.3.12
_CENTRAL_ZIP64 = struct.Struct("<HHQQQ")
_END64 = struct.Struct("<IQHHIIQQQQ")  # 4.3.14
_LOCATOR = struct.Struct("<IIQI")  # 4.3.15
_END = struct.Struct("<IHHHHIIH")  # 4.3.16
_MAX_NAME_BYTES = 0xFFFF

END_BYTES = _END64.size + _LOCATOR.size + _END.size
COUNTS_OFFSET = 24
"""Where in the end records the counts, size and offset of the directory begin."""
OFFSET_OFFSET = COUNTS_OFFSET + 24
"""Where among them its offset stands."""

_CRC_POLYNOMIAL = 0xEDB88320


class ZipWriter:
    """Writes entries to `out` from its present start; their headers state offsets from `base` on.

    Takes about 100 bytes of memory an entry, for the directory.
    """

    def __init__(self, out: IO[bytes], base: int = 0) -> None:
        self._out = out
        self._base = base
        self._at = 0
        self._directory = bytearray()
        self._names: set[str] = set()

    @property
    def size(self) -> int:
        """Bytes of all entries."""
        return self._at

    @property
    def n_entries(self) -> int:
        """How many entries there are."""
        return len(self._names)

    @property
    def directory(self) -> bytes:
        """The central directory's lines for all entries."""
        return bytes(self._directory)

    def create(self, name: str) -> EntryFile:
        """A new entry, which must be closed before the next one. Its header is written when it is closed."""
        raw_name = name.encode("utf-8", "surrogateescape")
        if len(raw_name) > _MAX_NAME_BYTES:
            raise UsageError(f"{name[:80]}...: a ZIP entry's name has at most {_MAX_NAME_BYTES} bytes")
        assert name not in self._names
        self._names.add(name)
        unpadded = self._base + self._at + _LOCAL.size + len(raw_name) + _LOCAL_ZIP64.size
        padding = -unpadded % ALIGNMENT
        if 0 < padding < 4:  # a field has a head of four bytes
            padding += ALIGNMENT
        header_bytes = _LOCAL.size + len(raw_name) + _LOCAL_ZIP64.size + padding
        return EntryFile(self, self._out, raw_name, self._at, header_bytes, padding)

    def close_entry(self, raw_name: bytes, offset: int, size: int, crc: int, padding: int, header_bytes: int) -> None:
        """Called by an entry that is complete."""
        extra = _LOCAL_ZIP64.pack(1, 16, size, size)
        if padding:
            extra += struct.pack("<HH", PADDING_ID, padding - 4) + bytes(padding - 4)
        fields = (_VERSION, _UTF8_FLAG, 0, 0, _DATE, crc, _SENTINEL_32, _SENTINEL_32, len(raw_name), len(extra))
        self._out.seek(offset)
        self._out.write(_LOCAL.pack(0x04034B50, *fields) + raw_name + extra)
        self._at = offset + header_bytes + size
        self._out.seek(self._at)
        extra = _CENTRAL_ZIP64.pack(1, 24, size, size, self._base + offset)
        central = (_MADE_BY, _VERSION, _UTF8_FLAG, 0, 0, _DATE, crc, _SENTINEL_32, _SENTINEL_32, len(raw_name))
        self._directory += _CENTRAL.pack(0x02014B50, *central, len(extra), 0, 0, 0, _MODE, _SENTINEL_32)
        self._directory += raw_name + extra


class EntryFile:
    """One entry being written; see OutFile. Every byte must be written exactly once, in whatever order."""

    def __init__(
        self, writer: ZipWriter, out: IO[bytes], raw_name: bytes, offset: int, header_bytes: int, padding: int
    ) -> None:
        self._writer = writer
        self._out = out
        self._raw_name = raw_name
        self._offset = offset
        self._header_bytes = header_bytes
        self._padding = padding
        self._data_at = offset + header_bytes
        self._at = 0
        self._stretches = array("Q")
        """Start, length and CRC-32 of each stretch that was written without a seek."""
        self.seek(0)

    def write(self, data: bytes | memoryview, /) -> int:
        """See OutFile."""
        self._out.write(data)
        self._at += len(data)
        self._stretches[-2] += len(data)
        self._stretches[-1] = crc32(data, self._stretches[-1])
        return len(data)

    def seek(self, offset: int, /) -> int:
        """See OutFile."""
        self._out.seek(self._data_at + offset)
        self._at = offset
        self._stretches.extend((offset, 0, 0))
        return offset

    def tell(self) -> int:
        """See OutFile."""
        return self._at

    def close(self) -> None:
        """See OutFile."""
        numbers = self._stretches
        stretches = sorted(
            (start, length, crc)
            for start, length, crc in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
            if length
        )
        size, crc = join_crcs(stretches)
        self._writer.close_entry(self._raw_name, self._offset, size, crc, self._padding, self._header_bytes)


def join_crcs(stretches: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Length and CRC-32 of the bytes made of neighbouring stretches (start, length, CRC-32), the first at 0."""
    at = whole = 0
    for start, length, crc in stretches:
        if start != at:
            raise ValueError(f"bytes {at} to {start} were {'never written' if start > at else 'written twice'}")
        whole = crc if at == 0 else combine_crcs(whole, crc, length)
        at += length
    return at, whole


def combine_crcs(first: int, second: int, second_bytes: int) -> int:
    """The CRC-32 of two stretches, of which `second_bytes` is the length of the second.

    Polynomials over GF(2) modulo CRC-32's, bits reversed: the first is multiplied by x to the bits of the second.
    """
    power, square, n = 1 << 31, 1 << 23, second_bytes  # x^0, x^8
    while n:
        if n & 1:
            power = _multiply(power, square)
        square = _multiply(square, square)
        n >>= 1
    return _multiply(power, first) ^ second


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_CRC_POLYNOMIAL if b & 1 else 0)
    return product


def end_records(at: int, directory_offset: int, directory_bytes: int, n_entries: int, comment: bytes = b"") -> bytes:
    """ZIP64 end record, locator and end record, to stand at byte `at`."""
    end64 = (44, _MADE_BY, _VERSION, 0, 0, n_entries, n_entries, directory_bytes, directory_offset)
    end = (0, 0, 0xFFFF, 0xFFFF, _SENTINEL_32, _SENTINEL_32, len(comment))
    return (
        _END64.pack(0x06064B50, *end64)
        + _LOCATOR.pack(0x07064B50, 0, at, 1)
        + _END.pack(0x06054B50, *end)
        + comment
    )


def directory_counts(directory_offset: int, directory_bytes: int, n_entries: int) -> bytes:
    """The bytes of the end records from `COUNTS_OFFSET` on that say which directory counts."""
    return struct.pack("<QQQQ", n_entries, n_entries, directory_bytes, directory_offset)
