"""What makes a file or directory appear under its name at once, and stay there after a power cut.

Owns the system calls for that: fsync of files and directories, renames that refuse to replace or that exchange. Knows
nothing of formats. Any thread may call it.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_NOT_SUPPORTED = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What system calls answer when there is no room for what is written."""


def sync_file(path: Path) -> None:
    """A file's or directory's present state is on disk when this returns."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:  # some file systems sync no directories
            raise
    finally:
        os.close(fd)


def sync_tree(path: Path) -> None:
    """As `sync_file`, for everything below a directory and the directory itself."""
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            sync_file(Path(folder, name))
        sync_file(Path(folder))


def rename_new(source: Path, target: Path) -> None:
    """Give a file or directory a name that is free; FileExistsError where it is not."""
    if not _renameat2(source, target, _RENAME_NOREPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        os.rename(source, target)
    sync_file(target.parent)


def exchange(new: Path, old: Path, aside: Path) -> Path:
    """Put `new` in the place of `old`; where the old one is now: at `new`'s former name, or at `aside`.

    There is no moment without something of that name, except on file systems that cannot exchange.
    """
    if _renameat2(new, old, _RENAME_EXCHANGE):
        left = new
    else:
        os.rename(old, aside)
        try:
            os.rename(new, old)
        except OSError:
            os.rename(aside, old)
            raise
        left = aside
    sync_file(old.parent)
    return left


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """False where kernel, C library or file system have no such rename."""
    function = getattr(_libc(), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_SUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(source), None, str(target))


def default_mode(executable: bool) -> int:
    """The permissions that a new file (or directory, which is executable) gets from the process's umask."""
    mask = os.umask(0)
    os.umask(mask)
    return (0o777 if executable else 0o666) & ~mask
