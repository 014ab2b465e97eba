"""A file system of empty names and a few bytes each, with nothing behind it: what pyfuse3 and the kernel take alone.

bare.py N_NAMES MOUNTPOINT: mounts one directory with so many names, and goes into the background.
"""

from __future__ import annotations

import os
import stat
import sys
import time
from typing import Any

import pyfuse3
import trio

ROOT, DIRECTORY, FIRST = 1, 2, 3
DATA = bytes(40)
KEPT_S = 3600.0


class Bare(pyfuse3.Operations):
    """A root, the directory `names` in it, and the files `0` to `N_NAMES - 1` there."""

    def __init__(self, n_names: int) -> None:
        super().__init__()
        self._n = n_names

    def _attributes(self, number: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = number
        entry.st_mode = stat.S_IFREG | 0o444 if number >= FIRST else stat.S_IFDIR | 0o555
        entry.st_size = len(DATA)
        entry.entry_timeout = entry.attr_timeout = KEPT_S
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: Any = None) -> pyfuse3.EntryAttributes:
        """By what the name says."""
        if parent == ROOT and name == b"names":
            return self._attributes(DIRECTORY)
        if parent == DIRECTORY and name.isdigit() and int(name) < self._n:
            return self._attributes(FIRST + int(name))
        raise pyfuse3.FUSEError(2)

    async def getattr(self, number: int, ctx: Any = None) -> pyfuse3.EntryAttributes:
        """The same for all files."""
        return self._attributes(number)

    async def opendir(self, number: int, ctx: Any) -> int:
        """The number is the handle."""
        return number

    async def readdir(self, handle: int, start: int, token: Any) -> None:
        """One name, or all."""
        if handle == ROOT:
            if start == 0:
                pyfuse3.readdir_reply(token, b"names", self._attributes(DIRECTORY), 1)
            return
        for k in range(start, self._n):
            if not pyfuse3.readdir_reply(token, b"%d" % k, self._attributes(FIRST + k), k + 1):
                return

    async def open(self, number: int, flags: int, ctx: Any) -> pyfuse3.FileInfo:
        """The number is the handle."""
        return pyfuse3.FileInfo(fh=number, keep_cache=True)

    async def read(self, handle: int, offset: int, length: int) -> bytes:
        """Zeros."""
        return DATA[offset : offset + length]


def main() -> int:
    """The exit code."""
    n_names, mountpoint = int(sys.argv[1]), sys.argv[2]
    if os.fork():
        end = time.monotonic() + 10
        while not os.path.ismount(mountpoint) and time.monotonic() < end:
            time.sleep(0.002)
        return 0 if os.path.ismount(mountpoint) else 1
    os.setsid()
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    pyfuse3.init(Bare(n_names), mountpoint, {"ro", "fsname=bare"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
