"""mount(8), fstab, umount, findmnt and df with the type dafmount, as an administrator uses them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from machines import AS_USER, CELLS, REPOSITORY, Machine, let_users_in, write_archive, write_command, write_program
from mounts import LIMIT_S, wait_until

INCORRECT_USE = 1
MOUNT_FAILURE = 32

SOURCES = [
    "cells.daf.zip",
    "cells.dafs.zip#/alpha",
    "cells.dafs.zip#/beta/inner group",
    "my cells.daf.zip",
    "run#7.daf.zip",
    "a,b.daf.zip",
    "back\\slash.daf.zip",
    "tab\there.daf.zip",
    "żółw β.daf.zip",
]


def write_source(source: Path) -> None:
    """The archive of a source, with its group."""
    name, _, group = str(source).partition("#/")
    write_archive(Path(name), (group,))


def fstab_field(text: str) -> str:
    """A path as fstab(5) wants it."""
    for letter in "\\ \t":
        text = text.replace(letter, f"\\{ord(letter):03o}")
    return text


def write_fstab(place: Path, *lines: tuple[str | Path, str | Path, str, str]) -> Path:
    """A private table, for `mount -T`."""
    fields = (f"{fstab_field(str(line[0]))} {fstab_field(str(line[1]))} {line[2]} {line[3]} 0 0\n" for line in lines)
    path = place / "fstab"
    path.write_text("".join(fields))
    return path


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The only line that a command said, on its standard error."""
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Real mounts


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["dafmount", "fuse.dafmount"])
def test_a_mount_is_seen_by_the_usual_commands(
    kind: str, with_helper: Machine, archive: Path, mountpoint: Path
) -> None:
    with_helper.good("mount", "-t", kind, archive, mountpoint, "-o", "cache=1M,allow_other,noatime")
    assert with_helper.read(mountpoint / "axes" / "cell.txt") == CELLS
    assert with_helper.mounts() == [[str(mountpoint), str(archive), "fuse.dafmount"]]
    header, line = with_helper.good("df", "-t", "fuse.dafmount", "--output=source,fstype,target").splitlines()
    assert header.split()[:2] == ["Filesystem", "Type"]
    assert line.split() == [str(archive), "fuse.dafmount", str(mountpoint)]
    words = with_helper.good("findmnt", "-no", "OPTIONS", mountpoint).strip().split(",")
    assert {"ro", "nosuid", "nodev", "allow_other"} <= set(words)
    with_helper.unmounted(mountpoint)
    assert with_helper.mounts() == []


@pytest.mark.fuse
@pytest.mark.parametrize("name", SOURCES)
def test_any_name_of_a_source_works_with_mount_and_in_fstab(name: str, with_helper: Machine) -> None:
    source = with_helper.place / "data" / name
    write_source(source)
    mountpoint = with_helper.place / "mount point"
    mountpoint.mkdir()
    with_helper.good("mount", "-t", "dafmount", source, mountpoint)
    assert with_helper.read(mountpoint / "axes" / "cell.txt") == CELLS
    mounted = with_helper.mounts()
    with_helper.unmounted(mountpoint)

    table = write_fstab(with_helper.place, (source, mountpoint, "dafmount", "noauto,cache=1M"))
    with_helper.good("mount", "-T", table, mountpoint)
    assert with_helper.read(mountpoint / "axes" / "cell.txt") == CELLS
    assert with_helper.mounts() == mounted
    with_helper.unmounted(mountpoint)


@pytest.mark.fuse
def test_relative_paths_are_those_of_the_shell(with_helper: Machine, mountpoint: Path) -> None:
    write_archive(with_helper.place / "cells.dafs.zip", ("alpha", "beta"))
    with_helper.good("mount", "-t", "dafmount", "./cells.dafs.zip#/beta", "mnt", cwd=with_helper.place)
    assert with_helper.mounts() == [[str(mountpoint), f"{with_helper.place}/cells.dafs.zip#/beta", "fuse.dafmount"]]
    with_helper.unmounted(mountpoint)


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["dafmount", "fuse.dafmount"])
def test_mount_all_mounts_what_is_not_mounted_yet(kind: str, with_helper: Machine) -> None:
    write_archive(with_helper.place / "cells.dafs.zip", ("alpha", "beta"))
    lines = []
    for group in ("alpha", "beta", "later"):
        (with_helper.place / group).mkdir()
        options = "noauto" if group == "later" else "defaults,nofail,_netdev,x-systemd.automount,cache=1M"
        lines.append((f"{with_helper.place}/cells.dafs.zip#/{group}", with_helper.place / group, kind, options))
    table = write_fstab(with_helper.place, *lines)
    expected = [str(with_helper.place / "alpha"), str(with_helper.place / "beta")]
    for _ in range(2):
        with_helper.good("mount", "-T", table, "-a")
        assert [mount[0] for mount in with_helper.mounts()] == expected
    with_helper.good("umount", with_helper.place / "alpha", with_helper.place / "beta")


@pytest.mark.fuse
def test_a_busy_mount_stays_until_it_is_detached(with_helper: Machine, archive: Path, mountpoint: Path) -> None:
    with_helper.good("mount", "-t", "dafmount", archive, mountpoint)
    keep = subprocess.Popen(
        with_helper.command("tail", "-f", mountpoint / "axes" / "cell.txt", cwd=Path("/")),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert keep.stdout is not None
        assert keep.stdout.readline() == "a\n"
        refused = with_helper.run("umount", mountpoint)
        assert refused.returncode == MOUNT_FAILURE
        assert "busy" in refused.stderr
        assert with_helper.read(mountpoint / "axes" / "cell.txt") == CELLS
        with_helper.good("umount", "-l", mountpoint)
        assert with_helper.mounts() == []
        assert with_helper.servers() == 1, "it serves what is open"
    finally:
        with_helper.good("pkill", "tail")
        keep.communicate()
    wait_until(lambda: with_helper.servers() == 0, "ending")


@pytest.mark.fuse
def test_without_the_helper_mount_finds_the_command_in_the_path(
    machine: Machine, archive: Path, mountpoint: Path
) -> None:
    """After a mere `pip install`, mount.fuse3 runs the command; it says rw to every file system."""
    write_command(machine.place / "dafmount")
    machine.good("cp", machine.place / "dafmount", "/usr/sbin/dafmount")
    for options in ("cache=1M", "ro,nosuid,nodev,noauto,nofail,_netdev,x-systemd.automount,user"):
        machine.good("mount", "-t", "fuse.dafmount", archive, mountpoint, "-o", options)
        assert machine.read(mountpoint / "axes" / "cell.txt") == CELLS
        machine.unmounted(mountpoint)
    machine.good("mount", "-t", "fuse.dafmount", archive, mountpoint)
    refused = machine.run("mount", "-o", "remount", mountpoint)
    assert refused.returncode != 0
    assert "remount" in one_line(refused)
    machine.unmounted(mountpoint)


@pytest.mark.fuse
def test_a_mount_in_another_namespace_is_seen_there_alone(
    with_helper: Machine, archive: Path, mountpoint: Path
) -> None:
    command = with_helper.command("unshare", "--mount", "cat")
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdin is not None
        assert holder.stdout is not None
        holder.stdin.write(b"ready\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == b"ready\n"
        other = with_helper.good("pgrep", "--exact", "cat").split()[-1]
        with_helper.good("mount", "-N", other, "-t", "dafmount", archive, mountpoint)
        assert with_helper.mounts() == []
        there = ("nsenter", f"--target={other}", "--mount", "cat")
        assert with_helper.good(*there, mountpoint / "axes" / "cell.txt") == CELLS
        with_helper.good("umount", "-N", other, mountpoint)
        wait_until(lambda: with_helper.servers() == 0, "ending")
    finally:
        holder.communicate(timeout=LIMIT_S)


@pytest.mark.fuse
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write the table and be another user")
def test_a_user_may_mount_and_unmount_what_the_table_allows(with_helper: Machine, archive: Path) -> None:
    let_users_in(with_helper)
    mountpoint = Path("/mnt/theirs")
    with_helper.good("cp", archive, "/mnt")
    with_helper.good("mkdir", mountpoint)
    with_helper.good("chown", "nobody", mountpoint)
    with_helper.good("cp", "scripts/dafmount", "scripts/mount.dafmount", "/mnt")
    with_helper.good("ln", "-sf", "/mnt/mount.dafmount", "/sbin/mount.dafmount")
    table = write_fstab(with_helper.place, (Path("/mnt") / archive.name, mountpoint, "dafmount", "noauto,user"))
    with_helper.good("cp", table, "/etc/fstab")
    with_helper.good(*AS_USER, "mount", mountpoint, cwd=Path("/"))
    assert with_helper.good(*AS_USER, "cat", mountpoint / "axes" / "cell.txt", cwd=Path("/")) == CELLS
    with_helper.good(*AS_USER, "umount", mountpoint, cwd=Path("/"))
    assert with_helper.mounts() == []


# ---------------------------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.fuse
@pytest.mark.parametrize("kind", ["dafmount", "fuse.dafmount"])
def test_mounting_for_writing_is_refused(kind: str, with_helper: Machine, archive: Path, mountpoint: Path) -> None:
    for words in ("-o rw", "-w", "--rw", "-o cache=1M,rw", "-ocache=1M,rw", "--options=rw"):
        done = with_helper.run("mount", "-t", kind, archive, mountpoint, *words.split())
        assert done.returncode == INCORRECT_USE, words
        assert "read-only" in one_line(done), words
        assert with_helper.mounts() == [], words


@pytest.mark.fuse
def test_remounting_is_refused_and_changes_nothing(with_helper: Machine, archive: Path, mountpoint: Path) -> None:
    with_helper.good("mount", "-t", "dafmount", archive, mountpoint)
    before = with_helper.mounts()
    for words in ("remount", "remount,ro"):
        done = with_helper.run("mount", "-o", words, mountpoint)
        assert done.returncode == INCORRECT_USE
        assert "remount" in one_line(done)
    assert with_helper.mounts() == before
    with_helper.unmounted(mountpoint)


@pytest.mark.fuse
@pytest.mark.parametrize(
    ("source", "options", "status", "word"),
    [
        ("nowhere.daf.zip", "ro", MOUNT_FAILURE, "nowhere.daf.zip"),
        ("small.daf.zip", "cash=1M", INCORRECT_USE, "cash"),
        ("small.daf.zip", "cache=much", INCORRECT_USE, "much"),
        ("small.daf.zip#/group", "ro", INCORRECT_USE, "group"),
    ],
)
def test_what_cannot_be_mounted_is_one_line_and_a_code_of_mount(
    source: str, options: str, status: int, word: str, with_helper: Machine, archive: Path, mountpoint: Path
) -> None:
    assert archive.exists()
    done = with_helper.run("mount", "-t", "dafmount", with_helper.place / source, mountpoint, "-o", options)
    assert word in one_line(done)
    assert done.returncode == status
    assert with_helper.mounts() == []


# ---------------------------------------------------------------------------------------------------------------------
# What the helper makes of its arguments


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """The helper beside a command that writes down its arguments, one a line, and ends with the code in `status`."""
    helper = tmp_path / "mount.dafmount"
    helper.write_bytes((REPOSITORY / "scripts" / "mount.dafmount").read_bytes())
    helper.chmod(0o755)
    write_program(tmp_path / "dafmount", 'cd "${0%/*}"; printf "%s\\n" "$@" >arguments; exit "$(cat status)"')
    (tmp_path / "status").write_text("0")
    return helper


def arguments_given(helper: Path) -> list[str]:
    return (helper.parent / "arguments").read_text().splitlines()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], []),
        (["-o", "rw"], []),
        (["-o", "ro,cache=1M"], ["-o", "ro,cache=1M"]),
        (["-o", "rw,noexec,cache=1M", "-t", "dafmount"], ["-o", "noexec,cache=1M"]),
        (["-n", "-s", "-o", "rw,fsname=a\\,b"], ["-o", "fsname=a\\,b"]),
        (["-o", "ro", "-o", "cache=1M"], ["-o", "ro,cache=1M"]),
        (["-o", "rwx=1"], ["-o", "rwx=1"]),
    ],
)
def test_options_arrive_as_they_were_said(given: list[str], expected: list[str], helper: Path) -> None:
    source = "https://host:8080//data/a%20b.dafs.zip#/g, $(h)"
    done = subprocess.run([helper, source, "/mnt/x y", *given], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert arguments_given(helper) == [*expected, "--", source, "/mnt/x y"]


def test_a_fake_mount_only_says_what_it_would_do(helper: Path) -> None:
    done = subprocess.run([helper, "a b", "/mnt", "-fnv", "-o", "ro"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"mount.dafmount: {helper.parent}/dafmount -o ro -- a b /mnt\n"
    assert not (helper.parent / "arguments").exists()


@pytest.mark.parametrize(("status", "expected"), [(0, 0), (2, INCORRECT_USE), (1, MOUNT_FAILURE), (8, MOUNT_FAILURE)])
def test_the_exit_code_is_one_that_mount_knows(status: int, expected: int, helper: Path) -> None:
    (helper.parent / "status").write_text(str(status))
    done = subprocess.run([helper, "a", "/mnt"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (expected, "", "")


@pytest.mark.parametrize("given", ["", "a", "a /mnt -x", "a /mnt b", "a /mnt -o"])
def test_a_wrong_use_of_the_helper_says_so(given: str, helper: Path) -> None:
    done = subprocess.run([helper, *given.split()], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (INCORRECT_USE, "")
    assert done.stderr.count("\n") == 1
    assert not (helper.parent / "arguments").exists()


def test_a_missing_command_is_named(helper: Path) -> None:
    (helper.parent / "dafmount").unlink()
    done = subprocess.run([helper, "a", "/mnt"], capture_output=True, text=True, check=False)
    assert done.returncode == INCORRECT_USE
    assert f"{helper.parent}/dafmount" in done.stderr
