"""The mount point: whether it can be used, what is mounted there, and taking a mount away.

Knows /proc/self/mountinfo, fusermount3 and umount; neither pyfuse3 nor trio, so that it may be used before the fork.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dafmount.errors import MountFailed
from dafmount.mount.ask import ANSWER_LIMIT_S, ask

FILE_SYSTEM = "fuse.dafmount"
"""The type in /proc/mounts."""

FUSE_DEVICE = "/dev/fuse"

DEAD = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""What a mount answers whose daemon has ended, the second just after it was killed."""

AUTOMOUNT = "autofs"
"""What systemd's automount units, and autofs' direct maps, mount where something is to be mounted when it is needed."""

_MOUNTINFO = Path("/proc/self/mountinfo")
_FUSE_CONF = Path("/etc/fuse.conf")
_UNMOUNT_LIMIT_S = 30
_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """One line of mountinfo."""

    mountpoint: str
    file_system: str
    source: str
    device: str
    """Major and minor number, such as `0:52`."""


def mounts() -> Iterator[Mount]:
    """Everything mounted in this mount namespace, in the order of mounting."""
    for line in os.fsdecode(_MOUNTINFO.read_bytes()).splitlines():
        left, _, right = line.partition(" - ")
        before, after = left.split(" "), right.split(" ")
        if len(before) > 4 and len(after) > 1:
            yield Mount(_unescape(before[4]), after[0], _unescape(after[1]), before[2])


def mount_at(mountpoint: str) -> Mount | None:
    """What is mounted at an absolute path; the uppermost of several."""
    found = None
    for mount in mounts():
        if mount.mountpoint == mountpoint:
            found = mount
    return found


def _unescape(field: str) -> str:
    """Mountinfo writes space, tab, newline, backslash and, in sources, # as octal."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)


def prepare(mountpoint: str, *, nonempty: bool, kernel_words: tuple[str, ...]) -> str:
    """The absolute path of a mount point that can be used; a dead mount of ours is taken away first.

    Raises MountFailed with one line that says what is wrong and what to do.
    """
    path = os.path.abspath(mountpoint)
    _recover(path)
    path = _real_directory(path)
    mount = mount_at(path)
    if mount is not None and mount.file_system == AUTOMOUNT:
        _check_fuse(path, kernel_words)
        return path  # an automounter has asked for us: reading the directory would wait for our own success
    if mount is not None and not nonempty:
        what = f"{mount.source} ({mount.file_system})"
        raise MountFailed(f"{path}: {what} is mounted here already; unmount it first, or say -o nonempty")
    try:
        with os.scandir(path) as entries:
            is_empty = next(entries, None) is None
    except OSError as error:
        raise MountFailed(f"{path}: {os.strerror(error.errno or 0)}") from error
    if not is_empty and not nonempty:
        raise MountFailed(f"{path}: not empty; a mount would hide what is there (-o nonempty does it all the same)")
    _check_fuse(path, kernel_words)
    return path


def _real_directory(path: str) -> str:
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in DEAD:
            raise MountFailed(f"{path}: dead: the program that served it has ended; umount -l {path}") from error
        raise MountFailed(f"{path}: {os.strerror(error.errno or 0)}") from error
    if not stat.S_ISDIR(status.st_mode):
        raise MountFailed(f"{path}: not a directory")
    return os.path.realpath(path)


def _recover(path: str) -> None:
    """Take away mounts of ours whose daemon is dead. The kernel may remember their root, so that stat tells nothing."""
    real = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    while (mount := mount_at(real)) is not None and mount.file_system == FILE_SYSTEM:
        try:
            ask(real, "user.dafmount.pid")
            return
        except TimeoutError as error:
            raise MountFailed(
                f"{real}: {mount.source} is mounted here, and its daemon has not answered within {ANSWER_LIMIT_S:g} s"
            ) from error
        except OSError as error:
            if error.errno not in DEAD:
                return
        problem = unmount(real, lazy=True)
        if problem:
            raise MountFailed(f"{real}: a dead mount lies here and cannot be taken away: {problem}")


def _check_fuse(path: str, kernel_words: tuple[str, ...]) -> None:
    if not os.path.exists(FUSE_DEVICE):
        raise MountFailed("/dev/fuse is missing: load the kernel module (modprobe fuse), or give it to the container")
    if not os.access(FUSE_DEVICE, os.R_OK | os.W_OK):
        raise MountFailed("/dev/fuse: permission denied; it is for root alone on this machine")
    if os.geteuid() == 0:
        return
    if shutil.which("fusermount3") is None:
        raise MountFailed("fusermount3 is missing, without which only root can mount; install the package fuse3")
    if not os.access(path, os.W_OK):
        raise MountFailed(f"{path}: permission denied; an ordinary user mounts only where it may write")
    if {"allow_other", "allow_root"} & {word.partition("=")[0] for word in kernel_words} and not _user_allow_other():
        raise MountFailed("allow_other needs the line user_allow_other in /etc/fuse.conf, which root can add")


def _user_allow_other() -> bool:
    try:
        lines = _FUSE_CONF.read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.strip() == "user_allow_other" for line in lines)


def unmount(path: str, *, lazy: bool) -> str:
    """Take a mount away; the empty string, or why it cannot be."""
    # umount(8) asks the file system what it is, and waits for ever where the daemon hangs.
    if shutil.which("fusermount3") or os.geteuid() != 0:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), "--", path]
    else:
        command = ["umount", *(["-l"] if lazy else []), "--", path]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_UNMOUNT_LIMIT_S, check=False
        )
    except FileNotFoundError:
        return f"{command[0]} is missing"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not end within {_UNMOUNT_LIMIT_S} s"
    if done.returncode == 0:
        return ""
    return " ".join(done.stderr.split()) or f"{command[0]} ended with code {done.returncode}"
