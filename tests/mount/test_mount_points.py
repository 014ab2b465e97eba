"""Places that cannot be mounted on and mounts that cannot be taken away: one line that says which, and exit code 8."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mounts import LIMIT_S, is_mounted, run_dafmount, servers, wait_until

pytestmark = pytest.mark.fuse

USAGE = 2
NO_MOUNT = 8

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a mount namespace")


def check_refusal(done: subprocess.CompletedProcess[str], *words: str, status: int = NO_MOUNT) -> None:
    assert (done.returncode, done.stdout) == (status, ""), done.stderr
    assert done.stderr.startswith("dafmount: ")
    assert done.stderr.count("\n") == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Mounting


def missing(place: Path) -> tuple[Path, str]:
    return place / "missing", "No such file or directory"


def below_missing(place: Path) -> tuple[Path, str]:
    return place / "missing" / "below", "No such file or directory"


def a_file(place: Path) -> tuple[Path, str]:
    (place / "file").touch()
    return place / "file", "not a directory"


def below_a_file(place: Path) -> tuple[Path, str]:
    (place / "file").touch()
    return place / "file" / "below", "Not a directory"


def not_empty(place: Path) -> tuple[Path, str]:
    (place / "full").mkdir()
    (place / "full" / "letter").touch()
    return place / "full", "nonempty"


def a_dangling_link(place: Path) -> tuple[Path, str]:
    (place / "link").symlink_to("nowhere")
    return place / "link", "No such file or directory"


def a_loop_of_links(place: Path) -> tuple[Path, str]:
    (place / "loop").symlink_to("loop")
    return place / "loop", "symbolic links"


def a_mount_of_another_kind(place: Path) -> tuple[Path, str]:
    return Path("/proc"), "is mounted here already"


UNUSABLE = [
    missing,
    below_missing,
    a_file,
    below_a_file,
    not_empty,
    a_dangling_link,
    a_loop_of_links,
    a_mount_of_another_kind,
]


@pytest.mark.parametrize("mode", [(), ("-f",)], ids=["background", "foreground"])
@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
def test_an_unusable_place_is_refused_with_one_line(
    make: Callable[[Path], tuple[Path, str]], mode: tuple[str, ...], daf: Path, tmp_path: Path
) -> None:
    place, reason = make(tmp_path)
    check_refusal(run_dafmount(daf, place, *mode), str(place), reason)
    wait_until(lambda: servers(place) == [], "whoever was asked about the place to end")


def test_nonempty_hides_what_is_there_until_the_end(daf: Path, mountpoint: Path) -> None:
    (mountpoint / "letter").write_text("Dear reader")
    assert run_dafmount(daf, mountpoint, "-o", "nonempty").returncode == 0
    assert not (mountpoint / "letter").exists()
    assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert (mountpoint / "letter").read_text() == "Dear reader"


def test_a_link_to_a_directory_is_mounted_on_as_the_directory(daf: Path, mountpoint: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(mountpoint)
    assert run_dafmount(daf, link).returncode == 0
    assert is_mounted(mountpoint)
    assert (link / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    check_refusal(run_dafmount(daf, link), str(mountpoint), "is mounted here already")
    assert run_dafmount("--unmount", link).returncode == 0
    assert not is_mounted(mountpoint)


def in_namespace(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs a shell script in a mount namespace of its own, with `$dafmount` as the command."""
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-ec", script, "sh", *arguments],
        env=os.environ | {"dafmount": f"{sys.executable} -m dafmount.cli.dafmount"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


@needs_root
@pytest.mark.parametrize("mode", ["", "-f"], ids=["background", "foreground"])
def test_a_machine_without_the_device_is_told_so(mode: str, daf: Path, mountpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("null", "urandom"):
        (tmp_path / "dev" / name).touch()
    script = """
        for name in null urandom; do mount --bind /dev/$name "$3/$name"; done
        mount --rbind "$3" /dev
        exec $dafmount "$1" "$2" $4
    """
    done = in_namespace(script, daf, mountpoint, tmp_path / "dev", mode)
    check_refusal(done, "/dev/fuse is missing", "modprobe fuse")


@needs_root
def test_a_mount_point_on_a_read_only_file_system_is_as_good(daf: Path, mountpoint: Path) -> None:
    script = """
        mount -t tmpfs none "$2"; mkdir "$2/place"; mount -o remount,ro "$2"
        $dafmount "$1" "$2/place"
        cat "$2/place/axes/cell.txt"
        $dafmount --unmount "$2/place"
    """
    done = in_namespace(script, daf, mountpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\nb\nc\n", "")


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("rw", "'ro' is implied"),
        ("remount", "unmount it"),
        ("allow_other,allow_root", "exclude each other"),
        ("allow_other=1", "takes no value"),
        ("max_read", "needs a value"),
        ("fmask=9", "octal"),
        ("dmask=", "octal"),
        ("uid=root", "whole number"),
    ],
)
def test_options_that_cannot_be_are_refused_with_one_line(word: str, reason: str, daf: Path, mountpoint: Path) -> None:
    check_refusal(run_dafmount(daf, mountpoint, "-o", word), reason, status=USAGE)
    assert not is_mounted(mountpoint)


def test_what_is_mounted_is_read_only_and_harmless(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    (line,) = [line for line in Path("/proc/mounts").read_text().splitlines() if line.split()[1] == str(mountpoint)]
    source, _, kind, words, *_ = line.split()
    assert (source, kind) == (str(daf), "fuse.dafmount")
    assert {"ro", "nosuid", "nodev", "noatime", "default_permissions"} <= set(words.split(","))
    assert run_dafmount("--unmount", mountpoint).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Unmounting


@contextmanager
def holding(command: list[str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that says something once it is ready, and ends when its input does."""
    with subprocess.Popen(command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


MAPPING = """
import mmap, sys
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("use", ["directory", "file", "mapped"])
def test_who_uses_a_mount_is_named(use: str, daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    file = mountpoint / "axes" / "cell.txt"
    commands = {
        "directory": (["sh", "-c", "echo ready; read x"], mountpoint / "axes"),
        "file": (["sh", "-c", f"exec 3<{file}; echo ready; read x"], Path("/")),
        "mapped": ([sys.executable, "-c", MAPPING, str(file)], Path("/")),
    }
    with holding(*commands[use]) as process:
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        done = run_dafmount("--unmount", mountpoint)
        check_refusal(done, str(mountpoint), f"in use by {name} ({process.pid})", "detaches it")
        assert file.read_text() == "a\nb\nc\n"
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_the_shell_inside_is_named(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    command = f'{sys.executable} -m dafmount.cli.dafmount --unmount "$PWD"; echo $?'
    done = subprocess.run(
        ["sh", "-c", command], cwd=mountpoint, capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    assert done.stdout == f"{NO_MOUNT}\n"
    assert "in use by sh (" in done.stderr
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_unmount_waits_for_the_daemon(daf: Path, mountpoint: Path) -> None:
    for _ in range(5):
        assert run_dafmount(daf, mountpoint).returncode == 0
        assert run_dafmount("--unmount", mountpoint).returncode == 0
        assert servers(mountpoint) == []


def test_unmount_takes_away_one_of_several(daf: Path, mountpoint: Path) -> None:
    for _ in range(2):
        assert run_dafmount(daf, mountpoint, "-o", "nonempty").returncode == 0
    for left in (1, 0):
        assert run_dafmount("--unmount", mountpoint).returncode == 0
        wait_until(lambda left=left: len(servers(mountpoint)) == left, "ending")  # type: ignore[misc]
    check_refusal(run_dafmount("--unmount", mountpoint), "nothing is mounted here")


def test_unmount_touches_nothing_of_others() -> None:
    check_refusal(run_dafmount("--unmount", "/proc"), "/proc", "no dafmount", "use umount")
    assert Path("/proc/self").exists()


def test_unmount_says_where_the_mount_is(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    check_refusal(run_dafmount("--unmount", mountpoint / "axes"), "nothing is mounted here", f"at {mountpoint}")
    check_refusal(run_dafmount("--unmount", mountpoint / "missing"), f"at {mountpoint}")
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_a_hanging_mount_is_taken_away(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    (server,) = servers(mountpoint)
    os.kill(server, signal.SIGSTOP)
    try:
        done = run_dafmount("--unmount", mountpoint)
        assert (done.returncode, done.stderr) == (0, "")
        assert not is_mounted(mountpoint)
    finally:
        os.kill(server, signal.SIGCONT)
    wait_until(lambda: servers(mountpoint) == [], "ending")


@pytest.mark.skipif(shutil.which("umount") is None, reason="umount is not installed")
@pytest.mark.parametrize("lazily", [[], ["-l"]], ids=["", "lazily"])
@pytest.mark.skipif(os.geteuid() != 0, reason="umount is for root")
def test_umount_ends_the_daemon(lazily: list[str], daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    subprocess.run(["umount", *lazily, mountpoint], check=True, timeout=LIMIT_S)
    wait_until(lambda: servers(mountpoint) == [], "ending")


@pytest.mark.skipif(os.geteuid() != 0, reason="umount is for root")
def test_a_lazily_detached_mount_serves_those_who_are_in_it_to_their_end(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    with (mountpoint / "axes" / "cell.txt").open() as stream:
        subprocess.run(["umount", "-l", mountpoint], check=True, timeout=LIMIT_S)
        assert not is_mounted(mountpoint)
        assert stream.read() == "a\nb\nc\n"
        assert len(servers(mountpoint)) == 1
    wait_until(lambda: servers(mountpoint) == [], "ending")
