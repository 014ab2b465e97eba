"""What SECURITY.md promises, on real mounts of sources that mean harm.

Its other promises are tested with the modules that keep them.
"""

from __future__ import annotations

import ast
import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
from web import serving

import dafmount
from mounts import DAFMOUNT, LIMIT_S, Mounted, run_dafmount, write_daf

pytestmark = pytest.mark.fuse

SECRET = b"nobody shall see this"
MEMORY_LIMIT_BYTES = 1 << 30


def entry(name: str, mode: int = stat.S_IFREG | 0o644) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system = 3
    info.external_attr = mode << 16
    return info


def everything(root: Path) -> dict[str, os.stat_result]:
    """What a mount shows, links not followed."""
    found = {}
    for directory, directories, names in os.walk(root):
        for name in [*directories, *names]:
            path = Path(directory) / name
            found[str(path.relative_to(root))] = path.lstat()
    return found


def check_harmless(root: Path) -> None:
    """Only plain files and directories, without setuid bits, and none with the secret."""
    for path, status in everything(root).items():
        assert stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode), path
        assert status.st_mode & 0o7222 == 0, path
        if stat.S_ISREG(status.st_mode):
            assert SECRET not in (root / path).read_bytes(), path


def test_names_links_and_devices_of_an_archive_lead_nowhere(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    archive = tmp_path / "x.daf.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("daf.json", '{"version":[1,1]}\n')
        for name in ("../up.txt", "a/../../up.txt", "/abs.txt", "a/./../../../up.txt"):
            stream.writestr(entry(name), b"climbs")
        for name, target in (
            ("link-up", "../secret.txt"), ("link-abs", str(tmp_path / "secret.txt")),
            ("link-proc", "/proc/self/environ"), ("a/link-up", "../../secret.txt"), ("link-self", "link-self"),
            ("link-in", "notes.txt"),
        ):  # fmt: skip
            stream.writestr(entry(name, stat.S_IFLNK | 0o777), target)
        stream.writestr(entry("notes.txt"), b"inside")
        stream.writestr(entry("setuid.sh", stat.S_IFREG | 0o6755), b"#!/bin/sh\n")
        for name, kind in (("device", stat.S_IFBLK), ("tty", stat.S_IFCHR), ("pipe", stat.S_IFIFO)):
            stream.writestr(entry(name, kind | 0o666), b"")
    with mounted(archive, expect_log=["left out"]) as shown:
        check_harmless(shown)
        assert (shown / "link-in").read_bytes() == b"inside"
        assert not [path for path in everything(shown) if any(word in path for word in ("up", "abs", "proc"))]
        assert stat.S_IMODE((shown / "setuid.sh").stat().st_mode) & 0o7000 == 0
        assert sorted(os.listdir(shown / "..")) == sorted(os.listdir(shown.parent))


def test_links_of_a_directory_lead_nowhere(mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_bytes(SECRET)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret.txt").write_bytes(SECRET)
    source = write_daf(tmp_path / "x.daf")
    for name, target in (
        ("up", "../secret.txt"), ("abs", tmp_path / "secret.txt"), ("folder", "../outside"), ("in", "daf.json"),
        ("vectors/cell/age.data.link", tmp_path / "secret.txt"), ("proc", "/proc/self/root"), ("zero", "/dev/zero"),
    ):  # fmt: skip
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    with mounted(source, expect_log=["left out"]) as shown:
        check_harmless(shown)
        assert (shown / "in").read_bytes() == (source / "daf.json").read_bytes()
        assert {"up", "abs", "folder", "proc", "zero", "pipe"}.isdisjoint(os.listdir(shown))
        (source / "late").symlink_to(tmp_path / "secret.txt")  # behind the back of the mount
        assert not (shown / "late").exists()


def test_names_mean_nothing_to_a_shell(tmp_path: Path) -> None:
    place = tmp_path / "$(touch pwned) ; touch pwned & `touch pwned` | 'x\""
    place.mkdir()
    source, mountpoint = write_daf(place / "a $(touch pwned);.daf"), place / "-o $(touch pwned)"
    mountpoint.mkdir()
    done = run_dafmount(source, mountpoint, "-o", "fsname=$(touch pwned)", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    try:
        assert (mountpoint / "axes" / "cell.txt").read_bytes() == b"a\nb\nc\n"
    finally:
        assert run_dafmount("--unmount", mountpoint, cwd=tmp_path).returncode == 0
    assert not list(tmp_path.rglob("pwned"))
    assert not (Path("/") / "pwned").exists()


def test_nothing_is_run_through_a_shell() -> None:
    """Neither by an argument `shell` nor by functions that have none but a shell."""
    for path in Path(dafmount.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Call):
                assert not any(keyword.arg == "shell" for keyword in node.keywords), path
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("system", "popen", "getoutput", "getstatusoutput"), path


def test_what_is_kept_of_a_web_server_is_for_its_user_alone(mounted: Mounted, tmp_path: Path) -> None:
    source = write_daf(tmp_path / "x.daf")
    archive = tmp_path / "x.daf.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        for path in [path for path in source.rglob("*") if path.is_file()]:
            stream.write(path, path.relative_to(source))
        stream.writestr("big.bin", os.urandom(100_000))
    kept = tmp_path / "kept"
    umask = os.umask(0)  # of the mount, too
    try:
        with serving(tmp_path) as web, mounted(f"{web.url}/x.daf.zip", "-o", f"cache-dir={kept}") as shown:
            assert len((shown / "big.bin").read_bytes()) == 100_000
    finally:
        os.umask(umask)
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert files
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in [kept, *kept.iterdir()]} == {0o700}


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_a_bomb_takes_neither_memory_nor_more_than_the_spool(method: int, mounted: Mounted, tmp_path: Path) -> None:
    """64 MiB of zeros in some kilobytes, in an entry, a descriptor and an axis."""
    archive, zeros = tmp_path / "x.daf.zip", bytes(64 << 20)
    with zipfile.ZipFile(archive, "w", method) as stream:
        stream.writestr("daf.json", '{"version":[1,1]}\n')
        for name in ("bomb.bin", "vectors/cell/age.json", "axes/cell.txt"):
            stream.writestr(name, zeros)
    assert archive.stat().st_size < 1 << 20
    place = tmp_path / "spool"
    place.mkdir()
    log = ["bomb.bin", "age.json", "cell.txt"]
    with mounted(archive, "-o", f"spool={place},spool-size=16M", expect_log=log) as shown:
        for name in ("bomb.bin", "axes/cell.txt"):
            with pytest.raises(OSError, match="No space left"):
                (shown / name).read_bytes()
        with pytest.raises(OSError, match="error"):
            (shown / "vectors/cell/age.json").read_bytes()
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("path", ["daf.json", "metadata.json", "scalars/n.json", "vectors/cell/age.json"])
def test_json_of_any_depth_or_length_is_an_error_of_its_own(path: str, tmp_path: Path, mounted: Mounted) -> None:
    source = write_daf(tmp_path / "x.daf")
    (source / "scalars").mkdir()
    (source / path).write_bytes(b"[" * 1_000_000)
    if path == "daf.json":
        (tmp_path / "mnt").mkdir()
        done = run_dafmount(source, tmp_path / "mnt")
        assert done.returncode == 7
        assert len(done.stderr.splitlines()) == 1
        return
    with mounted(source, expect_log=[] if path == "metadata.json" else [path]) as shown:
        assert (shown / "axes" / "cell.txt").read_bytes() == b"a\nb\nc\n"
        json.loads((shown / "metadata.json").read_bytes())


def test_a_directory_of_an_archive_that_claims_to_be_endless_is_refused(tmp_path: Path) -> None:
    """A sparse file in which all but the end is nothing; the command may take a gibibyte of memory."""
    archive, size = tmp_path / "x.daf.zip", 3 << 30
    with archive.open("wb") as stream:
        stream.truncate(size)
        stream.seek(size)
        end64 = b"PK\6\6" + (44).to_bytes(8, "little") + bytes([45, 0, 45, 0]) + bytes(8)
        end64 += (10**8).to_bytes(8, "little") * 2 + size.to_bytes(8, "little") + bytes(8)
        stream.write(end64 + b"PK\6\7" + bytes(4) + size.to_bytes(8, "little") + b"\1\0\0\0")
        stream.write(b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2))
    (tmp_path / "mnt").mkdir()
    command = ["prlimit", f"--as={MEMORY_LIMIT_BYTES}", *DAFMOUNT, archive, tmp_path / "mnt"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S, text=True)
    assert done.returncode in (5, 7)
    assert "directory" in done.stderr
    assert len(done.stderr.splitlines()) == 1
