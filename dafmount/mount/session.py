"""One mount from start to end: handing the tree to the kernel, signals, unmounting.

pyfuse3 allows one session a process. Errors leave its main loop in ExceptionGroups, which are taken apart here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import select
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyfuse3
import trio

from dafmount.errors import MountFailed
from dafmount.mount import eager
from dafmount.mount import mountpoint as mountpoints
from dafmount.mount.offload import Offload
from dafmount.mount.operations import Operations, Ownership
from dafmount.mount.refresh import Follower
from dafmount.options import KIB, Options
from dafmount.tree.live import Live
from dafmount.tree.nodes import OpenContents

log = logging.getLogger(__name__)

MAX_TASKS = 1024
"""Requests at work at the same time; those that wait for a source hold one each."""

MAX_READAHEAD = 128
"""Requests at the same time by which the kernel reads ahead, for the whole mount."""

END_WITHIN_S = 5.0
"""How long requests under way may still take when a mount that is in use is detached."""

LOOK_EVERY_S = 1.0

_CONNECTIONS = Path("/sys/fs/fuse/connections")
_FUSE_DEVICE = "/dev/fuse"

N_THREADS = 64

MALLOC_KEEP_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc

IDLE_CONTENTS = 64


class _Utf8(str):
    """pyfuse3 encodes each option as ASCII, but sources have names in every script."""

    __slots__ = ()

    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return super().encode("utf-8", "surrogateescape")


def serve(
    live: Live,
    mountpoint: str,
    source: str,
    ownership: Ownership,
    source_bytes: int,
    options: Options,
    ready: Callable[[], None],
) -> None:
    """Mount, call `ready` once requests are answered, and return when the mount is gone.

    Raises MountFailed where the kernel or fusermount3 refuses.
    """
    _reuse_memory()
    contents = OpenContents(IDLE_CONTENTS)
    offload = Offload(N_THREADS, options.timeout_s)
    operations = Operations(live.root, contents, offload, ownership, source_bytes)
    follower = Follower(live.units, contents, options.refresh_s)
    operations.following = follower
    _raise_file_limit()
    eager.enable()
    _mount(operations, mountpoint, kernel_options(source, options))
    _allow_readahead(mountpoint)
    try:
        trio.run(_main, mountpoint, options.readahead_bytes, follower, offload, ready)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        pyfuse3.close(unmount=True)
        contents.close()


def kernel_options(source: str, options: Options) -> set[str]:
    """The words that libfuse gets; a comma or backslash in the source's name is escaped."""
    name = (options.fsname or source).replace("\\", "\\\\").replace(",", "\\,")
    return {
        *options.kernel,
        "ro",
        "nosuid",
        "nodev",
        "noatime",
        "default_permissions",
        "subtype=dafmount",
        _Utf8(f"fsname={name}"),
    }


def _reuse_memory() -> None:
    """Let malloc keep what is freed: faulting in fresh pages for a decoded block takes as long as decoding it."""
    try:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, MALLOC_KEEP_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, MALLOC_KEEP_BYTES)
    except (OSError, AttributeError):
        log.debug("this C library has no mallopt")


def _raise_file_limit() -> None:
    """Every file of a directory that is open in some program takes one descriptor here too; 1024 are soon used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _allow_readahead(mountpoint: str) -> None:
    """Let the kernel read ahead with more requests, where the system lets us: its 12 are soon held by one slow file."""
    mount = mountpoints.mount_at(mountpoint)
    if mount is not None:
        connection = _CONNECTIONS / mount.device.partition(":")[2]
        with suppress(OSError):
            (connection / "max_background").write_text(str(MAX_READAHEAD))
            (connection / "congestion_threshold").write_text(str(MAX_READAHEAD))


def _mount(operations: Operations, mountpoint: str, words: set[str]) -> None:
    with _stderr_kept() as said:
        try:
            pyfuse3.init(operations, mountpoint, words)
        except RuntimeError as error:
            reason = said() or str(error)
            raise MountFailed(f"{mountpoint}: {reason}") from error


@contextmanager
def _stderr_kept() -> Iterator[Callable[[], str]]:
    """What libfuse and fusermount3 print to the terminal belongs into our one line."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def said() -> str:
            file.seek(0)
            return " ".join(file.read().decode(errors="replace").split())

        try:
            yield said
        finally:
            os.dup2(saved, 2)
            os.close(saved)


async def _main(
    mountpoint: str, readahead_bytes: int, follower: Follower, offload: Offload, ready: Callable[[], None]
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follower.run)
        nursery.start_soon(_end_on_signal, mountpoint, nursery.cancel_scope)
        nursery.start_soon(_end_with_connection, offload, nursery.cancel_scope)
        nursery.start_soon(_announce, mountpoint, readahead_bytes, ready)
        await pyfuse3.main(max_tasks=MAX_TASKS)
        nursery.cancel_scope.cancel()
    if offload.n_given_up:
        log.warning("%s: %d reads still wait for the source", mountpoint, offload.n_given_up)
    log.info("%s: unmounted", mountpoint)


async def _end_with_connection(offload: Offload, scope: trio.CancelScope) -> None:
    """End when the mount is gone though requests still wait for a source: nobody is there to get their answers.

    pyfuse3 would wait for them. This looks only while something is under way, so that an idle mount never wakes up.
    """
    connection = select.poll()
    for fd in _fuse_descriptors():
        connection.register(fd, 0)  # errors only
    while True:
        await offload.wait_for_work()
        await trio.sleep(LOOK_EVERY_S)
        if connection.poll(0):
            await trio.sleep(LOOK_EVERY_S)
            scope.cancel()
            return


def _fuse_descriptors() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == _FUSE_DEVICE:
                yield int(name)


async def _announce(mountpoint: str, readahead_bytes: int, ready: Callable[[], None]) -> None:
    """Ready is when the kernel gets an answer, not when the mount exists."""
    status = await trio.to_thread.run_sync(os.stat, mountpoint, abandon_on_cancel=True)
    _set_readahead(status.st_dev, readahead_bytes)
    ready()


def _set_readahead(device: int, readahead_bytes: int) -> None:
    """Larger requests of the kernel, which only root may ask for; the kernel's own are 128 KiB."""
    if readahead_bytes == 0 or os.geteuid() != 0:
        return
    path = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    try:
        path.write_text(str(max(4, readahead_bytes // KIB)))
    except OSError as error:
        log.debug("read-ahead stays as it is: %s", error)


async def _end_on_signal(mountpoint: str, scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(*_ending_signals()) as signals:
        async for number in signals:
            log.info("%s: %s, unmounting", mountpoint, signal.Signals(number).name)
            problem = await trio.to_thread.run_sync(
                lambda: mountpoints.unmount(mountpoint, lazy=False), abandon_on_cancel=True
            )
            if problem:
                log.warning("%s: in use (%s); detached, programs there get errors from now on", mountpoint, problem)
                pyfuse3.terminate()
                scope.deadline = trio.current_time() + END_WITHIN_S
                await trio.sleep_forever()
            return


def _ending_signals() -> list[signal.Signals]:
    """SIGHUP, the end of the terminal, is one of them unless the daemon is in the background and ignores it."""
    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.append(signal.SIGHUP)
    return ending


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
