"""The command that takes a mount away: what is there, who uses it, and waiting until its daemon is gone."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from pathlib import Path

from dafmount.mount import mountpoint
from dafmount.mount.ask import ask
from dafmount.mount.mountpoint import FILE_SYSTEM
from dafmount.mount.status import PREFIX, holding

DAEMON_LIMIT_S = 30.0

_MAX_NAMED = 5
_PROCESSES = Path("/proc")


def take_away(path: str) -> str:
    """Unmount what is mounted at `path` and wait until its daemon has ended; the empty string, or why it cannot be."""
    place = _mounted_path(path)
    mount = mountpoint.mount_at(place)
    if mount is None:
        above = holding(place)
        inside = f"; it lies in the mount at {above.mountpoint}" if above is not None else ""
        return f"{place}: nothing is mounted here{inside}"
    if mount.file_system != FILE_SYSTEM:
        return f"{place}: {mount.source} ({mount.file_system}) is mounted here, which is no dafmount; use umount"
    os.chdir("/")  # whoever calls from inside the mount must not be kept from it by this very process
    pid, is_dead = _daemon(place)
    end = _pidfd(pid)
    try:
        problem = mountpoint.unmount(place, lazy=is_dead)
        if problem:
            return _explained(place, problem)
        if end is not None and not select.select([end], [], [], DAEMON_LIMIT_S)[0]:
            return f"{place}: unmounted, but its daemon (process {pid}) has not ended within {DAEMON_LIMIT_S:g} s"
    finally:
        if end is not None:
            os.close(end)
    return ""


def users(place: str) -> list[str]:
    """Which processes use a mount, such as `bash (1234)`, as far as this user may see."""
    found = []
    for process in _processes():
        try:
            if any(used == place or used.startswith(place + "/") for used in _used(process)):
                found.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
        except OSError:  # it ended, or belongs to another user
            continue
    return found


def _mounted_path(path: str) -> str:
    """The path as mountinfo has it, without asking what is mounted there: that may be dead."""
    absolute = os.path.abspath(path)
    if mountpoint.mount_at(absolute) is not None:
        return absolute
    return os.path.realpath(absolute)


def _daemon(place: str) -> tuple[int | None, bool]:
    """The daemon's process, where it can be told, and whether it is dead."""
    try:
        return int(ask(place, PREFIX + "pid")), False
    except OSError as error:
        return None, error.errno in mountpoint.DEAD
    except ValueError:
        return None, False


def _pidfd(pid: int | None) -> int | None:
    """A descriptor that becomes readable at the end of a daemon of ours.

    The number that the daemon gave may mean another process here, as in a container, which does not hold /dev/fuse.
    """
    if pid is None:
        return None
    try:
        end = os.pidfd_open(pid)
    except OSError:
        return None
    if mountpoint.FUSE_DEVICE in _links(_PROCESSES / str(pid) / "fd"):
        return end
    os.close(end)
    return None


def _explained(place: str, problem: str) -> str:
    if "busy" not in problem:
        return f"{place}: {problem}"
    using = users(place)
    command = "umount -l" if os.geteuid() == 0 else "fusermount3 -uz"
    detach = f"{command} {place} detaches it all the same"
    if not using:
        return f"{place}: in use, by whom cannot be seen ('fuser -vm {place}' as root may tell); {detach}"
    more = f" and {len(using) - _MAX_NAMED} more" if len(using) > _MAX_NAMED else ""
    return f"{place}: in use by {', '.join(using[:_MAX_NAMED])}{more}; {detach}"


def _processes() -> Iterator[Path]:
    for entry in _PROCESSES.iterdir():
        if entry.name.isdecimal():
            yield entry


def _used(process: Path) -> Iterator[str]:
    """Paths of the working directory, the root, open and mapped files of a process."""
    for name in ("cwd", "root", "exe"):
        try:
            yield os.readlink(process / name)
        except OSError:
            continue
    yield from _links(process / "fd")
    yield from _links(process / "map_files")


def _links(directory: Path) -> Iterator[str]:
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        try:
            yield os.readlink(directory / name)
        except OSError:
            continue
