"""The FUSE handlers: numbers and bytes in, calls of `tree/` out.

Owns file handles, lookup counts, attributes, and bytes names. Must not know what a Daf is. Runs in the event loop's
thread. pyfuse3 ends the whole mount on any exception but FUSEError, so every handler is wrapped once, in `_guarded`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, RequestContext

from dafmount.errors import SourceChanged, SourceTimeout
from dafmount.mount.errno_map import ErrorLog
from dafmount.mount.offload import Offload
from dafmount.tree.content import Content
from dafmount.tree.nodes import Directory, File, Node, NodeTable, OpenContents

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CACHE_TIMEOUT_S = 3600.0
"""How long the kernel may believe what it was told; what is mounted does not change by itself."""

WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_APPEND

PATIENT_READS = 4
"""Reads that may wait for the source as long as is allowed, whether or not they are the kernel's reading ahead."""

HURRIED_S = 3.0
"""How long a further read waits at its first try."""

MAX_NAME_BYTES = 255
SECTOR_BYTES = 512
BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns what is shown, and the permission bits of files and directories."""

    uid: int
    gid: int
    file_mode: int
    directory_mode: int


class Following(Protocol):
    """Keeps the tree true while sources change."""

    def loaded(self) -> None:
        """Hear that a directory was looked into."""

    async def settle(self) -> None:
        """Look for changes now; returns when the tree shows them, and soon in any case."""


def _guarded(
    handler: Callable[Concatenate[Operations, P], Awaitable[R]],
) -> Callable[Concatenate[Operations, P], Awaitable[R]]:
    """Turn whatever a handler raises into one errno for one request."""

    @functools.wraps(handler)
    async def guarded(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self.errors.answer(error, self.describe(args))) from error

    return guarded


class Operations(pyfuse3.Operations):
    """A read-only file system over a tree."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self, root: Directory, contents: OpenContents, offload: Offload, ownership: Ownership, source_bytes: int
    ) -> None:
        super().__init__()
        self.nodes = NodeTable(root)
        self.contents = contents
        self.errors = ErrorLog()
        self._offload = offload
        self._ownership = ownership
        self._source_bytes = source_bytes
        self._files: dict[int, File] = {}
        self._directories: dict[int, Sequence[tuple[bytes, Node]]] = {}
        self._next_handle = 1
        self.following: Following | None = None
        """Who keeps the tree true; None while nobody does."""
        self._n_waiting = 0
        self._hurried: deque[tuple[int, int, int]] = deque(maxlen=256)

    def describe(self, args: Sequence[object]) -> str:
        """For messages: the path that a handler's arguments are about."""
        try:
            first = args[0] if args else 0
            node: Node | None = None
            if isinstance(first, int):
                node = self._files.get(first)
                if node is None:
                    node = self.nodes[first]
            path = "/" + node.path if node is not None else "?"
            if len(args) > 1 and isinstance(args[1], bytes):
                path = path.rstrip("/") + "/" + os.fsdecode(args[1])
            return path
        except Exception:
            return "?"

    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        """The attributes of a name; the kernel remembers a name that is not there as well."""
        return await self._lookup(parent_inode, name)

    @_guarded
    async def _lookup(self, parent_inode: int, name: bytes) -> EntryAttributes:
        directory = self._directory(parent_inode)
        if len(name) > MAX_NAME_BYTES:  # the kernel lets 1024 pass
            raise FUSEError(errno.ENAMETOOLONG)
        if name == b".":
            return self._remembered(directory)
        if name == b"..":
            return self._remembered(directory.parent or directory)
        await self._load(directory)
        node = directory.children().get(os.fsdecode(name))
        if node is None:
            missing = EntryAttributes()
            missing.st_ino = InodeT(0)
            missing.entry_timeout = CACHE_TIMEOUT_S
            return missing
        if isinstance(node, File) and node.size is None:
            await self._measure(node)
            if node.is_retired:  # meanwhile; the kernel must not learn of it any more
                raise FUSEError(errno.ESTALE)
        return self._remembered(node)

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        """The kernel no longer knows these; never fails."""
        for number, count in inode_list:
            self.nodes.forget(number, count)

    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        """Attributes, with the exact size."""
        return await self._getattr(inode)

    @_guarded
    async def _getattr(self, inode: int) -> EntryAttributes:
        node = self._node(inode)
        if isinstance(node, File) and node.size is None:
            await self._measure(node)
        return self._attributes(node)

    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        """A snapshot of the directory, so that a listing is stable whatever happens meanwhile."""
        return await self._opendir(inode)

    @_guarded
    async def _opendir(self, inode: int) -> FileHandleT:
        directory = self._directory(inode)
        await self._load(directory)
        listing: list[tuple[bytes, Node]] = [(b".", directory), (b"..", directory.parent or directory)]
        listing.extend((os.fsencode(name), node) for name, node in directory.children().items())
        return FileHandleT(self._new_handle(self._directories, listing))

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Entries from position `start_id` on, until the kernel's buffer is full."""
        await self._readdir(fh, start_id, token)

    @_guarded
    async def _readdir(self, handle: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._directories[handle]
        for position in range(start_id, len(listing)):
            name, node = listing[position]
            entry = self._attributes(node)
            if isinstance(node, File) and (node.size is None or node.is_retired):
                # Asking would delay the whole listing. The kernel forgets at once what it is told here, and asks for
                # the exact size before anybody sees or uses one.
                entry.attr_timeout = 0
                entry.entry_timeout = 0
            if not pyfuse3.readdir_reply(token, FileNameT(name), entry, position + 1):
                return
            if position >= 2:
                self.nodes.remember(node)

    async def releasedir(self, fh: FileHandleT) -> None:
        """The listing is over."""
        self._directories.pop(fh, None)

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        """Only for reading."""
        return await self._open(inode, flags)

    @_guarded
    async def _open(self, inode: int, flags: int) -> FileInfo:
        if flags & WRITE_FLAGS:
            raise FUSEError(errno.EROFS)
        file = self._file(inode)
        if file.is_retired:  # the kernel looks the path up again when it is told so
            raise FUSEError(errno.ESTALE)
        if self.contents.acquire_open(file) is None:
            await self._opened(file, lambda: self.contents.acquire(file), undo=lambda: self.contents.release(file))
        if file.size is None:
            try:
                await self._measure(file)
            except BaseException:
                self.contents.release(file)
                raise
        return FileInfo(fh=FileHandleT(self._new_handle(self._files, file)), keep_cache=True)

    async def _opened(self, file: File, call: Callable[[], object], undo: Callable[[], None] | None = None) -> None:
        """Run a call that opens the file."""
        try:
            await self._offload.run(call, file.path, file.number, undo)
        except SourceChanged:
            # The kernel looks the path up again, once, when it is told ESTALE: by then the tree shall be true.
            if self.following is not None:
                await self.following.settle()
            if file.is_retired:
                raise FUSEError(errno.ESTALE) from None
            raise

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Bytes up to the end of the file; inline when they are in memory.

        Without the wrapper of the others: what it costs a call is seen in sequential reading.
        """
        try:
            file = self._files[fh]
            length = (file.size or 0) - off
            if size < length:
                length = size
            elif length <= 0:
                return b""
            content = self.contents.opened(file)
            data = content.read_nowait(off, length)
            if data is None:
                data = await self._read_elsewhere(file, content, off, length)
            if len(data) == length:
                return cast(bytes, data)  # pyfuse3 takes any buffer
            raise AssertionError(f"{len(data)} bytes at {off}, expected {length}")
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self.errors.answer(error, self.describe((fh,)))) from error

    async def release(self, fh: FileHandleT) -> None:
        """The last user of the handle is gone."""
        file = self._files.pop(fh, None)
        if file is not None:
            self.contents.release(file)

    async def flush(self, fh: FileHandleT) -> None:
        """Nothing was written."""

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        """The size of the source; nothing is free."""
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = -(-self._source_bytes // BLOCK_BYTES)
        data.f_bfree = data.f_bavail = 0
        data.f_files = len(self.nodes)
        data.f_ffree = data.f_favail = 0
        data.f_namemax = MAX_NAME_BYTES
        return data

    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        """There are none; said so that programs stop asking for what no file here can have."""
        raise FUSEError(pyfuse3.ENOATTR if name.startswith(b"user.") else errno.EOPNOTSUPP)

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        """There are none."""
        return []

    def _new_handle(self, table: dict[int, R], value: R) -> int:
        handle = self._next_handle
        self._next_handle += 1
        table[handle] = value
        return handle

    def _node(self, number: int) -> Node:
        try:
            return self.nodes[number]
        except KeyError:
            raise FUSEError(errno.ESTALE) from None

    def _directory(self, number: int) -> Directory:
        node = self._node(number)
        if not isinstance(node, Directory):
            raise FUSEError(errno.ENOTDIR)
        return node

    def _file(self, number: int) -> File:
        node = self._node(number)
        if not isinstance(node, File):
            raise FUSEError(errno.EISDIR)
        return node

    async def _read_elsewhere(self, file: File, content: Content, offset: int, length: int) -> bytes | memoryview:
        """Bytes that have to be waited for.

        The kernel reads ahead with few requests at a time for the whole mount (12): those that wait for one file would
        stop the readers of all others. It asks again, beside them, when such a request fails and a program does want
        the bytes. So where several wait, a further request fails soon, and only its second try takes the time allowed.
        """
        patience_s = None
        if self._n_waiting >= PATIENT_READS and not self._was_hurried(file.number, offset, length):
            patience_s = HURRIED_S
        self._n_waiting += 1
        try:
            return await self._offload.run(
                lambda: content.read(offset, length), file.path, file.number, timeout_s=patience_s
            )
        except SourceTimeout:
            if patience_s is None:
                raise
            self._hurried.append((file.number, offset, offset + length))
            raise FUSEError(errno.ETIMEDOUT) from None
        finally:
            self._n_waiting -= 1

    def _was_hurried(self, number: int, offset: int, length: int) -> bool:
        return any(
            number == other and offset < stop and start < offset + length for other, start, stop in self._hurried
        )

    async def _load(self, directory: Directory) -> None:
        if not directory.is_loaded:
            await self._offload.run(directory.children, directory.path or "/", self.nodes.number(directory))
            if self.following is not None:
                self.following.loaded()

    async def _measure(self, file: File) -> None:
        self.nodes.number(file)
        await self._opened(file, lambda: self.contents.exact_size(file))

    def _remembered(self, node: Node) -> EntryAttributes:
        self.nodes.remember(node)
        return self._attributes(node)

    def _attributes(self, node: Node) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = InodeT(self.nodes.number(node))
        entry.entry_timeout = entry.attr_timeout = CACHE_TIMEOUT_S
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = self._ownership.uid, self._ownership.gid
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = node.mtime_ns
        entry.st_blksize = BLOCK_BYTES
        if isinstance(node, Directory):
            entry.st_mode = pyfuse3.ModeT(stat.S_IFDIR | self._ownership.directory_mode)
        else:
            mode = self._ownership.directory_mode if node.is_executable else self._ownership.file_mode
            entry.st_mode = pyfuse3.ModeT(stat.S_IFREG | mode)
            entry.st_size = node.size or 0
            entry.st_blocks = -(-entry.st_size // SECTOR_BYTES)
        return entry
