"""A FUSE file system that mirrors a directory and gets stuck on demand, as a dead NFS server does.

    stuck_fs.py DIRECTORY MOUNTPOINT CONTROL

While the file CONTROL exists, each of its lines names files (by a part of their path) of which every request, but for
those about names and attributes, is held until the line or CONTROL is gone. How many are held is written to
CONTROL.held. Started by tests in a process of its own.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FUSEError, InodeT


class StuckFs(pyfuse3.Operations):
    """Inodes are paths, numbered as they are seen; nothing is cached by the kernel."""

    def __init__(self, root: str, control: Path) -> None:
        super().__init__()
        self._control = control
        self._paths = {pyfuse3.ROOT_INODE: root}
        self._numbers = {root: pyfuse3.ROOT_INODE}
        self._open: dict[int, str] = {}
        self._n_held = 0

    def _number(self, path: str) -> InodeT:
        number = self._numbers.setdefault(path, InodeT(len(self._numbers) + 1))
        self._paths[number] = path
        return number

    def _attributes(self, path: str) -> EntryAttributes:
        try:
            status = os.stat(path)
        except OSError as error:
            raise FUSEError(error.errno) from error
        entry = EntryAttributes()
        entry.st_ino = self._number(path)
        entry.st_mode, entry.st_size, entry.st_nlink = status.st_mode, status.st_size, 1
        entry.st_mtime_ns = entry.st_atime_ns = entry.st_ctime_ns = status.st_mtime_ns
        entry.entry_timeout = entry.attr_timeout = 0
        return entry

    async def _pass(self, path: str) -> None:
        if self._is_stuck(path):
            self._count(1)
            while self._is_stuck(path):
                await trio.sleep(0.05)
            self._count(-1)

    def _count(self, change: int) -> None:
        self._n_held += change
        beside = self._control.with_suffix(".tmp")
        beside.write_text(str(self._n_held))
        beside.rename(self._control.with_suffix(".held"))

    def _is_stuck(self, path: str) -> bool:
        try:
            parts = self._control.read_text().split()
        except FileNotFoundError:
            return False
        return any(part in path for part in parts)

    async def lookup(self, parent, name, ctx):
        return self._attributes(f"{self._paths[parent]}/{os.fsdecode(name)}")

    async def getattr(self, inode, ctx):
        return self._attributes(self._paths[inode])

    async def opendir(self, inode, ctx):
        return FileHandleT(inode)

    async def readdir(self, fh, start_id, token):
        await self._pass(self._paths[fh])
        names = sorted(os.listdir(self._paths[fh]))
        for position in range(start_id, len(names)):
            entry = self._attributes(f"{self._paths[fh]}/{names[position]}")
            if not pyfuse3.readdir_reply(token, os.fsencode(names[position]), entry, position + 1):
                return

    async def open(self, inode, flags, ctx):
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise FUSEError(errno.EROFS)
        await self._pass(self._paths[inode])
        file = os.open(self._paths[inode], os.O_RDONLY)
        self._open[file] = self._paths[inode]
        return FileInfo(fh=FileHandleT(file), direct_io=True)

    async def read(self, fh, off, size):
        await self._pass(self._open[fh])
        return os.pread(fh, size, off)

    async def flush(self, fh):
        await self._pass(self._open[fh])

    async def release(self, fh):
        del self._open[fh]
        os.close(fh)


def main(root: str, mountpoint: str, control: str) -> None:
    """Mount and serve until unmounted."""
    pyfuse3.init(StuckFs(root, Path(control)), mountpoint, {"ro", "fsname=stuck"})
    try:
        trio.run(lambda: pyfuse3.main(max_tasks=2000))
    finally:
        pyfuse3.close(unmount=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
