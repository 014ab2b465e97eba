"""Exit codes, the same for every command: the one table from exceptions to codes."""

from __future__ import annotations

from dafmount.errors import (
    Corrupt,
    DestinationBusy,
    DestinationExists,
    EmptyFile,
    GroupNotFound,
    MountFailed,
    NoRoom,
    NotADaf,
    NotFound,
    SourceDenied,
    UnsupportedFormat,
    UsageError,
)

OK = 0
UNEXPECTED = 1
USAGE = 2
NOT_FOUND = 3
NOT_A_DAF = 4
UNSUPPORTED = 5
NO_SUCH_GROUP = 6
DAMAGED = 7
MOUNT_POINT = 8
EMPTY = 9
DENIED = 10
EXISTS = 11
NO_ROOM = 12
INTERRUPTED = 128
"""And the number of the signal, as the shell has it."""

_TABLE: tuple[tuple[type[Exception], int], ...] = (
    (UsageError, USAGE),
    (GroupNotFound, NO_SUCH_GROUP),
    (NotFound, NOT_FOUND),
    (FileNotFoundError, NOT_FOUND),
    (EmptyFile, EMPTY),
    (NotADaf, NOT_A_DAF),
    (UnsupportedFormat, UNSUPPORTED),
    (Corrupt, DAMAGED),
    (MountFailed, MOUNT_POINT),
    (DestinationExists, EXISTS),
    (DestinationBusy, EXISTS),
    (NoRoom, NO_ROOM),
    (SourceDenied, DENIED),
    (PermissionError, DENIED),
)

HELP = """exit codes:
  0  fine
  1  something unexpected
  2  the command line makes no sense
  3  the source does not exist
  4  the source is no Daf data set, or no ZIP archive
  5  a version or format that this release does not read
  6  the archive has no such group
  7  the archive is damaged or cut short
  8  the mount point cannot be used, or the mount was refused
  9  the source is empty (zero bytes)
 10  permission denied
 11  the destination exists already, or is being written to
 12  no room for the destination
130  interrupted (128 and the signal's number)"""


def exit_code(error: BaseException) -> int:
    """The code for an exception."""
    for kind, code in _TABLE:
        if isinstance(error, kind):
            return code
    return UNEXPECTED
