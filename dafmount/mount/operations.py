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
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyfuse3
from pyfuse3 import EntryAttributes, FileHandleT, FileInfo, FileNameT, FlagT, FUSEError, InodeT, RequestContext

from dafmount.errors import SourceChanged, SourceTimeout
from dafmount.mount.errno_map import ErrorLog
from dafmount.mount.offload import Offload
from dafmount.mount.statistics import Statistics
from dafmount.tree.content import Content, ReadAheadDeclined
from dafmount.tree.nodes import Described, Directory, File, Node, NodeTable, OpenContents

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
_DOTS = (FileNameT(b"."), FileNameT(b".."))

SECTOR_BYTES = 512
BLOCK_BYTES = 4096

TOLD_FOR_NS = 50_000_000
"""How long extended attributes stay as they were told: programs ask first for the length and then for the value."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns what is shown, and the permission bits of files and directories."""

    uid: int
    gid: int
    file_mode: int
    executable_mode: int
    """Of a file that can be run where it is stored."""
    directory_mode: int


class Following(Protocol):
    """Keeps the tree true while sources change."""

    def loaded(self) -> None:
        """Hear that a directory was looked into."""

    async def settle(self, file: File) -> None:
        """Look for changes now; returns when the tree shows those that concern `file`, and soon in any case."""


def _guarded(
    handler: Callable[Concatenate[Operations, P], Awaitable[R]],
) -> Callable[Concatenate[Operations, P], Awaitable[R]]:
    """Turn whatever a handler raises into one errno for one request, and count the request."""
    kind = handler.__name__.lstrip("_")

    @functools.wraps(handler)
    async def guarded(self: Operations, /, *args: P.args, **kwargs: P.kwargs) -> R:
        started_ns = time.perf_counter_ns()
        try:
            return await handler(self, *args, **kwargs)
        except FUSEError:
            raise
        except Exception as error:
            raise FUSEError(self._failed(error, args)) from error
        finally:
            self.statistics.took(kind, time.perf_counter_ns() - started_ns)

    return guarded


class Operations(pyfuse3.Operations):
    """A read-only file system over a tree."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(
        self,
        root: Directory,
        contents: OpenContents,
        offload: Offload,
        ownership: Ownership,
        source_bytes: int,
        statistics: Statistics,
        root_attributes: Callable[[], Mapping[str, bytes]],
    ) -> None:
        """`root_attributes` gives name -> value of the root's extended attributes, anew each time."""
        super().__init__()
        self.nodes = NodeTable(root)
        self.contents = contents
        self.errors = ErrorLog()
        self.statistics = statistics
        self._root_attributes = root_attributes
        self._told: tuple[Node, Mapping[str, bytes], int] | None = None
        self._offload = offload
        self._ownership = ownership
        self._file_mode = pyfuse3.ModeT(stat.S_IFREG | ownership.file_mode)
        self._executable_mode = pyfuse3.ModeT(stat.S_IFREG | ownership.executable_mode)
        self._directory_mode = pyfuse3.ModeT(stat.S_IFDIR | ownership.directory_mode)
        self._source_bytes = source_bytes
        self._files: dict[int, File] = {}
        self._direct: set[int] = set()
        """Handles that were opened with O_DIRECT."""
        self._directories: dict[int, Sequence[Node]] = {}
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
        """The kernel no longer knows these. It hears no errors of this, and pyfuse3 ends the mount on one."""
        try:
            for number, count in inode_list:
                self.nodes.forget(number, count)
        except Exception as error:
            self._failed(error, ())

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
        listing = [directory, directory.parent or directory, *directory.children().values()]
        return FileHandleT(self._new_handle(self._directories, listing))

    async def readdir(self, fh: FileHandleT, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        """Entries from position `start_id` on, until the kernel's buffer is full."""
        await self._readdir(fh, start_id, token)

    @_guarded
    async def _readdir(self, handle: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        listing = self._directories[handle]
        reply, remember = pyfuse3.readdir_reply, self.nodes.remember
        entry = self._entry()
        # Setting a field takes as long as all else that is done for one; mostly neighbours have the same.
        before: tuple[object, ...] | None = None
        for position in range(start_id, len(listing)):
            node = listing[position]
            entry.st_ino = node.number or self.nodes.number(node)
            if type(node) is File:
                alike = (node.size, node.mtime_ns, node.is_executable, node.is_retired)
            else:
                alike = (-1, node.mtime_ns, False, False)  # no file's
            if alike != before:
                before = alike
                self._fill(entry, node)
                entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = node.mtime_ns
                # Asking for a size would delay the whole listing. The kernel forgets at once what it is told here, and
                # asks for the exact size before anybody sees or uses one.
                is_exact = alike[0] is not None and not alike[3]
                entry.attr_timeout = entry.entry_timeout = CACHE_TIMEOUT_S if is_exact else 0
            if position < 2:
                reply(token, _DOTS[position], entry, position + 1)
                continue
            if not reply(token, node.name.encode("utf-8", "surrogateescape"), entry, position + 1):
                return
            remember(node)

    async def releasedir(self, fh: FileHandleT) -> None:
        """The listing is over."""
        await self._releasedir(fh)

    @_guarded
    async def _releasedir(self, handle: int) -> None:
        self._directories.pop(handle, None)

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
        if not self._is_acquired_nowait(file):
            await self._opened(file, lambda: self.contents.acquire(file), undo=lambda: self.contents.release(file))
        if file.size is None:
            try:
                await self._measure(file)
            except BaseException:
                self.contents.release(file)
                raise
        handle = self._new_handle(self._files, file)
        if flags & os.O_DIRECT:
            self._direct.add(handle)
        return FileInfo(fh=FileHandleT(handle), keep_cache=True)

    def _is_acquired_nowait(self, file: File) -> bool:
        try:
            return self.contents.acquire_nowait(file) is not None
        except SourceChanged:
            return False  # opening it anew says so again, where it can be answered

    async def _opened(self, file: File, call: Callable[[], object], undo: Callable[[], None] | None = None) -> None:
        """Run a call that opens the file."""
        try:
            await self._offload.run(call, file.path, file.number, undo)
        except SourceChanged:
            # The kernel looks the path up again, once, when it is told ESTALE: by then the tree shall be true.
            if self.following is not None:
                await self.following.settle(file)
            if file.is_retired:
                raise FUSEError(errno.ESTALE) from None
            raise

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        """Bytes up to the end of the file; inline when they are in memory.

        Without the wrapper of the others: what it costs a call is seen in sequential reading.
        """
        started_ns = time.perf_counter_ns()
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
                self.statistics.bytes_served += length
                return cast(bytes, data)  # pyfuse3 takes any buffer
            raise AssertionError(f"{len(data)} bytes at {off}, expected {length}")
        except FUSEError:
            raise
        except ReadAheadDeclined:
            # Only a program that reads past the kernel's cache would be told of the error.
            if fh not in self._direct:
                raise FUSEError(errno.EAGAIN) from None
            return await self._read_waiting(file, off, length)
        except SourceChanged as error:
            # Whoever opens it again shall find it as it is now.
            if self.following is not None and not file.is_retired:
                await self.following.settle(file)
            raise FUSEError(self._failed(error, (fh,))) from error
        except Exception as error:
            raise FUSEError(self._failed(error, (fh,))) from error
        finally:
            self.statistics.took("read", time.perf_counter_ns() - started_ns)

    @_guarded
    async def _read_waiting(self, file: File, offset: int, length: int) -> bytes:
        content = self.contents.opened(file)
        return cast(bytes, await self._offload.run(lambda: content.read(offset, length), file.path, file.number))

    async def release(self, fh: FileHandleT) -> None:
        """The last user of the handle is gone."""
        await self._release(fh)

    @_guarded
    async def _release(self, handle: int) -> None:
        self._direct.discard(handle)
        file = self._files.pop(handle, None)
        if file is not None:
            self.contents.release(file)

    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        """The size of the source; nothing is free."""
        return await self._statfs()

    @_guarded
    async def _statfs(self) -> pyfuse3.StatvfsData:
        data = pyfuse3.StatvfsData()
        data.f_bsize = data.f_frsize = BLOCK_BYTES
        data.f_blocks = -(-self._source_bytes // BLOCK_BYTES)
        data.f_bfree = data.f_bavail = 0
        data.f_files = len(self.nodes)
        data.f_ffree = data.f_favail = 0
        data.f_namemax = MAX_NAME_BYTES
        return data

    async def getxattr(self, inode: InodeT, name: bytes, ctx: RequestContext) -> bytes:
        """`user.dafmount.*` of the root, `user.daf.*` of files of properties."""
        return await self._getxattr(inode, os.fsdecode(name))

    @_guarded
    async def _getxattr(self, inode: int, name: str) -> bytes:
        if not name.startswith("user."):
            # `ls -l` asks for access lists and labels; this answer, unlike ENODATA, makes it stop after the first file.
            raise FUSEError(errno.EOPNOTSUPP)
        value = (await self._extended(self._node(inode))).get(name)
        if value is None:
            raise FUSEError(pyfuse3.ENOATTR)
        return value

    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[bytes]:
        """The names that `getxattr` knows; nothing is read for them."""
        return await self._listxattr(inode)

    @_guarded
    async def _listxattr(self, inode: int) -> Sequence[bytes]:
        node = self._node(inode)
        if node.parent is None:
            return [os.fsencode(name) for name in await self._extended(node)]
        if isinstance(node, File) and isinstance(node.opener, Described):
            return [os.fsencode(name) for name in node.opener.attribute_names(node)]
        return []

    async def _extended(self, node: Node) -> Mapping[str, bytes]:
        """Name -> value of a node's extended attributes."""
        now_ns = time.monotonic_ns()
        if self._told is not None and self._told[0] is node and now_ns < self._told[2]:
            return self._told[1]
        found: Mapping[str, bytes] = {}
        if node.parent is None:
            found = self._root_attributes()
        elif isinstance(node, File) and isinstance(node.opener, Described):
            opener, file = node.opener, node
            self.nodes.number(file)
            found = await self._offload.run(lambda: opener.attributes(file), file.path, file.number)
        self._told = (node, found, now_ns + TOLD_FOR_NS)
        return found

    def _failed(self, error: Exception, args: Sequence[object]) -> int:
        """The errno for what a handler raised, logged and counted."""
        number = self.errors.answer(error, self.describe(args))
        if number != errno.ENOENT:
            self.statistics.failed(errno.errorcode.get(number, str(number)))
        return number

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
        entry = self._entry()
        self._fill(entry, node)
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = node.mtime_ns
        return entry

    def _entry(self) -> EntryAttributes:
        """What is the same for every node."""
        entry = EntryAttributes()
        entry.entry_timeout = entry.attr_timeout = CACHE_TIMEOUT_S
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = self._ownership.uid, self._ownership.gid
        entry.st_blksize = BLOCK_BYTES
        return entry

    def _fill(self, entry: EntryAttributes, node: Node) -> None:
        """What a node has of its own but its times, into an entry that may have been used for another."""
        entry.st_ino = node.number or self.nodes.number(node)
        if isinstance(node, Directory):
            entry.st_mode = self._directory_mode
            entry.st_size = entry.st_blocks = 0
        else:
            entry.st_mode = self._executable_mode if node.is_executable else self._file_mode
            size = node.size or 0
            entry.st_size = size
            entry.st_blocks = -(-size // SECTOR_BYTES)
