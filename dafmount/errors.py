"""The errors this package raises on purpose; imports nothing.

Every message names what was being read, where in it, what was found and what was expected, in one line. The table that
turns these into errno values is in `mount/errno_map.py`; the one that turns them into exit codes is in `cli/exits.py`.
"""


class DafmountError(Exception):
    """Base of every error that this package raises on purpose."""


class NotFound(DafmountError):
    """There is no such file, directory, property or group."""


class GroupNotFound(NotFound):
    """The archive has no such group; the message lists those it has."""


class NotADaf(DafmountError):
    """The source exists and is readable but is no Daf data set, or not a ZIP archive at all."""


class EmptyFile(NotADaf):
    """The source is a file of zero bytes."""


class UnsupportedFormat(DafmountError):
    """A version, codec or ZIP method that this release does not read."""


class Corrupt(DafmountError):
    """What was read contradicts the format or itself."""


class CorruptArchive(Corrupt):
    """A ZIP archive whose directory is damaged, cut short, or contradicts its entries."""


class CorruptDescriptor(Corrupt):
    """A descriptor (JSON) that is malformed or contradicts the data it describes."""


class CorruptShard(Corrupt):
    """A packed shard whose directory, index or chunk is damaged."""


class ShortRead(Corrupt):
    """A source held fewer bytes than its size promised."""


class SourceFault(DafmountError):
    """The source, not what is in it, kept something from being read; another time it may be read."""


class SourceChanged(SourceFault):
    """What is being read was replaced or altered since it was opened."""


class SourceDenied(SourceFault):
    """The source refuses to be read with the rights at hand."""


class SourceTimeout(SourceFault):
    """The source did not answer within the time allowed."""


class SourceUnavailable(SourceFault):
    """The source cannot be reached, or gave up after the retries allowed."""


class SpoolFull(DafmountError):
    """A compressed entry does not fit within the spool's limit or its disk."""


class UsageError(DafmountError):
    """The command line or an option's value makes no sense."""


class MountFailed(DafmountError):
    """The mount point cannot be used, or the kernel or fusermount3 refused the mount."""


class DestinationExists(DafmountError):
    """What is to be written exists already."""


class DestinationBusy(DafmountError):
    """Another process is writing to the destination."""


class NoRoom(DafmountError):
    """The destination's disk is full, or a quota or a limit of the file system is reached."""
