"""From the destination's name to a sink: what is written, whether it may be, and what it replaces.

Owns the spelling of destinations and the rules for what `overwrite` may replace. Any thread may call it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dafmount.daf.files_layout import MARKER, METADATA, SECTIONS
from dafmount.errors import DestinationExists, NotFound, UsageError
from dafmount.pack.append import AppendSink
from dafmount.pack.directory_sink import DirectorySink
from dafmount.pack.sink import Sink
from dafmount.pack.zip_sink import ZipSink
from dafmount.source.local import LocalFile
from dafmount.source.names import shown
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive

_GROUP_MARK = ".dafs.zip#/"
_COMPONENT_BYTES = 255


@dataclass(frozen=True, slots=True)
class Destination:
    """What to write where."""

    kind: Literal["directory", "archive", "group"]
    path: Path
    """Absolute, links followed."""
    group: str
    """Without `/` at its ends; '' unless `kind` is "group"."""

    @property
    def display(self) -> str:
        """What messages call it."""
        return shown(f"{self.path}#/{self.group}" if self.group else str(self.path))


def parse_destination(text: str) -> Destination:
    """`x.daf.zip` is an archive, `x.dafs.zip#/group` a group of one, any other name without `.zip` a directory.

    Raises UsageError, or NotFound where the parent directory is missing.
    """
    if "://" in text:
        raise UsageError(f"{shown(text)}: cannot be written to, expected a path")
    if not text or "\0" in text:
        raise UsageError(f"{shown(text)!r} is no path")
    before, mark, group = text.rpartition(_GROUP_MARK)
    if mark:
        return Destination("group", _real(before + ".dafs.zip"), _checked_group(text, group))
    if "#/" in text and ".zip#/" in text:
        raise UsageError(f"{shown(text)}: only .dafs.zip archives have groups")
    path = text.rstrip("/")
    if path.endswith(".dafs.zip"):
        raise UsageError(f"{shown(text)}: which group? Write it as {shown(path)}#/group")
    if path.endswith(".daf.zip"):
        return Destination("archive", _real(path), "")
    if path.endswith(".zip"):
        raise UsageError(f"{shown(text)}: name an archive .daf.zip, or one of several data sets .dafs.zip#/group")
    return Destination("directory", _real(path or "/"), "")


def _checked_group(text: str, group: str) -> str:
    group = group.strip("/")
    for part in group.split("/"):
        if part in ("", ".", "..") or part in SECTIONS or len(os.fsencode(part)) > _COMPONENT_BYTES:
            raise UsageError(f"{shown(text)}: {shown(part)!r} is no name for a group")
    return group


def _real(path: str) -> Path:
    real = Path(os.path.realpath(path))
    if not real.parent.is_dir():
        raise NotFound(f"{shown(str(real.parent))}: no such directory to write to")
    return real


def check_apart(destination: Destination, source: Path) -> None:
    """Raises UsageError where one lies within the other: what is replaced must not take the source along."""
    real = Path(os.path.realpath(source))
    if destination.path != real and (destination.path in real.parents or real in destination.path.parents):
        raise UsageError(f"{destination.display}: the source lies within the destination, or the other way round")


def check_free(destination: Destination, *, overwrite: bool) -> None:
    """Raises DestinationExists, or UsageError for what `overwrite` does not replace."""
    path, display = destination.path, destination.display
    if destination.kind == "group":
        if path.exists():
            _check_group_free(destination, overwrite=overwrite)
        return
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise DestinationExists(f"{display}: exists already; --overwrite replaces it")
    if destination.kind == "archive":
        if not path.is_file():
            raise DestinationExists(f"{display}: is no file; it is not replaced")
    elif not path.is_dir() or os.path.ismount(path):
        raise DestinationExists(f"{display}: is no plain directory; it is not replaced")
    elif not (path / MARKER).is_file() and any(path.iterdir()):
        raise DestinationExists(f"{display}: is a directory but no Daf data set; it is not replaced")


def _check_group_free(destination: Destination, *, overwrite: bool) -> None:
    name = str(destination.path)
    file = LocalFile(name, name)
    archive = ZipArchive(file, name, file.mtime_ns, Spool())
    try:
        taken = {entry.name for entry in archive.listdir(destination.group)} & {MARKER, METADATA, *SECTIONS}
    except NotFound:
        return
    finally:
        archive.close()
    if taken and overwrite:
        raise UsageError(f"{destination.display}: exists already; archives are append-only, groups are not replaced")
    if taken:
        raise DestinationExists(f"{destination.display}: exists already")


def open_sink(destination: Destination, *, overwrite: bool) -> Sink:
    """The sink for a destination that `check_free` has found free."""
    if destination.kind == "directory":
        return DirectorySink(destination.path, overwrite=overwrite)
    if destination.kind == "archive":
        return ZipSink(destination.path, "", overwrite=overwrite)
    prefix = destination.group + "/"
    if destination.path.exists():
        return AppendSink(destination.path, prefix)
    return ZipSink(destination.path, prefix, overwrite=False)
