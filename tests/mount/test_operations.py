"""The FUSE handlers with made-up nodes and no mount: numbers and bytes in, an errno for whatever goes wrong."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pyfuse3
import pytest
import trio
from pyfuse3 import FUSEError

from dafmount.errors import (
    CorruptShard,
    NotFound,
    SourceChanged,
    SourceDenied,
    SourceTimeout,
    SourceUnavailable,
    SpoolFull,
    UnsupportedFormat,
)
from dafmount.mount import operations as operations_module
from dafmount.mount.offload import Offload
from dafmount.mount.operations import Operations, Ownership
from dafmount.mount.statistics import Statistics
from dafmount.tree.content import Content, Literal
from dafmount.tree.nodes import Directory, File, Node, OpenContents

ROOT = 1
CONTEXT: Any = None

FAULTS: list[tuple[BaseException, int]] = [
    (RuntimeError("odd"), errno.EIO),
    (KeyError("odd"), errno.EIO),
    (AttributeError("odd"), errno.EIO),
    (AssertionError("odd"), errno.EIO),
    (RecursionError("odd"), errno.EIO),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"), errno.EIO),
    (ExceptionGroup("odd", [ValueError("inner")]), errno.EIO),
    (MemoryError(), errno.ENOMEM),
    (OSError(errno.ENOSPC, "full"), errno.ENOSPC),
    (OSError("no number"), errno.EIO),
    (CorruptShard("x"), errno.EIO),
    (UnsupportedFormat("x"), errno.EOPNOTSUPP),
    (SourceChanged("x"), errno.ESTALE),
    (SourceDenied("x"), errno.EACCES),
    (SourceTimeout("x"), errno.ETIMEDOUT),
    (SourceUnavailable("x"), errno.EIO),
    (SpoolFull("x"), errno.ENOSPC),
]
"""What a handler may meet, and what the program that asked gets."""


class Broken:
    """A content, an opener and a loader that raise one error, each from the point on that its name says."""

    def __init__(self, fault: BaseException, *, opens: bool = False, reads_inline: bool = False) -> None:
        self.fault = fault
        self.opens = opens
        self.reads_inline = reads_inline

    def open(self, file: File) -> Content:
        if self.opens:
            return self
        raise self.fault

    def open_nowait(self, file: File) -> Content | None:
        return self.open(file)

    def load(self, directory: Directory) -> dict[str, Node]:
        raise self.fault

    def attribute_names(self, file: File) -> Sequence[str]:
        return ["user.daf.shape"]

    def attributes(self, file: File) -> Mapping[str, bytes]:
        raise self.fault

    @property
    def size(self) -> int:
        raise self.fault

    def read(self, offset: int, length: int) -> bytes:
        raise self.fault

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        if self.reads_inline:
            raise self.fault
        return None

    def close(self) -> None:
        pass


class Text:
    """Opens some text; describes it."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self.n_asked = 0

    def open(self, file: File) -> Content:
        return Literal(self.text)

    def open_nowait(self, file: File) -> Content | None:
        return None

    def attribute_names(self, file: File) -> Sequence[str]:
        return ["user.daf.eltype", "user.daf.shape"]

    def attributes(self, file: File) -> Mapping[str, bytes]:
        self.n_asked += 1
        return {"user.daf.eltype": b"String"}


def make(**files: Any) -> Operations:
    """A file system whose root has files by these openers; those with a `fault` have no size."""

    def load(directory: Directory) -> dict[str, Node]:
        return {name: File(name, directory, size(opener), 7, opener) for name, opener in files.items()}

    def size(opener: Any) -> int | None:
        return len(opener.text) if isinstance(opener, Text) else None

    root = Directory("", None, 5, load)
    return operations_over(root)


def operations_over(root: Directory) -> Operations:
    ownership = Ownership(11, 12, 0o440, 0o500, 0o550)
    attributes = {"user.dafmount.pid": b"1"}
    return Operations(root, OpenContents(4), Offload(4, 30), ownership, 10_000, Statistics(), lambda: attributes)


def run(call: Callable[[], Awaitable[Any]]) -> Any:
    """The result of a coroutine."""

    async def bounded() -> Any:
        with trio.fail_after(30):
            return await call()

    return trio.run(bounded)


def errno_of(call: Callable[[], Awaitable[Any]]) -> int:
    """The number of the FUSEError that a handler raises; whatever else it raises would end the mount."""
    with pytest.raises(FUSEError) as caught:
        run(call)
    return caught.value.errno


async def opened(operations: Operations, name: bytes) -> int:
    entry = await operations.lookup(pyfuse3.ROOT_INODE, name, CONTEXT)
    info = await operations.open(entry.st_ino, pyfuse3.FlagT(os.O_RDONLY), CONTEXT)
    return info.fh


def test_a_file_is_found_opened_and_read() -> None:
    operations = make(file=Text(b"hello"))

    async def read() -> tuple[bytes, ...]:
        handle: Any = await opened(operations, b"file")
        parts = [bytes(await operations.read(handle, *place)) for place in ((0, 100), (1, 2), (5, 10), (50, 10))]
        await operations.release(handle)
        return tuple(parts)

    assert run(read) == (b"hello", b"el", b"", b"")
    assert operations.statistics.bytes_served == 7
    assert operations.statistics.requests() == {"lookup": 1, "open": 1, "read": 4, "release": 1}


def test_attributes_are_those_of_the_owner_and_the_size() -> None:
    operations = make(file=Text(b"x" * 1000))

    async def attributes() -> pyfuse3.EntryAttributes:
        entry = await operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)
        return await operations.getattr(entry.st_ino, CONTEXT)

    entry = run(attributes)
    assert (entry.st_size, entry.st_blocks, entry.st_mtime_ns, entry.st_nlink) == (1000, 2, 7, 1)
    assert (entry.st_uid, entry.st_gid, entry.st_mode) == (11, 12, stat.S_IFREG | 0o440)
    root = run(lambda: operations.getattr(pyfuse3.ROOT_INODE, CONTEXT))
    assert root.st_mode == stat.S_IFDIR | 0o550


def test_a_name_that_is_not_there_is_told_for_the_kernel_to_remember() -> None:
    operations = make()
    entry = run(lambda: operations.lookup(pyfuse3.ROOT_INODE, b"\xff", CONTEXT))
    assert entry.st_ino == 0
    assert entry.entry_timeout > 0
    assert operations.statistics.errors == {}


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_RDONLY | os.O_TRUNC, os.O_APPEND])
def test_opening_for_anything_but_reading_is_refused(flags: int) -> None:
    operations = make(file=Text(b"x"))

    async def open_so() -> None:
        entry = await operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)
        await operations.open(entry.st_ino, pyfuse3.FlagT(flags), CONTEXT)

    assert errno_of(open_so) == errno.EROFS


def test_numbers_that_the_kernel_cannot_know_are_stale() -> None:
    operations = make(file=Text(b"x"))
    unknown = pyfuse3.InodeT(4711)
    assert errno_of(lambda: operations.getattr(unknown, CONTEXT)) == errno.ESTALE
    assert errno_of(lambda: operations.lookup(unknown, b"x", CONTEXT)) == errno.ESTALE
    assert errno_of(lambda: operations.open(unknown, pyfuse3.FlagT(0), CONTEXT)) == errno.ESTALE
    assert errno_of(lambda: operations.opendir(unknown, CONTEXT)) == errno.ESTALE
    assert errno_of(lambda: operations.open(pyfuse3.ROOT_INODE, pyfuse3.FlagT(0), CONTEXT)) == errno.EISDIR


def test_a_forgotten_file_is_found_again_under_the_same_number() -> None:
    operations = make(file=Text(b"x"))

    async def numbers() -> tuple[int, int, int]:
        first = (await operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)).st_ino
        second = (await operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)).st_ino
        await operations.forget([(first, 2), (pyfuse3.InodeT(999), 1)])
        known = len(operations.nodes)
        return first, second, known

    first, second, known = run(numbers)
    assert first == second
    assert known == 1
    assert run(lambda: operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)).st_ino == first


# ---------------------------------------------------------------------------------------------------------------------
# Faults


@pytest.mark.parametrize(("fault", "expected"), FAULTS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("handler", ["lookup", "opendir", "open", "read", "read inline", "getxattr"])
def test_whatever_is_raised_costs_one_errno(
    handler: str, fault: BaseException, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    broken = Broken(fault, opens=handler.startswith("read"), reads_inline=handler == "read inline")
    operations = make(broken=broken, sound=Text(b"sound"))

    async def ask() -> None:
        if handler == "opendir":
            directory = Directory("d", None, 5, broken.load)
            await operations_over(directory).opendir(pyfuse3.ROOT_INODE, CONTEXT)
        await operations.opendir(pyfuse3.ROOT_INODE, CONTEXT)
        node = operations.nodes[ROOT].children()["broken"]  # type: ignore[union-attr]
        if handler == "lookup":
            await operations.lookup(pyfuse3.ROOT_INODE, b"broken", CONTEXT)
        node.size = 100  # type: ignore[union-attr]
        await operations.lookup(pyfuse3.ROOT_INODE, b"broken", CONTEXT)
        number = pyfuse3.InodeT(node.number)
        if handler == "getxattr":
            await operations.getxattr(number, b"user.daf.shape", CONTEXT)
        handle: Any = (await operations.open(number, pyfuse3.FlagT(0), CONTEXT)).fh
        await operations.read(handle, 0, 10)

    with caplog.at_level(logging.DEBUG):
        assert errno_of(ask) == expected
    assert caplog.records, "the log says nothing"

    async def read_sound() -> bytes:
        handle: Any = await opened(operations, b"sound")
        return bytes(await operations.read(handle, 0, 10))

    assert run(read_sound) == b"sound"


def test_an_error_is_counted_and_logged_once_with_its_file(caplog: pytest.LogCaptureFixture) -> None:
    operations = make(broken=Broken(CorruptShard("x.zip: chunk 3: bad")))
    for _ in range(3):
        assert errno_of(lambda: operations.lookup(pyfuse3.ROOT_INODE, b"broken", CONTEXT)) == errno.EIO
    assert [record.getMessage() for record in caplog.records] == ["/broken: x.zip: chunk 3: bad"]
    assert operations.statistics.errors == {"EIO": 3}


def test_a_missing_source_is_no_failure_of_the_mount(caplog: pytest.LogCaptureFixture) -> None:
    operations = make(broken=Broken(NotFound("gone")))
    assert errno_of(lambda: operations.lookup(pyfuse3.ROOT_INODE, b"broken", CONTEXT)) == errno.ENOENT
    assert operations.statistics.errors == {}


def test_what_a_handler_with_no_right_to_fail_meets_does_not_end_the_mount(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operations = make(file=Text(b"x"))

    def fail(*_: object) -> None:
        raise RuntimeError("odd")

    handle: Any = run(lambda: opened(operations, b"file"))
    monkeypatch.setattr(operations.nodes, "forget", fail)
    monkeypatch.setattr(operations.contents, "release", fail)
    run(lambda: operations.forget([(pyfuse3.ROOT_INODE, 1)]))
    assert errno_of(lambda: operations.release(handle)) == errno.EIO
    monkeypatch.setattr(pyfuse3, "StatvfsData", fail)
    assert errno_of(lambda: operations.statfs(CONTEXT)) == errno.EIO
    assert len(caplog.records) == 3


def test_a_listing_that_breaks_is_an_io_error(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = make(file=Text(b"x"))
    handle = run(lambda: operations.opendir(pyfuse3.ROOT_INODE, CONTEXT))

    def fail(*_: object) -> bool:
        raise RuntimeError("odd")

    monkeypatch.setattr(operations_module.pyfuse3, "readdir_reply", fail)
    token: Any = None
    assert errno_of(lambda: operations.readdir(handle, 0, token)) == errno.EIO
    run(lambda: operations.releasedir(handle))
    assert errno_of(lambda: operations.readdir(handle, 0, token)) == errno.EIO


def test_short_data_is_an_error_and_never_padded() -> None:
    operations = make(file=Text(b"short"))

    async def read() -> bytes:
        handle: Any = await opened(operations, b"file")
        operations.nodes[ROOT].children()["file"].size = 100  # type: ignore[union-attr]
        return await operations.read(handle, 0, 100)

    assert errno_of(read) == errno.EIO


# ---------------------------------------------------------------------------------------------------------------------
# Extended attributes


def test_only_files_that_can_be_described_have_attributes() -> None:
    class Plain:
        def open(self, file: File) -> Content:
            return Literal(b"")

        def open_nowait(self, file: File) -> Content | None:
            return None

    operations = make(file=Text(b"x"), plain=Plain())

    async def ask(name: bytes) -> tuple[Any, Any, Any]:
        number = (await operations.lookup(pyfuse3.ROOT_INODE, name, CONTEXT)).st_ino
        return operations, number, await operations.listxattr(number, CONTEXT)

    _, number, names = run(lambda: ask(b"file"))
    assert names == [b"user.daf.eltype", b"user.daf.shape"]
    assert run(lambda: operations.getxattr(number, b"user.daf.eltype", CONTEXT)) == b"String"
    assert errno_of(lambda: operations.getxattr(number, b"user.daf.shape", CONTEXT)) == errno.ENODATA
    assert errno_of(lambda: operations.getxattr(number, b"user.other", CONTEXT)) == errno.ENODATA
    _, plain, names = run(lambda: ask(b"plain"))
    assert names == []
    assert errno_of(lambda: operations.getxattr(plain, b"user.daf.eltype", CONTEXT)) == errno.ENODATA


@pytest.mark.parametrize("name", [b"security.selinux", b"system.posix_acl_access", b"trusted.x"])
def test_other_namespaces_are_not_supported_and_cost_nothing(name: bytes) -> None:
    text = Text(b"x")
    operations = make(file=text)

    async def ask() -> None:
        number = (await operations.lookup(pyfuse3.ROOT_INODE, b"file", CONTEXT)).st_ino
        await operations.getxattr(number, name, CONTEXT)

    assert errno_of(ask) == errno.EOPNOTSUPP
    assert text.n_asked == 0
    assert operations.statistics.errors == {}


def test_the_root_tells_of_the_mount() -> None:
    operations = make()
    assert run(lambda: operations.listxattr(pyfuse3.ROOT_INODE, CONTEXT)) == [b"user.dafmount.pid"]
    assert run(lambda: operations.getxattr(pyfuse3.ROOT_INODE, b"user.dafmount.pid", CONTEXT)) == b"1"
