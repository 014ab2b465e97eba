"""The nodes of a mounted tree: directories, files, and the numbers by which the kernel knows them.

Owns names, inode numbers, sizes and times, and which contents are open. Must not know FUSE nor what a Daf is.
Children of a directory are made when first asked for, by its loader; two threads that ask at once may both load, and
one result is kept.

An inode number is a hash of the path, so that it stays the same from mount to mount.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from dafmount.tree.content import Content

ROOT_NUMBER = 1


class Opener(Protocol):
    """Makes the content of a file."""

    def open(self, file: File) -> Content:
        """The bytes; may block."""


class File:
    """A regular file. `size` is None until something asks for it that is worth the answer; see `exact_size`."""

    __slots__ = ("is_executable", "lookups", "mtime_ns", "name", "number", "opener", "parent", "size")

    def __init__(
        self,
        name: str,
        parent: Directory,
        size: int | None,
        mtime_ns: int,
        opener: Opener,
        is_executable: bool = False,
    ) -> None:
        self.name = name
        self.parent = parent
        self.size = size
        self.mtime_ns = mtime_ns
        self.opener = opener
        self.is_executable = is_executable
        self.number = 0
        self.lookups = 0

    @property
    def path(self) -> str:
        """The path below the mount's root."""
        return join(self.parent.path, self.name)


class Directory:
    """A directory whose children are loaded on first access."""

    __slots__ = ("_children", "loader", "lookups", "mtime_ns", "name", "number", "parent")

    def __init__(self, name: str, parent: Directory | None, mtime_ns: int, loader: Loader) -> None:
        self.name = name
        self.parent = parent
        self.mtime_ns = mtime_ns
        self.loader = loader
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
        if self._children is None:
            children = self.loader(self)
            # Whoever was first has perhaps shown its nodes to the kernel already.
            if self._children is None:
                self._children = children
        return self._children


Node: TypeAlias = File | Directory
Loader: TypeAlias = Callable[[Directory], dict[str, Node]]


def join(parent: str, name: str) -> str:
    """A path below the root, which is `''`."""
    return f"{parent}/{name}" if parent else name


class NodeTable:
    """Which node has which inode number, for nodes that the kernel knows. Used from one thread."""

    def __init__(self, root: Directory) -> None:
        self._nodes: dict[int, Node] = {ROOT_NUMBER: root}
        root.lookups = 1

    def __getitem__(self, number: int) -> Node:
        """The node; KeyError for a number that the kernel cannot know."""
        return self._nodes[number]

    def __len__(self) -> int:
        return len(self._nodes)

    def number(self, node: Node) -> int:
        """The node's inode number, given now if it has none."""
        if not node.number:
            node.number = self._new_number(node)
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

    def _new_number(self, node: Node) -> int:
        assert node.parent is not None
        parent = self.number(node.parent)
        digest = hashlib.blake2b(os.fsencode(node.name), digest_size=8, key=parent.to_bytes(8, "little")).digest()
        number = int.from_bytes(digest, "little") | 2
        while (taken := self._nodes.get(number)) is not None and taken is not node:
            number = (number + 4) & 0xFFFFFFFFFFFFFFFF
        return number


class OpenContents:
    """Contents of files in use, and of some lately used ones, so that opening a file again costs nothing.

    Threads share it; nothing blocks while its lock is held.
    """

    def __init__(self, idle_limit: int) -> None:
        self._idle_limit = idle_limit
        self._lock = threading.Lock()
        self._used: dict[int, tuple[Content, int]] = {}
        self._idle: OrderedDict[int, Content] = OrderedDict()

    def acquire(self, file: File) -> Content:
        """The file's content, opened if it is not; may block. Every call wants a `release`."""
        number = file.number
        content = self._take(number)
        if content is not None:
            return content
        opened = file.opener.open(file)
        with self._lock:
            kept = self._take_locked(number)
            if kept is None:
                self._used[number] = (opened, 1)
                return opened
        opened.close()
        return kept

    def acquire_open(self, file: File) -> Content | None:
        """As `acquire`, but None where the content would have to be opened."""
        return self._take(file.number)

    def opened(self, file: File) -> Content:
        """The content of a file that the caller has acquired."""
        return self._used[file.number][0]

    def release(self, file: File) -> None:
        """One user less; the content is kept for a while."""
        surplus = []
        with self._lock:
            content, users = self._used[file.number]
            if users > 1:
                self._used[file.number] = (content, users - 1)
                return
            del self._used[file.number]
            self._idle[file.number] = content
            while len(self._idle) > self._idle_limit:
                surplus.append(self._idle.popitem(last=False)[1])
        for content in surplus:
            content.close()

    def forget(self, file: File) -> None:
        """Do not keep an idle content of this file."""
        with self._lock:
            content = self._idle.pop(file.number, None)
        if content is not None:
            content.close()

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

    def _take(self, number: int) -> Content | None:
        with self._lock:
            return self._take_locked(number)

    def _take_locked(self, number: int) -> Content | None:
        if number in self._used:
            content, users = self._used[number]
            self._used[number] = (content, users + 1)
            return content
        idle = self._idle.pop(number, None)
        if idle is not None:
            self._used[number] = (idle, 1)
        return idle
