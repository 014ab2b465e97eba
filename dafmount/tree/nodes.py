"""The nodes of a mounted tree: directories, files, and the numbers by which the kernel knows them.

Owns names, inode numbers, sizes and times, and which contents are open. Must not know FUSE nor what a Daf is.
Children of a directory are made when first asked for, by its loader; two threads that ask at once may both load, and
one result is kept. A file never changes: what stands behind a name is replaced by another file with another number, and
the old one is retired.

An inode number is a hash of the path, so that it stays the same from mount to mount.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from dafmount.errors import SourceChanged
from dafmount.tree.content import Content

log = logging.getLogger(__name__)

ROOT_NUMBER = 1

_BATCH = 1 << 14
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
"""2^64 divided by the golden ratio, odd: it spreads neighbours."""
_HALF = np.uint64(32)

_serials = count(1)
_graft = threading.Lock()
"""Held while children take their place, so that none that an old loader made does so after a new one was set."""


class Opener(Protocol):
    """Makes the content of a file."""

    def open(self, file: File) -> Content:
        """The bytes; may block."""

    def open_nowait(self, file: File) -> Content | None:
        """As `open`, or None where something would have to be waited for."""


@runtime_checkable
class Described(Protocol):
    """An opener that can say more of a file than its bytes do."""

    def attribute_names(self, file: File) -> Sequence[str]:
        """The names of its extended attributes; never blocks."""

    def attributes(self, file: File) -> Mapping[str, bytes]:
        """Name -> value, for those that can be told; may block, and raise as `open` does."""


class File:
    """A regular file. `size` is None until something asks for it that is worth the answer; see `exact_size`.

    `identity` tells two states of what has this name apart: equal ones, other than None, mean unchanged bytes.
    """

    __slots__ = (
        "_serial", "identity", "is_executable", "lookups", "mtime_ns", "name", "number", "opener", "parent", "size",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        parent: Directory,
        size: int | None,
        mtime_ns: int,
        opener: Opener,
        is_executable: bool = False,
        identity: Hashable = None,
    ) -> None:
        self.name = name
        self.parent = parent
        self.size = size
        self.mtime_ns = mtime_ns
        self.opener = opener
        self.is_executable = is_executable
        self.identity = identity
        self.number = 0
        self.lookups = 0
        self._serial = 0

    @property
    def path(self) -> str:
        """The path below the mount's root."""
        return join(self.parent.path, self.name)

    @property
    def serial(self) -> int:
        """A number that no other file ever has, whatever its name: decoded chunks are kept under it."""
        if not self._serial:
            self._serial = next(_serials)
        return self._serial

    @property
    def is_retired(self) -> bool:
        """Whether something else, or nothing, stands behind its name by now."""
        return self.opener is _RETIRED

    def retire(self) -> None:
        """From now on it is not opened any more; contents that are open stay so."""
        self.opener = _RETIRED


class _Retired:
    def open(self, file: File) -> Content:
        raise SourceChanged("replaced or removed since it was looked up")

    def open_nowait(self, file: File) -> Content | None:
        return self.open(file)


_RETIRED = _Retired()


class Directory:
    """A directory whose children are loaded on first access.

    `unit` is whoever follows the changes of everything below, where that is not who follows those of the parent.
    """

    __slots__ = ("_children", "loader", "lookups", "mtime_ns", "name", "number", "parent", "unit")

    def __init__(
        self, name: str, parent: Directory | None, mtime_ns: int, loader: Loader, unit: object | None = None
    ) -> None:
        self.name = name
        self.parent = parent
        self.mtime_ns = mtime_ns
        self.loader = loader
        self.unit = unit
        self.number = ROOT_NUMBER if parent is None else 0
        self.lookups = 0
        self._children: dict[str, Node] | None = None

    @property
    def path(self) -> str:
        """The path below the mount's root, `''` for the root."""
        return "" if self.parent is None else join(self.parent.path, self.name)

    @property
    def is_loaded(self) -> bool:
        """Whether `children` answers without waiting."""
        return self._children is not None

    def children(self) -> Mapping[str, Node]:
        """Name -> node; the first call may block and raise what the loader raises."""
        children = self._children
        while children is None:
            loader = self.loader
            loaded = loader(self)
            with _graft:
                # Whoever was first has perhaps shown its nodes to the kernel already.
                if self._children is None and self.loader is loader:
                    self._children = loaded
                children = self._children
        return children

    def loaded(self) -> Mapping[str, Node]:
        """The children that are here now; none where they were not asked for yet."""
        return self._children or {}

    def graft(self, loader: Loader, children: dict[str, Node] | None) -> None:
        """Another loader, and what it made; None where it is to be asked when somebody looks."""
        with _graft:
            self.loader = loader
            self._children = children

    def graft_loader(self, loader: Loader) -> bool:
        """Another loader for a directory that nobody has looked into; False, and nothing done, where somebody has."""
        with _graft:
            if self._children is not None:
                return False
            self.loader = loader
            return True


Node: TypeAlias = File | Directory
Loader: TypeAlias = Callable[[Directory], dict[str, Node]]


def join(parent: str, name: str) -> str:
    """A path below the root, which is `''`."""
    return f"{parent}/{name}" if parent else name


class NodeTable:
    """Which node has which inode number, for nodes that the kernel knows. Used from one thread but for `held`."""

    def __init__(self, root: Directory) -> None:
        self._nodes: dict[int, Node] = {ROOT_NUMBER: root}
        self._held: dict[int, int] = {}
        """Numbers that are not to be given to others, and by how many."""
        self._holding = threading.Lock()
        root.lookups = 1

    def __getitem__(self, number: int) -> Node:
        """The node; KeyError for a number that the kernel cannot know."""
        return self._nodes[number]

    def __len__(self) -> int:
        return len(self._nodes)

    def number(self, node: Node) -> int:
        """The node's inode number, given now if it has none: to all of its directory, which costs little more."""
        if not node.number:
            assert node.parent is not None
            siblings = node.parent.loaded()
            # What was replaced meanwhile is no longer among them.
            nodes = list(siblings.values()) if siblings.get(node.name) is node else [node]
            self._give_numbers(self.number(node.parent), nodes)
        return node.number

    def remember(self, node: Node) -> int:
        """Count one lookup; the node stays known until it is forgotten as often."""
        number = node.number or self.number(node)
        if node.lookups == 0:
            self._nodes[number] = node
        node.lookups += 1
        return number

    def forget(self, number: int, count: int) -> None:
        """Take back `count` lookups."""
        node = self._nodes.get(number)
        if node is None:
            return
        node.lookups = max(0, node.lookups - count)
        if node.lookups == 0 and number != ROOT_NUMBER:
            del self._nodes[number]

    @contextmanager
    def held(self, file: File) -> Iterator[bool]:
        """Meanwhile no other file gets this one's number; gives whether nothing else stands for it yet. Any thread.

        What is asked after the number was held and before another could get it, which is retired first, is true.
        """
        number = file.number
        with self._holding:
            self._held[number] = self._held.get(number, 0) + 1
        try:
            yield not file.is_retired
        finally:
            with self._holding:
                self._held[number] -= 1
                if not self._held[number]:
                    del self._held[number]

    def _give_numbers(self, parent: int, nodes: Sequence[Node]) -> None:
        """Numbers for those of some nodes of one directory that have none; `parent` is the directory's number."""
        new = [node for node in nodes if not node.number]
        numbers: list[int] = []
        for first in range(0, len(new), _BATCH):
            numbers += _hashes(parent, [node.name for node in new[first : first + _BATCH]])
        is_taken = not (self._nodes.keys().isdisjoint(numbers) and self._held.keys().isdisjoint(numbers))
        if is_taken or len(set(numbers)) < len(numbers):
            numbers = self._without_doubles(numbers)
        for node, number in zip(new, numbers, strict=True):
            node.number = number

    def _without_doubles(self, numbers: Sequence[int]) -> list[int]:
        """Numbers of which none is given yet nor given twice."""
        given: dict[int, None] = {}
        for number in numbers:
            while number in given or number in self._nodes or number in self._held:
                number = (number + 4) & 0xFFFFFFFFFFFFFFFF
            given[number] = None
        return list(given)


def _hashes(seed: int, names: Sequence[str]) -> list[int]:
    """A number of 64 bits for each name, all at once, eight bytes of each at a time; never 0 nor the root's."""
    padded = np.array([name.encode("utf-8", "surrogateescape") for name in names], np.bytes_)
    words = padded.astype(f"S{-(-padded.itemsize // 8) * 8}").view("<u8").reshape(len(names), -1)
    hashes = np.full(len(names), seed, np.uint64)
    for word in words.T:
        mixed = (hashes ^ word) * _MULTIPLIER
        # No name holds a zero byte: a word of them is padding, of which longer names around here have less.
        hashes = np.where(word != 0, mixed ^ (mixed >> _HALF), hashes)
    numbers: list[int] = (hashes | np.uint64(2)).tolist()
    return numbers


class OpenContents:
    """Contents of files in use, and of some lately used ones, so that opening a file again costs nothing.

    Threads share it; nothing blocks while its lock is held.
    """

    def __init__(self, idle_limit: int) -> None:
        self._idle_limit = idle_limit
        self._lock = threading.Lock()
        self._used: dict[int, tuple[Content, int]] = {}
        self.n_opened = 0
        """How often a file was opened so far."""
        self._idle: OrderedDict[int, Content] = OrderedDict()
        self._to_close: queue.SimpleQueue[Content] = queue.SimpleQueue()
        self._closer: threading.Thread | None = None
        self._opened_at_once: set[int] = set()
        """Numbers of the files whose contents were opened without waiting: they are closed without waiting, too."""

    def acquire(self, file: File) -> Content:
        """The file's content, opened if it is not; may block. Every call wants a `release`."""
        number = file.number
        content = self._take(number)
        if content is not None:
            return content
        return self._used_first(number, file.opener.open(file))

    def acquire_nowait(self, file: File) -> Content | None:
        """As `acquire`, but None where something would have to be waited for."""
        content = self._take(file.number)
        if content is not None:
            return content
        opened = file.opener.open_nowait(file)
        if opened is None:
            return None
        content = self._used_first(file.number, opened)
        if content is opened:
            self._opened_at_once.add(file.number)
        return content

    def opened(self, file: File) -> Content:
        """The content of a file that the caller has acquired."""
        return self._used[file.number][0]

    def release(self, file: File) -> None:
        """One user less; the content is kept for a while."""
        surplus: list[tuple[int, Content]] = []
        with self._lock:
            content, users = self._used[file.number]
            if users > 1:
                self._used[file.number] = (content, users - 1)
                return
            del self._used[file.number]
            if file.is_retired:
                surplus.append((file.number, content))
            else:
                self._idle[file.number] = content
            while len(self._idle) > self._idle_limit:
                surplus.append(self._idle.popitem(last=False))
        for number, content in surplus:
            self._close(number, content)

    def forget(self, file: File) -> None:
        """Do not keep an idle content of this file."""
        with self._lock:
            content = self._idle.pop(file.number, None)
        if content is not None:
            self._close(file.number, content)

    def drop_idle(self) -> None:
        """Close all that nobody uses; may block."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for number, content in idle.items():
            self._opened_at_once.discard(number)
            content.close()

    def spoil(self, file: File) -> None:
        """Reads of this file, open or not, fail from now on: what it was read from is another."""
        with self._lock:
            used = self._used.get(file.number)
            if used is not None:
                self._used[file.number] = (Spoiled(used[0]), used[1])
        self.forget(file)

    def close(self) -> None:
        """Close everything."""
        with self._lock:
            contents = [content for content, _ in self._used.values()] + list(self._idle.values())
            self._used.clear()
            self._idle.clear()
        for content in contents:
            content.close()

    def exact_size(self, file: File) -> int:
        """The file's size in bytes; may open it and block."""
        if file.size is None:
            content = self.acquire(file)
            try:
                file.size = content.size
            finally:
                self.release(file)
        return file.size

    def _close(self, number: int, content: Content) -> None:
        """Closing waits for the source too where that is another FUSE file system or NFS, which the caller must not."""
        if number in self._opened_at_once:
            self._opened_at_once.discard(number)
            content.close()
            return
        if self._closer is None:
            self._closer = threading.Thread(target=_close_each, args=(self._to_close,), name="closer", daemon=True)
            self._closer.start()
        self._to_close.put(content)

    def _used_first(self, number: int, opened: Content) -> Content:
        """`opened`, or what another thread opened in the meantime."""
        with self._lock:
            kept = self._take_locked(number)
            if kept is None:
                self._used[number] = (opened, 1)
                return opened
        opened.close()
        return kept

    def _take(self, number: int) -> Content | None:
        with self._lock:
            return self._take_locked(number)

    @property
    def n_in_use(self) -> int:
        """Files that are open now."""
        return len(self._used)

    def _take_locked(self, number: int) -> Content | None:
        self.n_opened += 1
        if number in self._used:
            content, users = self._used[number]
            self._used[number] = (content, users + 1)
            return content
        idle = self._idle.pop(number, None)
        if idle is not None:
            self._used[number] = (idle, 1)
        return idle


class Spoiled:
    """The content of a file that is open while its archive was replaced."""

    def __init__(self, content: Content) -> None:
        self._content = content

    @property
    def size(self) -> int:
        """What it was."""
        return self._content.size

    def read(self, offset: int, length: int) -> bytes:
        """Raises SourceChanged."""
        raise SourceChanged("the archive was replaced while the file was open")

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        """Raises SourceChanged."""
        return self.read(offset, length)

    def close(self) -> None:
        """Let go of the source."""
        self._content.close()


def _close_each(contents: queue.SimpleQueue[Content]) -> None:
    while True:
        content = contents.get()
        try:
            content.close()
        except Exception:
            log.exception("unexpected error, please report it")
        del content
