"""What the rest of the program needs from a place where bytes lie.

Owns the two seams `ByteSource` and `Archive` and the values they exchange. Knows nothing of Daf. Implementations block,
may be used from several threads at once, and raise only errors from `dafmount.errors` (or the OSError of a local file).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, Protocol


class Range(NamedTuple):
    """Half-open byte range `[start, stop)`."""

    start: int
    stop: int


class Stamp(NamedTuple):
    """What tells two states of a file apart: equal stamps mean unchanged bytes.

    `identity` names the file itself (device and inode, or a validator such as an ETag), so that a file that only grew
    keeps its identity while one that was replaced does not.
    """

    identity: tuple[object, ...]
    size: int
    mtime_ns: int


class ByteSource(Protocol):
    """Random access to a sequence of bytes that does not change."""

    @property
    def name(self) -> str:
        """What messages call it, such as `cells.daf.zip: vectors/cell/age.data`."""

    @property
    def size(self) -> int:
        """Length in bytes; may have to ask the source."""

    @property
    def gap_bytes(self) -> int:
        """The largest gap between two wanted ranges that is cheaper to read than to skip."""

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes at `offset`; raises ShortRead where the source ends before."""

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """As `read`, but None where the bytes would have to be waited for (disk, network, a decoder)."""

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        """One `read` for each range, in their order; a source may fetch them at the same time."""

    def close(self) -> None:
        """Let go of descriptors and the like; a read in progress in another thread still ends well."""


class Filling(Protocol):
    """What a byte source may offer too: its bytes while they arrive, without copies."""

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        """Fills `buffer` with the bytes from `offset` on; `arrived` hears now and then how many of them are there."""


class Entry(NamedTuple):
    """One name in a directory of an archive."""

    name: str
    is_directory: bool
    size: int | None
    """Bytes when read; None where only asking the source would tell. 0 for a directory."""
    mtime_ns: int
    """Nanoseconds since 1970; the archive's own where the entry has none."""
    is_executable: bool = False
    """Whether its owner may run it, as far as the archive knows."""
    identity: Hashable = None
    """What tells two states of the entry apart: equal ones, of one archive as it goes on, mean unchanged bytes.

    A `Stamp` where the archive's entries change one by one; None where the archive cannot tell.
    """


class Archive(Protocol):
    """A tree of named byte sources. Paths are relative, `/`-separated, `''` for the root."""

    @property
    def name(self) -> str:
        """What messages call it: a file name, a directory or a URL without secrets."""

    @property
    def mtime_ns(self) -> int:
        """The archive's own time."""

    def listdir(self, path: str) -> list[Entry]:
        """The entries of a directory, in the archive's order; raises NotFound where there is no such directory."""

    def open(self, path: str) -> ByteSource:
        """The bytes of a file; raises NotFound, or Corrupt for a damaged entry."""

    def open_nowait(self, path: str) -> ByteSource | None:
        """As `open`, but None where something would have to be waited for.

        An archive whose entries change one by one gives None: their state would have to be asked for.
        """

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """A whole file of at most `limit_bytes`; raises Corrupt for a larger one."""

    def expect(self, paths: Sequence[str]) -> None:
        """Hear that these small files will be read soon, one by one; may fetch them now. Raises nothing."""

    def stamp(self, path: str = "") -> Stamp:
        """The present state of a file or directory, asked anew from the source.

        For an archive that is one file every path gives the stamp of that file.
        """

    def close(self) -> None:
        """Let go of what the archive holds open."""
