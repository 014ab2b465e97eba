"""Who may mount, who may look, and what owner and permissions are shown.

An ordinary user cannot enter root's home, where Python and the checkout may lie, nor open /dev/fuse on every machine.
So the program is copied to where everybody can read it, and the tests run in a mount namespace of their own, in which
the device and fuse.conf are as they need them; nothing of the machine is changed.
"""

from __future__ import annotations

import importlib.metadata
import os
import pwd
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from mounts import LIMIT_S, Mounted, write_daf

REPOSITORY = Path(__file__).resolve().parents[2]

NO_MOUNT = 8
DENIED = 10

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users"),
    pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed"),
]


class User(NamedTuple):
    """Somebody with an entry in /etc/passwd, which fusermount3 wants."""

    uid: int
    gid: int

    def does(self, command: str) -> str:
        """A shell command as this user."""
        return f"setpriv --reuid={self.uid} --regid={self.gid} --clear-groups sh -c {shlex.quote(command)}"


def user(name: str) -> User:
    entry = pwd.getpwnam(name)
    return User(entry.pw_uid, entry.pw_gid)


class Place(NamedTuple):
    """Directories that an ordinary user may enter, and the program."""

    directory: Path
    dafmount: str
    """The command, for a shell."""

    @property
    def daf(self) -> Path:
        return self.directory / "small.daf"

    @property
    def mountpoint(self) -> Path:
        return self.directory / "mnt"


@pytest.fixture(scope="module")
def program() -> Iterator[str]:
    """The program as an ordinary user can run it."""
    with tempfile.TemporaryDirectory(prefix="dafmount-tests-") as name:
        copies = Path(name)
        copies.chmod(0o755)
        shutil.copytree(REPOSITORY / "dafmount", copies / "dafmount", ignore=shutil.ignore_patterns("__pycache__"))
        for distribution in runtime_distributions():
            copy_distribution(distribution, copies)
        subprocess.run(["chmod", "-R", "a+rX", copies], check=True, timeout=LIMIT_S)
        nobody = user("nobody")
        for python in pythons():
            command = shlex.join(["env", f"PYTHONPATH={copies}", "PYTHONDONTWRITEBYTECODE=1", python])
            check = f"cd / && {command} -c 'import pyfuse3, numpy'"
            done = subprocess.run(["sh", "-c", nobody.does(check)], check=False, timeout=60, capture_output=True)
            if done.returncode == 0:
                yield f"{command} -m dafmount.cli.dafmount"
                return
        version = ".".join(map(str, sys.version_info[:2]))
        pytest.skip(f"no Python {version} that an ordinary user can run")


def pythons() -> list[str]:
    """Interpreters of the version that the compiled packages are for."""
    version = ".".join(map(str, sys.version_info[:2]))
    return [os.path.realpath(sys.executable), f"/usr/bin/python{version}", f"/usr/local/bin/python{version}"]


def runtime_distributions() -> set[str]:
    """Names of what pyproject.toml says the program needs, and of what that needs."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    wanted = list(project["dependencies"])
    while wanted:
        requirement = wanted.pop()
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
        if name in found or "extra ==" in requirement:
            continue
        try:
            wanted.extend(importlib.metadata.requires(name) or [])
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        found.add(name)
    return found


def copy_distribution(name: str, target: Path) -> None:
    distribution = importlib.metadata.distribution(name)
    for file in distribution.files or []:
        if ".." in file.parts or "__pycache__" in file.parts or "tests" in file.parts:
            continue
        copy = target / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.locate(), copy)


@pytest.fixture
def place(program: str) -> Iterator[Place]:
    """A data set of root's that everybody may read, and a mount point of nobody's."""
    with tempfile.TemporaryDirectory(prefix="dafmount-tests-") as name:
        found = Place(Path(name), program)
        found.directory.chmod(0o755)
        write_daf(found.daf)
        found.mountpoint.mkdir()
        os.chown(found.mountpoint, *user("nobody"))
        yield found


def run(place: Place, script: str, *, fuse_conf: str = "", device: str = "666") -> subprocess.CompletedProcess[str]:
    """Runs a script as root in a mount namespace with its own fuse.conf and device; $D, $S and $M are what to mount."""
    prepare = f"""
        rm -f {place.directory}/fuse; mknod -m {device} {place.directory}/fuse c 10 229
        mount --bind {place.directory}/fuse /dev/fuse
        echo {shlex.quote(fuse_conf)} > {place.directory}/fuse.conf; chmod 644 {place.directory}/fuse.conf
        touch /etc/fuse.conf; mount --bind {place.directory}/fuse.conf /etc/fuse.conf
    """
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", prepare + script],
        env=os.environ | {"D": place.dafmount, "S": str(place.daf), "M": str(place.mountpoint)},
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def check_refusal(done: subprocess.CompletedProcess[str], *words: str, status: int = NO_MOUNT) -> None:
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# An ordinary user


def test_an_ordinary_user_mounts_and_unmounts(place: Place) -> None:
    nobody = user("nobody")
    done = run(
        place,
        f"""
        {nobody.does('$D $S $M')}
        grep -c " $M fuse.dafmount ro,nosuid,nodev,.*user_id={nobody.uid}" /proc/mounts
        {nobody.does('cat $M/axes/cell.txt; stat -c "%u %g %A" $M/axes/cell.txt $M')}
        {nobody.does('$D --status $M | head -2 | tail -1; $D --unmount $M; echo $?')}
        grep -c " $M " /proc/mounts || true
        """,
    )
    assert done.stderr == ""
    owner = f"{nobody.uid} {nobody.gid}"
    status = f"source:            {place.daf}"
    shown = re.sub(r"source: +", "source:            ", done.stdout).splitlines()
    assert shown == ["1", "a", "b", "c", f"{owner} -r--r--r--", f"{owner} dr-xr-xr-x", status, "0", "0"]


@pytest.mark.parametrize("mode", ["", "-f"], ids=["background", "foreground"])
def test_an_ordinary_user_is_told_why_not(mode: str, place: Place) -> None:
    nobody = user("nobody")
    mount = nobody.does(f"$D $S $M {mode}")
    check_refusal(run(place, mount, device="600"), "/dev/fuse: permission denied")
    check_refusal(run(place, f"mount --bind /dev/null /usr/bin/fusermount3; {mount}"), "fusermount3 is missing")
    check_refusal(run(place, nobody.does(f"$D $S $M -o allow_other {mode}")), "user_allow_other", "/etc/fuse.conf")
    check_refusal(run(place, nobody.does(f"$D $S $M -o allow_root {mode}")), "user_allow_other", "/etc/fuse.conf")
    check_refusal(run(place, f"chown root $M; {mount}"), str(place.mountpoint), "permission denied", "may write")
    secret = run(place, f"chown nobody $M; chmod 700 $S; {mount}")
    check_refusal(secret, str(place.daf), "Permission denied", status=DENIED)
    check_refusal(run(place, f"mkdir -m 700 $M.d $M.d/m; {nobody.does(f'$D $S $M.d/m {mode}')}"), "Permission denied")


def test_another_user_cannot_enter_and_is_told_whose_it_is(place: Place) -> None:
    nobody, other = user("nobody"), user("daemon")
    done = run(
        place,
        f"""
        {nobody.does('$D $S $M')}
        {other.does('cat $M/axes/cell.txt 2>&1; $D --status $M 2>&1; $D --list; $D --unmount $M 2>&1; echo $?')}
        cat $M/axes/cell.txt 2>&1 || true
        {nobody.does('$D --unmount $M')}
        """,
    )
    lines = done.stdout.splitlines()
    assert "Permission denied" in lines[0]
    assert "of another user" in lines[1]
    assert any(line.startswith(str(place.mountpoint)) and "of another user" in line for line in lines)
    assert f"{NO_MOUNT}" in lines
    assert "Permission denied" in lines[-1], "root is let in without allow_root"
    assert done.returncode == 0, done.stderr


def test_others_are_let_in_where_fuse_conf_allows_it(place: Place) -> None:
    nobody, other = user("nobody"), user("daemon")
    script = f"""
        {nobody.does('$D $S $M -o allow_other')}
        {other.does('cat $M/axes/cell.txt; $D --list | grep "^$M .*of another user" || echo mine')}
        {nobody.does('$D --unmount $M')}
    """
    done = run(place, script, fuse_conf="user_allow_other")
    assert (done.stdout.split(), done.stderr) == (["a", "b", "c", "mine"], "")


def test_root_alone_is_let_in_by_allow_root(place: Place) -> None:
    nobody, other = user("nobody"), user("daemon")
    script = f"""
        {nobody.does('$D $S $M -o allow_root')}
        head -n 1 $M/axes/cell.txt
        {nobody.does('head -n 2 $M/axes/cell.txt')}
        {other.does('ls $M 2>&1')} || true
        {nobody.does('$D --unmount $M')}
    """
    done = run(place, script, fuse_conf="user_allow_other")
    assert done.stdout.split()[:3] == ["a", "a", "b"]
    assert "Permission denied" in done.stdout


def test_what_the_source_lets_nobody_read_is_not_shown_to_others(place: Place) -> None:
    """Root mounts what root alone may read, for all to enter."""
    other = user("daemon")
    script = f"""
        chmod 700 $S
        $D $S $M -o allow_other
        {other.does('cat $M/axes/cell.txt 2>&1')} || true
        stat -c %a $M $M/axes/cell.txt
        $D --unmount $M
    """
    done = run(place, script)
    assert "Permission denied" in done.stdout
    assert done.stdout.split()[-2:] == ["500", "400"]


def test_an_ordinary_user_recovers_a_mount_that_died(place: Place) -> None:
    nobody = user("nobody")
    script = f"""
        {nobody.does('$D $S $M; kill -9 $(getfattr --absolute-names -n user.dafmount.pid --only-values $M)')}
        while cat $M/axes/cell.txt 2>/dev/null; do :; done
        {nobody.does('$D $S $M && cat $M/axes/cell.txt; $D --unmount $M')}
    """
    done = run(place, script)
    assert done.stdout.split()[-3:] == ["a", "b", "c"]
    assert (done.returncode, done.stderr) == (0, "")


def test_an_ordinary_user_mounts_without_fusermount3_in_a_namespace_of_its_own(place: Place) -> None:
    if Path("/proc/sys/user/max_user_namespaces").read_text().strip() == "0":
        pytest.skip("this machine has no user namespaces")
    nobody = user("nobody")
    inside = "$D $S $M; cat $M/axes/cell.txt; $D --unmount $M; ls $M | wc -l"
    own = nobody.does(f"unshare --user --map-root-user --mount sh -ec {shlex.quote(inside)}")
    done = run(place, f"mount --bind /dev/null /usr/bin/fusermount3; {own}")
    if "unshare failed" in done.stderr or "Operation not permitted" in done.stderr:
        pytest.skip(f"this machine lets no ordinary user make a namespace: {done.stderr}")
    assert (done.stdout.split(), done.stderr, done.returncode) == (["a", "b", "c", "0"], "", 0)


# ---------------------------------------------------------------------------------------------------------------------
# What is shown


@pytest.mark.parametrize(
    ("options", "file", "script", "directory"),
    [
        ("umask=022", 0o444, 0o555, 0o555),
        ("umask=077", 0o400, 0o500, 0o500),
        ("umask=027,dmask=0", 0o440, 0o550, 0o555),
        ("fmask=0137", 0o440, 0o440, 0o555),
        ("dmask=077", 0o444, 0o555, 0o500),
        ("umask=0,fmask=033,dmask=007", 0o444, 0o544, 0o550),
    ],
)
def test_masks_take_permissions_away(
    options: str, file: int, script: int, directory: int, tmp_path: Path, mounted: Mounted
) -> None:
    daf = write_daf(tmp_path / "small.daf")
    (daf / "run.sh").write_text("#!/bin/sh\n")
    (daf / "run.sh").chmod(0o755)
    for above in [daf, *daf.rglob("*")]:
        above.chmod(0o755 if above.is_dir() or above.suffix == ".sh" else 0o644)
    with mounted(daf, "-o", options) as mountpoint:
        found = [
            stat.S_IMODE((mountpoint / name).stat().st_mode) for name in ("axes/cell.txt", "run.sh", "axes")
        ]
    assert [oct(mode) for mode in found] == [oct(mode) for mode in (file, script, directory)]


def test_owner_and_group_are_as_asked(tmp_path: Path, mounted: Mounted) -> None:
    daf = write_daf(tmp_path / "small.daf")
    with mounted(daf, "-o", "uid=1234,gid=567") as mountpoint:
        for path in (mountpoint, mountpoint / "axes", mountpoint / "axes" / "cell.txt"):
            status = path.stat()
            assert (status.st_uid, status.st_gid) == (1234, 567)


def test_permissions_are_checked_by_the_kernel(place: Place) -> None:
    nobody, other = user("nobody"), user("daemon")
    script = f"""
        $D $S $M -o allow_other,uid={nobody.uid},umask=077
        {nobody.does('cat $M/axes/cell.txt')}
        {other.does('cat $M/axes/cell.txt 2>&1')} || true
        $D --unmount $M
    """
    done = run(place, script)
    assert done.stdout.split()[:3] == ["a", "b", "c"]
    assert "Permission denied" in done.stdout
