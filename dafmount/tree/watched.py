"""An archive that remembers what it was asked for: when last, and which directories it listed and how.

Knows neither the tree nor Daf. Threads may share it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dafmount.errors import NotFound
from dafmount.source.base import Archive, ByteSource, Entry, Stamp


class Watched:
    """An Archive in front of another."""

    def __init__(self, archive: Archive, *, remembers_listings: bool) -> None:
        """Listings are worth remembering where the archive's entries change one by one."""
        self.archive = archive
        self.used_s = time.monotonic()
        """When it was last asked for anything, by the monotonic clock."""
        self._remembers_listings = remembers_listings
        self._listings: dict[str, list[Entry] | None] = {}

    @property
    def name(self) -> str:
        """What messages call it."""
        return self.archive.name

    @property
    def mtime_ns(self) -> int:
        """The archive's own time."""
        return self.archive.mtime_ns

    def listdir(self, path: str) -> list[Entry]:
        """See Archive; the first answer is what `lists_the_same` compares with."""
        self.used_s = time.monotonic()
        if not self._remembers_listings:
            return self.archive.listdir(path)
        try:
            entries = self.archive.listdir(path)
        except NotFound:
            self._listings.setdefault(path, None)
            raise
        self._listings.setdefault(path, entries)
        return entries

    def open(self, path: str) -> ByteSource:
        """See Archive."""
        self.used_s = time.monotonic()
        return self.archive.open(path)

    def open_nowait(self, path: str) -> ByteSource | None:
        """See Archive."""
        self.used_s = time.monotonic()
        return self.archive.open_nowait(path)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """See Archive."""
        self.used_s = time.monotonic()
        return self.archive.read_small(path, limit_bytes)

    def expect(self, paths: Sequence[str]) -> None:
        """See Archive."""
        self.archive.expect(paths)

    def stamp(self, path: str = "") -> Stamp:
        """See Archive."""
        return self.archive.stamp(path)

    def close(self) -> None:
        """See Archive."""
        self.archive.close()

    def lists_the_same(self) -> bool:
        """Whether every directory that was listed would be listed as it was; raises NotFound where the root is gone."""
        return all(self._listed_now(path) == entries for path, entries in list(self._listings.items()))

    def _listed_now(self, path: str) -> list[Entry] | None:
        try:
            return self.archive.listdir(path)
        except NotFound:
            if not path:
                raise
            return None
