"""A machine of its own for each test that installs or mounts: what it does to /sbin and /etc, no one else sees.

It is a mount and process namespace in which the system's directories are covered by writable copies (overlayfs). When
it ends, its processes end and its mounts are gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import REPOSITORY, Machine, children, write_archive, write_command

COVERED = ("/usr/sbin", "/etc")


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine without the helper of mount(8)."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    unshare = ["unshare", *user, "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    holder = subprocess.Popen([*unshare, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"ready\n")
        holder.stdin.flush()
        if not holder.stdout.readline():
            _, why = holder.communicate()
            pytest.skip(f"no namespaces here: {why.decode().strip()}")
        made = Machine(children(holder.pid)[0], tmp_path)
        _cover(made)
        yield made
    finally:
        holder.kill()
        holder.communicate()


def _cover(machine: Machine) -> None:
    machine.run("umount", "-a", "-l", "-t", "fuse.dafmount")  # copies of the mounts that others have outside
    above = machine.place / "above"
    above.mkdir()
    _must(machine, "mount", "-t", "tmpfs", "tmpfs", above)
    for path in (*COVERED, *_closed_to_users()):
        upper, work = above / path[1:] / "upper", above / path[1:] / "work"
        _must(machine, "mkdir", "-p", upper, work)
        words = f"lowerdir={path},upperdir={upper},workdir={work}"
        _must(machine, "mount", "-t", "overlay", "overlay", "-o", words, path)
        _must(machine, "chmod", "a+x", path)


def _closed_to_users() -> list[str]:
    """Directories above Python and the checkout that other users may not enter, such as /root: the outermost."""
    closed = set()
    for path in (Path(sys.base_prefix), Path(sys.prefix), REPOSITORY):
        above = [str(place) for place in reversed(path.parents) if not place.stat().st_mode & 0o001]
        closed.update(above[:1])
    return sorted(closed)


def _must(machine: Machine, *command: str | Path) -> None:
    done = machine.run(*command)
    if done.returncode:
        pytest.skip(f"no copies of the system's directories here: {done.stderr.strip()}")


@pytest.fixture
def with_helper(machine: Machine) -> Machine:
    """A machine where mount(8) finds mount.dafmount, which is in a directory with the command, as in a checkout."""
    scripts = machine.place / "scripts"
    scripts.mkdir()
    shutil.copy(REPOSITORY / "scripts" / "mount.dafmount", scripts)
    write_command(scripts / "dafmount")
    for name in ("mount.dafmount", "mount.fuse.dafmount"):
        machine.good("ln", "-s", scripts / "mount.dafmount", f"/sbin/{name}")
    return machine


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    return write_archive(tmp_path / "small.daf.zip")


@pytest.fixture
def mountpoint(tmp_path: Path) -> Path:
    place = tmp_path / "mnt"
    place.mkdir()
    return place
