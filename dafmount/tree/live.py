"""The tree of a mount: one data set, an archive of several, or a folder in which there are some.

Owns how things in a folder are told apart and named; a name and what listing it tells decide, nothing is opened. Must
not know FUSE.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from dafmount.source.base import Entry
from dafmount.source.local import LocalDirectory
from dafmount.source.resolve import ARCHIVE_SUFFIXES, Resolved
from dafmount.tree.build import Plain, Style
from dafmount.tree.nodes import Directory, Node
from dafmount.tree.refresh import ArchiveState, DirectoryState, FolderLoader, StateOpener, Unit, Units
from dafmount.tree.watched import Watched


class Live(NamedTuple):
    """A tree, and the parts of it that are open."""

    root: Directory
    units: Units


Resolver: TypeAlias = Callable[[str, bool], Resolved]
"""Resolves a source; told whether it is known, see `dafmount.source.resolve`."""


def live_tree(resolved: Resolved, resolve: Resolver, style: Style) -> Live:
    """The tree of a source that was resolved; `resolve` does that again, also with archives in a folder."""
    units = Units()
    root = Directory("", None, resolved.archive.mtime_ns, _unset)
    source = resolved.display
    if isinstance(resolved.archive, LocalDirectory):
        folder = None if resolved.is_daf else Folder(resolve, style, units)
        load_folder = folder.load if folder is not None else None
        open_directory = _directory_opener(source, style, load_folder)
        unit = Unit(root, source, open_directory, units, source)
        unit.start(open_directory(False))
    else:
        unit = Unit(root, source, _archive_opener(source, style, resolve), units, source)
        unit.start(ArchiveState(resolved, style))
    root.loader, root.unit = unit.load, unit
    return Live(root, units)


class Folder:
    """Directories that are no data sets but may hold some, and archives among their files."""

    def __init__(self, resolve: Resolver, style: Style, units: Units) -> None:
        self._resolve = resolve
        self._style = style
        self._units = units

    def load(self, archive: Watched, path: str, directory: Directory) -> dict[str, Node]:
        """A folder's children: directories and archives as directories, opened when entered; files as they are."""
        plain = Plain(archive, "", self._style)
        entries = archive.listdir("")
        taken = {entry.name for entry in entries}
        children: dict[str, Node] = {}
        for entry in entries:
            full = f"{path.rstrip('/')}/{entry.name}"
            if entry.is_directory:
                children[entry.name] = self._directory(entry, entry.name, directory, full)
            elif entry.name.endswith(ARCHIVE_SUFFIXES):
                shown = entry.name.removesuffix(".zip")
                # What is called like that already keeps its name, and the archive its whole one.
                name = entry.name if shown in taken else shown
                children[name] = self._archive(entry, name, directory, full)
            else:
                children[entry.name] = plain.node(entry, directory)
        return children

    def _directory(self, entry: Entry, name: str, parent: Directory, path: str) -> Directory:
        return self._unit(entry, name, parent, path, _directory_opener(path, self._style, self.load))

    def _archive(self, entry: Entry, name: str, parent: Directory, path: str) -> Directory:
        return self._unit(entry, name, parent, path, _archive_opener(path, self._style, self._resolve))

    def _unit(
        self, entry: Entry, name: str, parent: Directory, path: str, open_state: StateOpener
    ) -> Directory:
        node = Directory(name, parent, entry.mtime_ns, _unset)
        unit = Unit(node, (path, entry.is_directory), open_state, self._units, path)
        node.loader, node.unit = unit.load, unit
        return node


def _directory_opener(path: str, style: Style, load_folder: FolderLoader | None) -> StateOpener:
    logged: set[str] = set()
    return lambda is_known: DirectoryState(path, style, load_folder, logged)


def _archive_opener(path: str, style: Style, resolve: Resolver) -> StateOpener:
    return lambda is_known: ArchiveState(resolve(path, is_known), style)


def _unset(directory: Directory) -> dict[str, Node]:
    raise AssertionError("a directory without a loader")
