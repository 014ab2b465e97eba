"""Mounting where one is not root: the recipes of the README that need nothing but the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from machines import AS_USER, CELLS, Machine, let_users_in, write_command


@pytest.mark.fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_user_without_fusermount3_mounts_in_a_namespace_of_their_own(machine: Machine, archive: Path) -> None:
    let_users_in(machine)
    machine.good("mount", "--bind", "/dev/null", "/usr/bin/fusermount3")
    write_command(machine.place / "dafmount")
    machine.good("cp", archive, machine.place / "dafmount", "/mnt")
    machine.good("mkdir", "/mnt/cells")
    program = """
        cd /mnt
        ./dafmount small.daf.zip cells
        cat cells/axes/cell.txt
        findmnt --noheadings --types fuse.dafmount --output SOURCE
        umount cells
    """
    unshare = ("unshare", "--user", "--map-root-user", "--mount")
    shown = machine.good(*AS_USER, *unshare, "sh", "-ec", program, cwd=Path("/"))
    assert shown == f"{CELLS}/mnt/small.daf.zip\n"
    assert machine.mounts() == [], "it is to be seen in that namespace alone"

    direct = machine.run(*AS_USER, "/mnt/dafmount", "/mnt/small.daf.zip", "/mnt/cells", cwd=Path("/"))
    assert direct.returncode == 8
    assert "fusermount3" in direct.stderr


@pytest.mark.fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_mount_of_a_namespace_ends_with_it(machine: Machine, archive: Path) -> None:
    let_users_in(machine)
    write_command(machine.place / "dafmount")
    machine.good("cp", archive, machine.place / "dafmount", "/mnt")
    machine.good("mkdir", "/mnt/cells")
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
    program = "/mnt/dafmount /mnt/small.daf.zip /mnt/cells && cat /mnt/cells/axes/cell.txt"
    assert machine.good(*AS_USER, *unshare, "sh", "-c", program, cwd=Path("/")) == CELLS
    assert machine.servers() == 0
