"""A local file that holds a ZIP archive to which others may append while it is read.

Owns the judgement whether a file that was written to still holds what was opened. Threads may share it; they may judge
the same twice.

Writers append in one of two ways. DataAxesFormats.jl first writes the new directory past the end, then the entry over
the old one, and fills in the checksum last; Info-ZIP and Python write the entry over the old directory, and a new one
when they are done. Both leave every finished entry where it is. Rewriting an archive in place does not, and must never
be taken for appending: a reader would get bytes of both.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from dafmount.errors import DafmountError, ShortRead, SourceChanged
from dafmount.source.base import Range, Stamp
from dafmount.source.local import LocalFile
from dafmount.source.names import shown
from dafmount.source.zip_directory import LOCAL_SIGNATURE, Record, ZipDirectory, read_directory

_LOCAL = struct.Struct("<4s5H3L2H")  # APPNOTE.TXT 4.3.7


class GrowingFile:
    """A byte source over a local ZIP archive, as long as it was when it was opened.

    Reads go on while the archive is only appended to. Once it was rewritten or cut, every read raises SourceChanged.
    """

    def __init__(self, path: str, name: str) -> None:
        """Opens `path`; raises as LocalFile does."""
        self._file = LocalFile(path, name, may_grow=False)
        self._directory: ZipDirectory | None = None
        self._refused: str | None = None
        """Why nothing is read any more."""

    @property
    def name(self) -> str:
        """What messages call it."""
        return self._file.name

    @property
    def size(self) -> int:
        """Length in bytes at the time of opening."""
        return self._file.size

    @property
    def mtime_ns(self) -> int:
        """Time of the last change before opening, nanoseconds since 1970."""
        return self._file.mtime_ns

    @property
    def gap_bytes(self) -> int:
        """See ByteSource."""
        return self._file.gap_bytes

    def trust(self, directory: ZipDirectory) -> None:
        """What the archive holds, to be compared with what it holds once it was written to."""
        self._directory = directory

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead, SourceChanged or the OSError."""
        try:
            return self._file.read(offset, length)
        except SourceChanged as error:
            return self._read_after_change(offset, length, error)

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None where the disk, or the archive's directory, would have to be asked."""
        try:
            return self._file.read_nowait(offset, length)
        except SourceChanged:
            return None

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """One read after the other."""
        return [self.read(start, stop - start) for start, stop in ranges]

    def stamp(self) -> Stamp:
        """The present state of whatever now has this file's path; raises NotFound, or the OSError."""
        return self._file.stamp()

    def close(self) -> None:
        """Lets go of the descriptor; reads in progress still end well."""
        self._file.close()

    def _read_after_change(self, offset: int, length: int, error: SourceChanged) -> bytes:
        """The bytes, if the file still holds them: first read, then judged, so that no change comes between."""
        directory = self._directory
        if directory is None:
            raise error
        if self._refused is not None:
            raise SourceChanged(self._refused) from error
        data = self._file.read_anyway(offset, length)
        now = self._file.present()
        verdict = self._judge(directory)
        if verdict is None:
            if not self._has_header(directory.record_at(offset)):
                raise error
        elif verdict:
            self._file.accept(now)
        else:
            self._refused = f"{shown(self.name)}: the archive was rewritten after it was opened"
            raise SourceChanged(self._refused) from error
        if len(data) != length:
            raise error
        return data

    def _judge(self, directory: ZipDirectory) -> bool | None:
        """Whether the archive was appended to and not rewritten; None while its directory cannot be read."""
        descriptor_path = f"/proc/self/fd/{self._file.fileno()}"
        try:
            present = LocalFile(descriptor_path, self.name)
            try:
                return directory.goes_on_in(read_directory(present, name=self.name, mtime_ns=present.mtime_ns))
            finally:
                present.close()
        except (DafmountError, OSError):
            return None

    def _has_header(self, record: Record | None) -> bool:
        """Whether the entry still begins as its directory says, with the same checksum.

        While somebody appends there may be no directory at all. An entry of the same name and checksum at the same
        place is the same entry.
        """
        if record is None or record.crc == 0:
            return False
        length = _LOCAL.size + len(record.raw_name)
        try:
            header = self._file.read_anyway(record.header_offset, length)
        except ShortRead:
            return False
        if len(header) != length:
            return False
        fields = _LOCAL.unpack_from(header)
        return (fields[0], fields[6], header[_LOCAL.size :]) == (LOCAL_SIGNATURE, record.crc, record.raw_name)
