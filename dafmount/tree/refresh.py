"""Keeping the tree true while sources change: what was read is compared with what is there, the difference applied.

Owns units (the parts of a tree that change as one: an archive, a FilesDaf directory, a folder of archives), which are
open, and how a new state of a unit takes the place of an old one. Must not know FUSE: what the kernel has to forget is
handed out as numbers and names. `Unit.load` and `Unit.look` block and may run in any thread; everything else belongs to
the one thread that hands nodes to the kernel, so that no handler sees a change half done.

Files that stay the same keep their node, number and open contents; one that changed is another node with another
number. Directories keep theirs as long as there is a directory of the name.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from dafmount.errors import Corrupt, DafmountError, NotADaf, NotFound
from dafmount.source.base import Stamp
from dafmount.source.local import LocalDirectory
from dafmount.source.resolve import DAF_JSON, Resolved
from dafmount.source.zip import ZipArchive
from dafmount.tree.build import Plain, Style
from dafmount.tree.nodes import Directory, File, Loader, Node, OpenContents
from dafmount.tree.watched import Watched

log = logging.getLogger(__name__)

MAX_OPEN = 64
"""Units that stay open in a folder of archives; those used last."""

LASTING_S = 10.0
"""A source that cannot be read for so long is not just being written."""


class State(Protocol):
    """A source as it was at one time."""

    @property
    def used_s(self) -> float:
        """When something was last asked of it, by the monotonic clock."""

    @property
    def mtime_ns(self) -> int:
        """The source's own time."""

    def load(self, directory: Directory) -> dict[str, Node]:
        """The children of the unit's directory; blocks."""

    def is_current(self) -> bool:
        """Whether the source still is in this state; blocks. Raises NotFound where it is gone."""

    def keeps_files_of(self, older: State) -> bool:
        """Whether this came about from `older` without replacing the whole, so that files that look the same are."""

    def check_complete(self, older: State) -> None:
        """Raises Corrupt where a writer has not finished yet what it adds to `older`; blocks."""

    def may_be_under_way(self) -> bool:
        """Whether a source that cannot be read now is perhaps just being appended to, however long that takes."""

    def close(self) -> None:
        """Let go of descriptors; what was opened from it ends with SourceUnavailable."""


class ArchiveState:
    """A source that changes as a whole: a ZIP archive, or anything on a web server."""

    def __init__(self, resolved: Resolved, style: Style) -> None:
        self._archive = Watched(resolved.archive, remembers_listings=False)
        self._root = resolved.root
        self._stamp: Stamp | None = resolved.stamp
        self._style = style

    @property
    def used_s(self) -> float:
        """See State."""
        return self._archive.used_s

    @property
    def mtime_ns(self) -> int:
        """See State."""
        return self._archive.mtime_ns

    def load(self, directory: Directory) -> dict[str, Node]:
        """See State."""
        return Plain(self._archive, self._root, self._style).load(directory)

    def is_current(self) -> bool:
        """See State."""
        return self._stamp is None or self._archive.stamp() == self._stamp

    def keeps_files_of(self, older: State) -> bool:
        """See State."""
        archives = self._zips(older)
        if archives is None or not isinstance(older, ArchiveState) or self._stamp is None or older._stamp is None:
            return False
        newer_zip, older_zip = archives
        return self._stamp.identity == older._stamp.identity and newer_zip.continues(older_zip)

    def check_complete(self, older: State) -> None:
        """See State."""
        archives = self._zips(older)
        unfinished = archives[0].unfinished_since(archives[1]) if archives is not None else None
        if unfinished is not None:
            raise Corrupt(f"{self._archive.name}: {unfinished}: the entry is not completely written")

    def may_be_under_way(self) -> bool:
        """See State: as long as it is the same file."""
        return self._stamp is None or self._archive.stamp().identity == self._stamp.identity

    def close(self) -> None:
        """See State."""
        self._archive.close()

    def _zips(self, older: State) -> tuple[ZipArchive, ZipArchive] | None:
        if not isinstance(older, ArchiveState):
            return None
        newer_zip, older_zip = self._archive.archive, older._archive.archive
        if isinstance(newer_zip, ZipArchive) and isinstance(older_zip, ZipArchive):
            return newer_zip, older_zip
        return None


class DirectoryState:
    """A local directory whose files change one by one: a FilesDaf, or what `load_folder` makes of one that is none."""

    def __init__(self, path: str, style: Style, load_folder: FolderLoader | None, logged: set[str]) -> None:
        """Without `load_folder` only a FilesDaf will do. Raises NotFound, or the OSError.

        `logged` are links left out that need no log line any more.
        """
        self._path = path
        self._archive = Watched(LocalDirectory(path, logged=logged), remembers_listings=True)
        self._identity = self._archive.stamp().identity
        self._style = style
        self._load_folder = load_folder

    @property
    def used_s(self) -> float:
        """See State."""
        return self._archive.used_s

    @property
    def mtime_ns(self) -> int:
        """See State."""
        return self._archive.mtime_ns

    def load(self, directory: Directory) -> dict[str, Node]:
        """See State."""
        is_daf = any(entry.name == DAF_JSON and not entry.is_directory for entry in self._archive.listdir(""))
        if not is_daf and self._load_folder is not None:
            return self._load_folder(self._archive, self._path, directory)
        if not is_daf:
            raise NotADaf(f"{self._path}: not a Daf: the directory has no {DAF_JSON}")
        return Plain(self._archive, "", self._style).load(directory)

    def is_current(self) -> bool:
        """See State; the path may lead to another directory by now."""
        return self._archive.stamp().identity == self._identity and self._archive.lists_the_same()

    def keeps_files_of(self, older: State) -> bool:
        """See State: what of a file changes is in its own stamp."""
        return True

    def check_complete(self, older: State) -> None:
        """See State: whoever writes a file changes its stamp again."""

    def may_be_under_way(self) -> bool:
        """See State."""
        return False

    def close(self) -> None:
        """See State."""
        self._archive.close()


StateOpener: TypeAlias = Callable[[bool], State]
"""Opens the present state of a source; told whether it is known, so that nothing odd about it is logged again."""

FolderLoader: TypeAlias = Callable[[Watched, str, Directory], dict[str, Node]]
"""Makes the children of a directory that is no Daf, given its archive and its path."""


class Forget(NamedTuple):
    """What the kernel has to forget."""

    inodes: list[int]
    """Numbers of files whose bytes are another file's by now: data and attributes."""
    attributes: list[int]
    """Numbers of directories that have other attributes."""
    names: list[tuple[int, str]]
    """Number of a directory and a name in it that is new, gone, or means something else."""


@dataclass(slots=True)
class Plan:
    """The difference between a unit's tree as it is and as it should be. Made in any thread, applied in the tree's."""

    unit: Unit
    base: State
    """The state with which it begins; to any other it is not applied."""
    state: State | None
    """The new state; None where the source is gone."""
    is_spoiled: bool
    """Whether files that are open must fail: their archive is another."""
    grafts: list[tuple[Directory, Loader, dict[str, Node] | None]] = field(default_factory=list)
    """Directories that were looked into, and what they become; None: to be looked into again."""
    loaders: list[tuple[Directory, Loader]] = field(default_factory=list)
    """Directories that nobody looked into."""
    kept: list[tuple[File, File]] = field(default_factory=list)
    """Files that stay, and the equal ones that know how to open them in the new state."""
    retired: list[Node] = field(default_factory=list)
    names: list[tuple[Directory, str]] = field(default_factory=list)
    times: list[tuple[Directory, int]] = field(default_factory=list)
    """Directories that have another time, in nanoseconds."""

    def merge(self, old: Directory, loader: Loader, new: dict[str, Node]) -> None:
        """Plan that `old`, which was looked into, has the children `new`; loads what was looked into below it too."""
        before = old.loaded()
        after: dict[str, Node] = {}
        for name, node in new.items():
            was = before.get(name)
            if isinstance(was, Directory) and isinstance(node, Directory) and self._merge_directories(was, node):
                after[name] = was
            elif isinstance(was, File) and isinstance(node, File) and self._is_same(was, node):
                after[name] = was
                self.kept.append((was, node))
            else:
                after[name] = node
                self._changed(old, name, was)
        for name, was in before.items():
            if name not in new:
                self._changed(old, name, was)
        self.grafts.append((old, loader, after))

    def lose(self, old: Directory, loader: Loader) -> None:
        """Plan that nothing below `old` is left, and that whoever looks asks `loader`."""
        for name, was in old.loaded().items():
            self._changed(old, name, was)
        self.grafts.append((old, loader, None))

    def _merge_directories(self, was: Directory, node: Directory) -> bool:
        """Whether `was` stays; it goes where whoever follows it has nothing to do with whoever would follow `node`."""
        stays = was.unit == node.unit
        if stays and was.mtime_ns != node.mtime_ns:
            self.times.append((was, node.mtime_ns))
        if was.unit is not None or node.unit is not None:
            return stays
        if was.is_loaded:
            try:
                children = node.loader(was)
            except (DafmountError, OSError):
                self.lose(was, node.loader)  # which tells whoever looks
            else:
                self.merge(was, node.loader, children)
        else:
            self.loaders.append((was, node.loader))
        return True

    def _is_same(self, was: File, node: File) -> bool:
        if self.is_spoiled or was.identity is None or was.identity != node.identity:
            return False
        return was.is_executable == node.is_executable

    def _changed(self, directory: Directory, name: str, was: Node | None) -> None:
        self.names.append((directory, name))
        if was is not None:
            self.retired.append(was)

    def apply(self, contents: OpenContents) -> Forget:
        """Put the new state into place, without waiting for anything."""
        unit, is_overtaken = self.unit, False
        if not unit.is_in(self.base):
            return Forget([], [], [])
        for old, new in self.kept:
            old.opener = new.opener
        for directory, loader, children in self.grafts:
            directory.graft(loader, children)
        for directory, loader in self.loaders:
            is_overtaken |= not directory.graft_loader(loader)
        for directory, mtime_ns in self.times:
            directory.mtime_ns = mtime_ns
        unit.becomes(self.state, is_overtaken)
        inodes: list[int] = []
        for node in self.retired:
            for below in _all_below(node):
                self._retire(below, contents, inodes)
        attributes = [directory.number for directory, _ in self.times if directory.lookups]
        names = [(directory.number, name) for directory, name in self.names if directory.lookups]
        return Forget(inodes, attributes, names)

    def _retire(self, node: Node, contents: OpenContents, inodes: list[int]) -> None:
        if isinstance(node, Directory):
            if isinstance(node.unit, Unit):
                node.unit.close()
            node.graft(_nothing, {})
            return
        node.retire()
        if node.number:
            if self.is_spoiled:
                contents.spoil(node)
            else:
                contents.forget(node)
        if node.lookups:
            inodes.append(node.number)


def _all_below(node: Node) -> Iterator[Node]:
    """A node and all below it that is there, the lowest first."""
    if isinstance(node, Directory):
        for child in list(node.loaded().values()):
            yield from _all_below(child)
    yield node


def _nothing(directory: Directory) -> dict[str, Node]:
    return {}


class Unit:
    """A part of the tree that changes as one, below `directory`. It is opened when somebody looks into it."""

    def __init__(
        self, directory: Directory, key: Hashable, open_state: StateOpener, units: Units, name: str
    ) -> None:
        """Units with equal keys follow the same source. Messages call the source `name`."""
        self.directory = directory
        self.name = name
        self._key = key
        self._open_state = open_state
        self._units = units
        self._lock = threading.Lock()
        self._state: State | None = None
        self._seen_s = 0.0
        self._is_overtaken = False
        self._trouble_since_s: float | None = None
        """Since when the source cannot be read as it is now, by the monotonic clock."""
        self._is_reported = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unit) and other._key == self._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def used_s(self) -> float:
        """When it was last used, by the monotonic clock."""
        state = self._state
        return max(self._seen_s, state.used_s if state is not None else 0.0)

    def is_in(self, state: State) -> bool:
        """Whether this is the state it is in."""
        return self._state is state

    def seen(self) -> None:
        """It turned out to be in use."""
        self._seen_s = time.monotonic()

    def load(self, directory: Directory) -> dict[str, Node]:
        """The children of its directory; raises what opening and reading the source raises."""
        state = self._state
        if state is None:
            opened = self._open_state(False)
            with self._lock:
                if self._state is None:
                    self._state = opened
                state = self._state
            if state is not opened:
                opened.close()
            self._units.opened(self)
        return state.load(directory)

    def start(self, state: State) -> None:
        """Use a state that was opened already."""
        self._state = state
        self._units.opened(self)

    def look(self) -> Plan | None:
        """What to change because the source did; None for nothing, and while the source cannot be read."""
        state = self._state
        if state is None:
            return None
        try:
            plan = self._plan(state)
        except NotFound as error:
            return self._gone(state, error)
        except (DafmountError, OSError) as error:
            return self._troubled(state, error)
        self._is_well()
        return plan

    def becomes(self, state: State | None, is_overtaken: bool) -> None:
        """Take a new state, or none. `is_overtaken`: somebody looked into the old one meanwhile."""
        self._state = state
        self._is_overtaken = is_overtaken
        if state is None:
            self._units.closed(self)

    def close(self) -> None:
        """Forget the state; what is open from it stays usable, and it is opened anew when somebody looks again."""
        self.becomes(None, False)

    def _plan(self, state: State) -> Plan | None:
        if not self._is_overtaken and state.is_current():
            return None
        newer = self._open_state(True)
        keeps_files = newer.keeps_files_of(state)
        if keeps_files and not self._lasts():
            newer.check_complete(state)
        plan = Plan(self, state, newer, is_spoiled=not keeps_files)
        directory = self.directory
        # Each `self.load` is another object, which tells loads that are under way that they are too late.
        if directory.is_loaded:
            plan.merge(directory, self.load, newer.load(directory))
        else:
            plan.loaders.append((directory, self.load))
        if newer.mtime_ns != directory.mtime_ns:
            plan.times.append((directory, newer.mtime_ns))
        return plan

    def _gone(self, state: State, error: NotFound) -> Plan:
        # In a folder things come and go.
        level = logging.WARNING if self.directory.parent is None else logging.INFO
        log.log(level, "%s; nothing of it is shown until it is back", error)
        return self._lost(state)

    def _lost(self, state: State) -> Plan:
        self._trouble_since_s = None
        self._is_reported = False
        plan = Plan(self, state, None, is_spoiled=False)
        plan.lose(self.directory, self.load)
        return plan

    def _lasts(self) -> bool:
        return self._trouble_since_s is not None and time.monotonic() - self._trouble_since_s > LASTING_S

    def _troubled(self, state: State, error: Exception) -> Plan | None:
        """Show the old state for a while, or as long as somebody may be writing; else whoever looks gets the error."""
        if self._trouble_since_s is None:
            self._trouble_since_s = time.monotonic()
        if not self._lasts():
            return None
        try:
            is_under_way = state.may_be_under_way()
        except (DafmountError, OSError):
            return None
        if is_under_way:
            if not self._is_reported:
                self._is_reported = True
                log.warning("shown as it was before, for what it is now cannot be read: %s", error)
            return None
        log.warning("not shown any more, for what it is now cannot be read: %s", error)
        return self._lost(state)

    def _is_well(self) -> None:
        if self._is_reported:
            log.info("%s: can be read again", self.name)
        self._trouble_since_s = None
        self._is_reported = False


class Units:
    """The open units of a mount."""

    def __init__(self, max_open: int = MAX_OPEN) -> None:
        self._max_open = max_open
        self._lock = threading.Lock()
        self._open: dict[int, Unit] = {}

    def __iter__(self) -> Iterator[Unit]:
        with self._lock:
            return iter(list(self._open.values()))

    @property
    def is_crowded(self) -> bool:
        """Whether some should be closed."""
        return len(self._open) > self._max_open

    def opened(self, unit: Unit) -> None:
        """Count a unit in."""
        with self._lock:
            self._open[id(unit)] = unit

    def closed(self, unit: Unit) -> None:
        """Count a unit out."""
        with self._lock:
            self._open.pop(id(unit), None)

    def surplus(self) -> list[Unit]:
        """The units that were not used for longest, as many as are open beyond the limit; never the root's."""
        units = sorted((unit for unit in self if unit.directory.parent is not None), key=lambda unit: unit.used_s)
        return units[: max(0, len(self._open) - self._max_open)]


def close_unused(unit: Unit, contents: OpenContents) -> bool:
    """Close a unit, and drop its nodes; False, and nothing done, where the kernel knows any of them."""
    below = list(_all_below(unit.directory))
    if any(node.lookups for node in below):
        unit.seen()
        return False
    for node in below:
        if isinstance(node, File):
            node.retire()
            if node.number:
                contents.forget(node)
            continue
        if isinstance(node.unit, Unit):
            node.unit.close()
        if node is not unit.directory:
            node.graft(_nothing, {})
    unit.directory.graft(unit.load, None)
    return True
