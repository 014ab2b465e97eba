"""What `pip install`, scripts/install and scripts/uninstall leave on a machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from machines import CELLS, REPOSITORY, SCRIPTS, Machine, write_archive

MAN = REPOSITORY / "dafmount" / "man"
COMPLETIONS = REPOSITORY / "dafmount" / "completions"
INSTALL_LIMIT_S = 500


def pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=INSTALL_LIMIT_S,
    )


# ---------------------------------------------------------------------------------------------------------------------
# pip


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", place, REPOSITORY)
    (found,) = place.iterdir()
    return found


def test_the_wheel_holds_pages_and_completions_once_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for place in (MAN, COMPLETIONS):
        for path in place.rglob("*"):
            if path.is_file():
                assert sum(Path(name).name == path.name for name in names) == 1, path
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"dafmount"}


def test_pip_install_gives_working_commands(wheel: Path, tmp_path: Path) -> None:
    place = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=120)
    pip("--python", place / "bin" / "python", "install", "--quiet", "--no-deps", wheel)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # what dafmount depends on
    for command in SCRIPTS:
        for flag, word in (("--version", command), ("--help", "usage: ")):
            done = subprocess.run(
                [place / "bin" / command, flag], capture_output=True, text=True, check=False, timeout=60, cwd=tmp_path
            )
            assert (done.returncode, done.stderr) == (0, "")
            assert done.stdout.startswith(word)
    if shutil.which("man"):
        environment = {**os.environ, "PATH": f"{place}/bin:/usr/bin:/bin"}
        environment.pop("MANPATH", None)
        found = subprocess.run(
            ["man", "--where", "dafmount"], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert found.stdout.strip() == f"{place}/share/man/man8/dafmount.8"


# ---------------------------------------------------------------------------------------------------------------------
# scripts/install


def script(name: str, *arguments: str) -> None:
    done = subprocess.run(
        [REPOSITORY / "scripts" / name, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=INSTALL_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.fuse
@pytest.mark.timeout(2 * INSTALL_LIMIT_S)
def test_a_staged_installation_works_where_it_is_moved_and_vanishes_without_a_trace(
    machine: Machine, mountpoint: Path
) -> None:
    prefix, stage = machine.place / "prefix", machine.place / "stage"
    before = listing(machine)
    script("install", f"PREFIX={prefix}", f"DESTDIR={stage}")
    assert {path.name for path in stage.iterdir()} == {"sbin", "etc", prefix.parts[1]}
    staged = stage / prefix.relative_to("/")
    assert {path.name for path in (staged / "bin").iterdir()} == set(SCRIPTS)
    assert mentions(stage) == []

    # As a package manager would unpack it.
    machine.good("cp", "-a", staged, prefix)
    machine.good("cp", "-a", f"{stage}/etc/.", "/etc")
    machine.good("cp", "-a", f"{stage}/sbin/.", "/usr/sbin")
    shutil.rmtree(stage)
    for command in SCRIPTS:
        assert machine.good(prefix / "bin" / command, "--version").startswith(f"{command} ")
    write_archive(machine.place / "cells.dafs.zip", ("alpha", "beta"))
    source = f"{machine.place}/cells.dafs.zip#/beta"
    for kind in ("dafmount", "fuse.dafmount"):
        machine.good("mount", "-t", kind, source, mountpoint, "-o", "cache=1M")
        assert machine.read(mountpoint / "axes" / "cell.txt") == CELLS
        assert machine.mounts() == [[str(mountpoint), source, "fuse.dafmount"]]
        machine.unmounted(mountpoint)
    check_units(machine, prefix)
    pages = machine.good("man", "-M", prefix / "share" / "man", "-w", *sorted(SCRIPTS), "mount.dafmount").split()
    assert len(pages) == len(SCRIPTS) + 1

    machine.good(REPOSITORY / "scripts" / "uninstall", f"PREFIX={prefix}")
    assert not prefix.exists()
    assert listing(machine) == before


def listing(machine: Machine) -> set[str]:
    """What is outside of the prefix."""
    return set(machine.good("find", "/usr/sbin", "/etc").splitlines())


def mentions(stage: Path) -> list[Path]:
    """The files that name the place where they are not going to be."""
    return [path for path in stage.rglob("*") if path.is_file() and bytes(stage) in path.read_bytes()]


def check_units(machine: Machine, prefix: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        return
    unit = "/etc/systemd/system/dafmount@mnt-cells.service"
    machine.good("ln", "-s", "dafmount@.service", unit)
    environment = {"MANPATH": str(prefix / "share" / "man")}
    assert machine.good("systemd-analyze", "verify", unit, environment=environment) == ""
    machine.good("rm", unit)


def test_uninstall_of_nothing_says_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [REPOSITORY / "scripts" / "uninstall", f"PREFIX={tmp_path}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr


@pytest.mark.parametrize("name", ["install", "uninstall"])
@pytest.mark.parametrize("argument", ["PREFIX=relative", "--help", "HOME=/tmp"])
def test_an_argument_that_is_not_understood_changes_nothing(name: str, argument: str) -> None:
    done = subprocess.run([REPOSITORY / "scripts" / name, argument], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert argument in done.stderr
    assert "usage" in done.stderr
