"""The units, and automounts by systemd and autofs, on a booted machine: a container that sees a copy of this one.

Mounts are made by systemd there, so that its sandbox and its process groups are the real ones.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from machines import CELLS, REPOSITORY, Machine, children, write_archive, write_command
from mounts import LIMIT_S, wait_until

UNITS = REPOSITORY / "systemd"
EXAMPLES = sorted((UNITS / "examples").glob("*.*mount"))
DEVICES = [device for device in ("/dev/fuse", "/dev/autofs") if os.path.exists(device)]


# ---------------------------------------------------------------------------------------------------------------------
# Without a boot

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")


def verified(unit: Path) -> str:
    """What systemd has to say against a unit."""
    environment = os.environ | {"MANPATH": f"{REPOSITORY / 'dafmount' / 'man'}:"}
    command = ["systemd-analyze", "verify", unit]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return f"{done.returncode} {done.stdout}{done.stderr}".strip()


def escaped(path: str, kind: str) -> str:
    """The name of the unit for a mount point."""
    command = ["systemd-escape", "--path", kind, path]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout.strip()


@needs_analyze
@pytest.mark.parametrize("unit", EXAMPLES, ids=lambda unit: unit.name)
def test_an_example_is_correct_and_named_for_its_mount_point(unit: Path) -> None:
    assert verified(unit) == "0"
    (where,) = [line.partition("=")[2] for line in unit.read_text().splitlines() if line.startswith("Where=")]
    assert escaped(where, f"--suffix={unit.suffix[1:]}") == unit.name


@needs_analyze
@pytest.mark.parametrize("mountpoint", ["/mnt/cells", "/srv/my data/x-ray"])
def test_the_service_is_correct(mountpoint: str, tmp_path: Path) -> None:
    command = tmp_path / "dafmount"
    write_command(command)
    unit = tmp_path / escaped(mountpoint, "--template=dafmount@.service")
    unit.write_text((UNITS / "dafmount@.service").read_text().replace("/usr/local/bin/dafmount", str(command)))
    assert verified(unit) == "0"


# ---------------------------------------------------------------------------------------------------------------------
# Booted


def why_nothing_boots() -> str | None:
    if os.geteuid() != 0:
        return "only root can boot a container"
    if shutil.which("systemd-nspawn") is None:
        return "systemd-nspawn (systemd-container) is not installed"
    if "/dev/fuse" not in DEVICES:
        return "there is no /dev/fuse"
    return None


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A machine that systemd runs, where dafmount is installed."""
    if reason := why_nothing_boots():
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("booted")
    container = subprocess.Popen(
        ["unshare", "--mount", "sh", "-euc", boot_script(place)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path_factory.mktemp("root"),
    )
    try:
        found: list[int] = []
        wait_until(lambda: container.poll() is not None or has_started(container.pid, found), "booting")
        if not found:
            pytest.skip(f"systemd does not boot in a container here: {container.communicate()[0]}")
        machine = Machine(found[0], place)
        wait_until(lambda: machine.run("systemctl", "is-active", "basic.target").stdout == "active\n", "booting")
        install(machine)
        yield machine
        print(machine.run("journalctl", "--no-pager", "--output=cat").stdout)
    finally:
        if found:
            Machine(found[0], place).run("systemctl", "poweroff", "--force")
        try:
            container.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            for child in children(container.pid):  # systemd outlives systemd-nspawn and holds all mounts
                os.kill(child, signal.SIGKILL)
            container.kill()
            container.communicate()


def boot_script(place: Path) -> str:
    """Covers / with a writable copy, in the working directory, and boots it; `place` is the same inside and outside."""
    shown = [f"--bind-ro={path}" for path in (REPOSITORY, sys.base_prefix, sys.prefix)]
    shown += [f"--bind={path}" for path in (place, *DEVICES)]
    words = ["--quiet", "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no", *shown]
    return f"""
        mount -t tmpfs tmpfs .
        cd "$PWD"
        mkdir upper work root
        mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
        exec systemd-nspawn --boot --directory=root {shlex.join(words)} -- --unit=basic.target
    """


def has_started(container: int, found: list[int]) -> bool:
    """Whether systemd-nspawn has started systemd, whose process is then put into `found`."""
    for child in children(container):
        with suppress(OSError):  # it just ended
            if Path(f"/proc/{child}/comm").read_text() == "systemd\n":
                found.append(child)
    return bool(found)


def install(machine: Machine) -> None:
    scripts = machine.place / "scripts"
    scripts.mkdir()
    shutil.copy(REPOSITORY / "scripts" / "mount.dafmount", scripts)
    write_command(scripts / "dafmount")
    machine.good("ln", "-sf", scripts / "mount.dafmount", "/sbin/mount.dafmount")
    machine.good("ln", "-sf", scripts / "dafmount", "/usr/local/bin/dafmount")
    for unit in (UNITS / "dafmount@.service", *EXAMPLES):
        machine.good("cp", unit, "/etc/systemd/system")
    machine.good("mkdir", "-p", "/srv/my data", "/srv/data", "/etc/dafmount")
    archive = write_archive(machine.place / "cells.dafs.zip", ("pbmc", "other group"))
    machine.good("cp", archive, "/srv/data")
    machine.good("cp", archive, "/srv/my data/run#7.dafs.zip")
    machine.good("systemctl", "daemon-reload")


def write_file(machine: Machine, path: str, *lines: str) -> None:
    """A file of the machine's own."""
    local = machine.place / "file"
    local.write_text("".join(f"{line}\n" for line in lines))
    machine.good("cp", local, path)


def is_active(machine: Machine, unit: str) -> bool:
    return machine.run("systemctl", "is-active", unit).stdout == "active\n"


def journal(machine: Machine, unit: str) -> str:
    return machine.good("journalctl", "--no-pager", "--output=cat", f"--unit={unit}")


def test_the_service_mounts_for_all_users_and_survives_a_crash(booted: Machine) -> None:
    write_file(booted, "/etc/dafmount/mnt-pbmc.conf", 'SOURCE="/srv/my data/run#7.dafs.zip#/other group"')
    unit = "dafmount@mnt-pbmc.service"
    cells = Path("/mnt/pbmc/axes/cell.txt")
    booted.good("systemctl", "start", unit)
    assert booted.good("setpriv", "--reuid=nobody", "--clear-groups", "cat", cells) == CELLS

    booted.good("systemctl", "kill", "--signal=KILL", unit)
    wait_until(lambda: not is_active(booted, unit), "dying")
    wait_until(lambda: is_active(booted, unit), "restarting")
    assert booted.read(cells) == CELLS
    booted.good("systemctl", "reload", unit)
    assert is_active(booted, unit)

    booted.good("systemctl", "stop", unit)
    assert booted.mounts() == []
    assert booted.run("systemctl", "is-failed", unit).stdout == "inactive\n"


def test_a_service_in_use_ends_all_the_same(booted: Machine) -> None:
    write_file(booted, "/etc/dafmount/mnt-busy.conf", "SOURCE=/srv/data/cells.dafs.zip", "OPTIONS=cache=1M")
    unit = "dafmount@mnt-busy.service"
    booted.good("systemctl", "start", unit)
    command = booted.command("tail", "-f", "/mnt/busy/pbmc/axes/cell.txt", cwd=Path("/"))
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keep:
        assert keep.stdout is not None
        assert keep.stdout.readline() == b"a\n"
        booted.good("systemctl", "stop", unit)
        assert booted.mounts() == []
        booted.good("pkill", "tail")
    assert booted.run("systemctl", "is-failed", unit).stdout == "inactive\n"


def test_a_service_without_a_source_fails_with_its_line_in_the_journal(booted: Machine) -> None:
    write_file(booted, "/etc/dafmount/mnt-none.conf", "SOURCE=/srv/data/nowhere.daf.zip")
    unit = "dafmount@mnt-none.service"
    assert booted.run("systemctl", "start", unit).returncode != 0
    assert "dafmount: /srv/data/nowhere.daf.zip: no such file or directory\n" in journal(booted, unit)
    booted.good("systemctl", "stop", unit)


def test_a_service_whose_command_line_is_wrong_is_not_started_again(booted: Machine) -> None:
    write_file(booted, "/etc/dafmount/mnt-wrong.conf", "SOURCE=/srv/data/cells.dafs.zip", "OPTIONS=cash=1M")
    unit = "dafmount@mnt-wrong.service"
    assert booted.run("systemctl", "start", unit).returncode != 0
    assert booted.run("systemctl", "is-failed", unit).stdout == "failed\n"
    booted.good("systemctl", "reset-failed", unit)


def test_the_example_units_mount_on_the_first_access(booted: Machine) -> None:
    booted.good("systemctl", "start", "mnt-cells.automount")
    assert booted.mounts() == []
    assert booted.read(Path("/mnt/cells/axes/cell.txt")) == CELLS
    assert booted.mounts() == [["/mnt/cells", "/srv/data/cells.dafs.zip#/pbmc", "fuse.dafmount"]]
    assert is_active(booted, "mnt-cells.mount")
    booted.good("systemctl", "stop", "mnt-cells.automount", "mnt-cells.mount")
    assert booted.mounts() == []


def test_a_line_in_fstab_mounts_on_the_first_access_and_unmounts_when_unused(booted: Machine) -> None:
    words = "noauto,allow_other,nofail,_netdev,x-systemd.automount,x-systemd.idle-timeout=1s"
    write_file(booted, "/etc/fstab", f"/srv/my\\040data/run#7.dafs.zip#/pbmc /mnt/tab dafmount {words} 0 0")
    booted.good("systemctl", "daemon-reload")
    booted.good("systemctl", "start", "mnt-tab.automount")
    for _ in range(2):
        assert booted.read(Path("/mnt/tab/axes/cell.txt")) == CELLS
        wait_until(lambda: booted.mounts() == [], "unmounting what is unused")
    booted.good("systemctl", "stop", "mnt-tab.automount")


@pytest.mark.skipif(shutil.which("automount") is None, reason="autofs is not installed")
@pytest.mark.skipif("/dev/autofs" not in DEVICES, reason="this kernel has no autofs")
def test_autofs_mounts_what_its_map_says(booted: Machine) -> None:
    booted.good("mkdir", "-p", "/srv/lab", "/mnt/daf")
    write_archive(booted.place / "one.daf.zip")
    booted.good("cp", booted.place / "one.daf.zip", "/srv/lab")
    options = "-fstype=dafmount,allow_other,cache=1M"
    write_file(booted, "/etc/auto.master", "/mnt/daf /etc/auto.daf --timeout=60", "/- /etc/auto.direct --timeout=60")
    write_file(booted, "/etc/auto.direct", f"/mnt/direct {options} :/srv/lab/one.daf.zip")
    write_file(
        booted,
        "/etc/auto.daf",
        f'odd {options} ":/srv/my data/run#7.dafs.zip#/other group"',
        f"* {options} :/srv/lab/&.daf.zip",
    )
    booted.good("systemd-run", "--quiet", "--unit=automounter", "automount", "--foreground", "--dont-check-daemon")
    expected: Sequence[str] = ("/mnt/daf/one", "/mnt/daf/odd", "/mnt/direct")
    wait_until(lambda: booted.run("findmnt", "-t", "autofs", "/mnt/direct").returncode == 0, "starting autofs")
    for place in expected:
        assert booted.read(Path(place, "axes", "cell.txt")) == CELLS
    assert booted.run("ls", "/mnt/daf/none").returncode != 0
    assert sorted(mount[0] for mount in booted.mounts()) == sorted(expected)
    booted.good("umount", *expected)
    booted.good("systemctl", "stop", "automounter")
