"""One mount from start to end: handing the tree to the kernel, signals, unmounting.

pyfuse3 allows one session a process. Errors leave its main loop in ExceptionGroups, which are taken apart here.
"""

from __future__ import annotations

import ctypes
import errno
import gc
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
from dafmount.mount import eager, logs
from dafmount.mount import mountpoint as mountpoints
from dafmount.mount.guardian import CONNECTIONS
from dafmount.mount.notify import notify
from dafmount.mount.offload import Offload
from dafmount.mount.operations import Operations, Ownership
from dafmount.mount.page_cache import PageCache
from dafmount.mount.refresh import Follower
from dafmount.mount.reporter import Reporter
from dafmount.mount.statistics import Statistics
from dafmount.options import KIB, Options
from dafmount.source.http_url import is_url
from dafmount.source.spool import Spool
from dafmount.tree.cache import ChunkCache
from dafmount.tree.decoders import Decoders
from dafmount.tree.live import Live
from dafmount.tree.nodes import OpenContents

log = logging.getLogger(__name__)

MAX_TASKS = 1024
"""Requests at work at the same time; those that wait for a source hold one each."""

MAX_READAHEAD = 128
"""Requests at the same time by which the kernel reads ahead, for the whole mount."""

LOOK_EVERY_S = 1.0

_FUSE_DEVICE = "/dev/fuse"

N_THREADS = 64

MALLOC_KEEP_BYTES = 16 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc

ENDING_LIMIT_S = 5
"""How long requests at work may go on when the mount ends although it is in use."""

GARBAGE_EVERY = 50_000
"""Objects made before garbage is looked for. A tree of 100,000 names is none; looking took a third of its making."""

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
    cache: ChunkCache,
    decoders: Decoders,
    spool: Spool,
    options: Options,
    ready: Callable[[], None],
    *,
    ends_on_hangup: bool = False,
) -> None:
    """Mount, call `ready` once requests are answered, and return when the mount is gone.

    SIGTERM and SIGINT unmount; a second one does not wait for anything. SIGHUP opens the log file anew; with
    `ends_on_hangup`, as for a program in a terminal, it unmounts where there is no log file or the terminal is gone.
    SIGUSR1 logs the status.

    Raises MountFailed where the kernel or fusermount3 refuses.
    """
    _reuse_memory()
    gc.set_threshold(GARBAGE_EVERY)
    contents = OpenContents(IDLE_CONTENTS)
    spool.relieve = contents.drop_idle
    statistics = Statistics()
    reporter = Reporter(source, mountpoint, statistics, cache)
    offload = Offload(N_THREADS, options.timeout_s)
    operations = Operations(live.root, contents, offload, ownership, source_bytes, statistics, reporter.attributes)
    page_cache = PageCache(operations.nodes, statistics, mountpoint)
    decoders.kernel = page_cache
    follower = Follower(live.units, contents, options.refresh_s, only_in_use=is_url(source))
    operations.following = follower
    _raise_file_limit()
    logging.getLogger("pyfuse3").addFilter(_is_news)
    eager.enable()
    _mount(operations, mountpoint, kernel_options(source, options))
    _allow_readahead(mountpoint)
    signals = _Signals(mountpoint, reporter, page_cache, ends_on_hangup)
    try:
        trio.run(_main, mountpoint, options.readahead_bytes, follower, offload, signals, ready)
    except BaseExceptionGroup as group:
        raise _first(group) from group
    finally:
        notify("STOPPING=1")
        page_cache.close()  # libfuse does not expect anything to be under way
        pyfuse3.close(unmount=True)
        page_cache.dismiss()
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


def _is_news(record: logging.LogRecord) -> bool:
    """Whether what pyfuse3 logs is no answer that nobody waits for any more, as when a program was killed."""
    return not (record.msg.endswith("fuse_reply_* failed with %s") and record.args == (os.strerror(errno.ENOENT),))


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
        connection = CONNECTIONS / mount.device.partition(":")[2]
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
    mountpoint: str,
    readahead_bytes: int,
    follower: Follower,
    offload: Offload,
    signals: _Signals,
    ready: Callable[[], None],
) -> None:
    async with trio.open_nursery() as nursery:
        # Who was answered once may send one.
        await nursery.start(signals.obey, nursery)
        nursery.start_soon(follower.run)
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


class _Signals:
    """What the daemon does at a signal."""

    def __init__(self, mountpoint: str, reporter: Reporter, page_cache: PageCache, ends_on_hangup: bool) -> None:
        self._mountpoint = mountpoint
        self._reporter = reporter
        self._page_cache = page_cache
        self._ends_on_hangup = ends_on_hangup
        self._has_terminal = _has_terminal()
        self._is_ending = False

    async def obey(
        self, nursery: trio.Nursery, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Wait for signals until cancelled; `nursery` is that of the whole session."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN or not self._ends_on_hangup:
            numbers.append(signal.SIGHUP)  # under nohup it stays ignored
        with trio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGUSR1:
                    log.info("%s: status: %s", self._mountpoint, self._reporter.status().line())
                elif number != signal.SIGHUP or not self._reopened():
                    self._end(nursery, signal.Signals(number).name)

    def _reopened(self) -> bool:
        """Whether a hangup was a request to open the log file anew, and not the end of the terminal."""
        if self._ends_on_hangup and self._has_terminal and not _has_terminal():
            return False
        is_file = logs.reopen()
        if is_file:
            log.info("%s: the log file was opened anew", self._mountpoint)
        return is_file or not self._ends_on_hangup

    def _end(self, nursery: trio.Nursery, name: str) -> None:
        if self._is_ending:
            log.warning("%s: %s again, ending without waiting", self._mountpoint, name)
            self._page_cache.stop()
            pyfuse3.terminate()
            nursery.cancel_scope.cancel()
            return
        self._is_ending = True
        log.info("%s: %s, unmounting", self._mountpoint, name)
        nursery.start_soon(self._unmount, nursery)

    async def _unmount(self, nursery: trio.Nursery) -> None:
        problem = await trio.to_thread.run_sync(
            lambda: mountpoints.unmount(self._mountpoint, lazy=False), abandon_on_cancel=True
        )
        if problem:
            log.warning("%s: in use (%s); detached, programs there get errors from now on", self._mountpoint, problem)
            # While requests are still answered, as what is given to the kernel may wait for that.
            await trio.to_thread.run_sync(self._page_cache.close, abandon_on_cancel=True)
            pyfuse3.terminate()
            await trio.sleep(ENDING_LIMIT_S)
            nursery.cancel_scope.cancel()


def _has_terminal() -> bool:
    """Whether there is a controlling terminal and it has not hung up."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first exception in nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
