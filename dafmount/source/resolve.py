"""From what the user typed to an archive and the directory in it that is the data set.

Owns the spelling of sources (`x.daf`, `x.daf.zip`, `x.dafs.zip#/group`, and URLs of these) and the search for
`daf.json`; does not look into that file. The one place where a new kind of source is told from the others. Any thread
may call it.

Facts come from the ZipDaf documentation of DataAxesFormats.jl.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from dafmount.errors import GroupNotFound, NotADaf, NotFound, UsageError
from dafmount.source.base import Archive, Stamp
from dafmount.source.growing import GrowingFile
from dafmount.source.http_settings import HttpSettings
from dafmount.source.http_url import Url, is_url, parse_url, split_group, without_secrets
from dafmount.source.local import LocalDirectory, stamp_of
from dafmount.source.names import shown
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive

if TYPE_CHECKING:
    from dafmount.source.http import HttpDirectory, HttpSite

DAF_JSON = "daf.json"

_GROUP_MARK = "#/"
_MAX_LISTED = 20
_MAX_SEARCHED = 2_000
"""Directories of a folder in which data sets are looked for, before it is taken for granted that there are some."""

ARCHIVE_SUFFIXES = (".daf.zip", ".dafs.zip")
"""How archives in a folder are told from other files; a name alone decides."""
_MACOS_FOLDER = "__MACOSX"
"""Where the macOS Finder puts each file's resource fork, under the file's own name."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A source, opened."""

    archive: Archive
    root: str
    """The directory of the archive to show; '' is the archive's own root."""
    is_daf: bool
    """Whether `root` is a data set; else it holds several, as folders below it at any depth."""
    display: str
    """The source as an absolute path or a URL without secrets, with `#/` and the group where there is one."""
    stamp: Stamp | None = None
    """The state, before it was opened, of an archive that changes as a whole; None where it cannot be told."""


class Listed(Archive, Protocol):
    """A directory on a web server as an archive, which names its files."""

    listed: Stamp | None
    """The state in which it named them; see Resolved."""


def resolve(
    source: str,
    *,
    spool: Spool,
    verify: str = "auto",
    is_known: bool = False,
    http: HttpSettings | None = None,
    list_directory: Callable[[HttpDirectory], Listed] | None = None,
) -> Resolved:
    """Opens `source`; where it `is_known`, without logging again what is odd about it.

    Raises NotFound, GroupNotFound, NotADaf, EmptyFile, CorruptArchive, UnsupportedFormat, UsageError or the OSError. An
    existing path is taken as it is, even where it contains `#/`. A URL needs `http`, and one of a directory
    `list_directory` too, as a web server does not tell what is in it.
    """
    if is_url(source):
        if http is None:
            raise UsageError(f"{shown(without_secrets(source))}: a local path is expected here, not a URL")
        return _remote(source, spool, verify, http, list_directory, is_known)
    if "\0" in source or not source:
        raise UsageError(f"{shown(source)!r} is no path")
    path, group = _split(source)
    status = _status(path)
    if stat.S_ISDIR(status.st_mode):
        if group is not None:
            raise _no_groups(path)
        return _directory(path)
    if not stat.S_ISREG(status.st_mode):
        raise NotADaf(f"{shown(path)}: neither a directory nor a regular file")
    if group is not None and path.endswith(".daf.zip"):
        raise _no_groups(path)
    return _zip(path, group, spool, verify, stamp_of(status), is_known)


def daf_roots(archive: ZipArchive) -> list[str]:
    """Every directory of the archive that holds a daf.json, sorted; '' is the root. Lists no directory."""
    return [root for root in archive.directories_holding(DAF_JSON) if root.partition("/")[0] != _MACOS_FOLDER]


def _split(source: str) -> tuple[str, str | None]:
    """The path, and the group without `/` at its ends; no group where the whole of `source` exists."""
    if os.path.lexists(source):
        return source, None
    for path, group in _splits(source):
        if os.path.lexists(path):
            return path, _clean_group(source, group)
    return source.partition(_GROUP_MARK)[0], None


def _splits(source: str) -> Iterator[tuple[str, str]]:
    """All ways to split at a mark, the longest path first."""
    position = source.rfind(_GROUP_MARK)
    while position > 0:
        yield source[:position], source[position + len(_GROUP_MARK) :]
        position = source.rfind(_GROUP_MARK, 0, position)


def _clean_group(source: str, group: str) -> str:
    cleaned = group.strip("/")
    if not cleaned:
        raise UsageError(f"{shown(source)}: no group after {_GROUP_MARK}; leave it out to see all groups")
    return cleaned


def _status(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"{shown(path)}: no such file or directory") from error


def _no_groups(path: str) -> UsageError:
    return UsageError(f"{shown(path)}: only .dafs.zip archives have groups; leave out {_GROUP_MARK} and what follows")


def _display(path: str, group: str | None = None) -> str:
    absolute = os.path.abspath(path)
    return absolute if group is None else absolute + _GROUP_MARK + group


def _directory(path: str) -> Resolved:
    archive = LocalDirectory(path)
    is_daf = _has_marker(archive, "")
    if not is_daf and not _holds_data_sets(archive):
        raise NotADaf(f"{shown(path)}: not a Daf: the directory has no {DAF_JSON}, nor are there data sets below it")
    return Resolved(archive, "", is_daf, _display(path))


def _has_marker(archive: Archive, path: str) -> bool:
    return any(entry.name == DAF_JSON and not entry.is_directory for entry in archive.listdir(path))


def _holds_data_sets(archive: Archive) -> bool:
    """Whether there is a data set anywhere below; the search goes level by level and ends at the first one."""
    level = [""]
    searched = 0
    while level:
        below: list[str] = []
        for path in level:
            searched += 1
            if searched > _MAX_SEARCHED:
                return True
            try:
                entries = archive.listdir(path)
            except (NotFound, OSError):
                if not path:
                    raise
                continue  # gone meanwhile, or not ours to read
            for entry in entries:
                if entry.is_directory:
                    below.append(f"{path}/{entry.name}" if path else entry.name)
                elif entry.name == DAF_JSON or entry.name.endswith(ARCHIVE_SUFFIXES):
                    return True
        level = below
    return False


def _zip(path: str, group: str | None, spool: Spool, verify: str, stamp: Stamp, is_known: bool) -> Resolved:
    file = GrowingFile(path, path)
    archive = ZipArchive(file, path, file.mtime_ns, spool, verify=verify, on_directory=file.trust, is_known=is_known)
    try:
        root, is_daf = _root(path, group, daf_roots(archive))
    except Exception:
        archive.close()
        raise
    return Resolved(archive, root, is_daf, _display(path, group), stamp)


def _remote(
    source: str,
    spool: Spool,
    verify: str,
    settings: HttpSettings,
    list_directory: Callable[[HttpDirectory], Listed] | None,
    is_known: bool,
) -> Resolved:
    from dafmount.source.http import HttpDirectory, HttpSite  # local sources save the 0.1 s that it takes

    text, group = split_group(source)
    url = parse_url(text)
    if group is not None and url.path.endswith(".daf.zip"):
        raise _no_groups(url.shown)
    if group is not None or url.path.endswith(".zip"):
        return _remote_zip(url, group, HttpSite(url, settings, spool), verify, is_known)
    if list_directory is None:
        raise UsageError(f"{shown(url.shown)}: a directory on a web server cannot be read here")
    site = HttpSite(url, settings, spool)
    try:
        directory = HttpDirectory(site, url)
        archive = list_directory(directory)
        return Resolved(archive, "", True, directory.name, archive.listed)
    except NotADaf as error:
        site.close()
        if url.path.endswith(("/", ".daf")):
            raise
        try:
            return _remote_zip(url, group, HttpSite(url, settings, spool), verify, is_known)
        except (NotADaf, NotFound):
            raise error from None
    except Exception:
        site.close()
        raise


def _remote_zip(url: Url, group: str | None, site: HttpSite, verify: str, is_known: bool) -> Resolved:
    from dafmount.source.http import HttpFile

    file = HttpFile(site, url, url.shown, is_all=True)
    try:
        mtime_ns, stamp = file.mtime_ns, file.first_stamp
    except Exception:
        file.close()
        raise
    archive = ZipArchive(file, url.shown, mtime_ns, site.spool, verify=verify, is_known=is_known)
    try:
        root, is_daf = _root(url.shown, group, daf_roots(archive))
    except Exception:
        archive.close()
        raise
    return Resolved(archive, root, is_daf, url.shown if group is None else url.shown + _GROUP_MARK + group, stamp)


def _root(path: str, group: str | None, roots: list[str]) -> tuple[str, bool]:
    """The directory to show and whether it is a data set, of an archive that has data sets at `roots`."""
    if not roots:
        raise NotADaf(f"{shown(path)}: not a Daf: the archive has no {DAF_JSON}")
    if group is not None:
        if group not in roots:
            raise GroupNotFound(f"{shown(path)}: no group {shown(group)!r}; it has {_listed(roots)}")
        return group, True
    if "" in roots:
        return "", True
    if path.endswith(".dafs.zip"):
        return "", False
    if path.endswith(".daf.zip"):
        return _only_leading_folder(path, roots), True
    return (roots[0], True) if len(roots) == 1 else ("", False)


def _only_leading_folder(path: str, roots: list[str]) -> str:
    leading = [root for root in roots if "/" not in root]
    if len(leading) != 1:
        raise NotADaf(
            f"{shown(path)}: not a Daf: {DAF_JSON} is neither at the archive's root nor in one leading folder, "
            f"but in {_listed(roots)}; an archive of several is called .dafs.zip"
        )
    return leading[0]


def _listed(roots: list[str]) -> str:
    names = ", ".join(shown(root) for root in roots[:_MAX_LISTED] if root) or "none"
    more = len(roots) - _MAX_LISTED
    return names + (f" and {more} more" if more > 0 else "")
