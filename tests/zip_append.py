"""Appending to a ZIP archive in the order in which DataAxesFormats.jl does it, step by step. Imported by tests."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

_ALIGNMENT = 8
_ALIGN_EXTRA = 0xDAF1


class Append:
    """One entry to be appended: first `write_directory`, then `write_entry`; a reader may come at any time."""

    def __init__(self, path: Path, name: str, data: bytes) -> None:
        self._path = path
        whole = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            start, n_entries = archive.start_dir, len(archive.infolist())
        size = _directory_size(whole)
        self._start = -(-start // _ALIGNMENT) * _ALIGNMENT
        raw_name, crc = name.encode(), zlib.crc32(data)
        sizes = struct.pack("<2HQQ", 1, 16, len(data), len(data))
        pad = -(self._start + 30 + len(raw_name) + len(sizes) + 4) % _ALIGNMENT
        extra = sizes + struct.pack("<2H", _ALIGN_EXTRA, pad) + bytes(pad)
        fields = (45, 0x800, 0, 0, 33, crc, 0xFFFFFFFF, 0xFFFFFFFF, len(raw_name))
        self._entry = struct.pack("<4s5H3L2H", b"PK\3\4", *fields, len(extra)) + raw_name + extra + data
        central_extra = struct.pack("<2HQQQ", 1, 24, len(data), len(data), self._start)
        header = struct.pack(
            "<4s6H3L5H2L", b"PK\1\2", 45, *fields, len(central_extra), 0, 0, 0, 0, 0xFFFFFFFF
        )
        directory = whole[start : start + size] + header + raw_name + central_extra
        self._at = max(len(whole), self._start + len(self._entry))
        self._directory = directory + _end(self._at, len(directory), n_entries + 1)

    def write_directory(self) -> None:
        """The new directory, past the end of the archive and of the entry that is not there yet."""
        self._write(self._at, self._directory)

    def write_entry(self) -> None:
        """The entry, over the old directory."""
        self._write(self._start, self._entry)

    def _write(self, at: int, data: bytes) -> None:
        with self._path.open("r+b") as stream:
            stream.seek(at)
            stream.write(data)


def append(path: Path, name: str, data: bytes) -> None:
    """Both steps."""
    step = Append(path, name, data)
    step.write_directory()
    step.write_entry()


def _directory_size(whole: bytes) -> int:
    end = whole.rindex(b"PK\5\6")
    (size,) = struct.unpack_from("<L", whole, end + 12)
    if size != 0xFFFFFFFF:
        return int(size)
    return int(struct.unpack_from("<Q", whole, whole.rindex(b"PK\6\6") + 40)[0])


def _end(start: int, size: int, n_entries: int) -> bytes:
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, n_entries, n_entries, size, start)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, start + size, 1)
    return end64 + locator + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
