"""`dafmount` as it is typed: what it prints, its exit code, and that nothing stays mounted that should not."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mounts import DAFMOUNT, LIMIT_S, Mounted, is_mounted, run_dafmount, servers, wait_until, write_daf

pytestmark = pytest.mark.fuse

needs_setpriv = pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv (util-linux) is not installed")

USAGE = 2
NO_SOURCE = 3
NO_DAF = 4
UNSUPPORTED = 5
NO_GROUP = 6
DAMAGED = 7
NO_MOUNT = 8
EMPTY = 9
DENIED = 10


def zip_daf(archive: Path, *groups: str) -> Path:
    tree = write_daf(archive.with_name(f"{archive.name}.tree"))
    with zipfile.ZipFile(archive, "w") as stream:
        for group in groups or ("",):
            for path in sorted(tree.rglob("*")):
                if path.is_file():
                    stream.write(path, f"{group}/{path.relative_to(tree)}".lstrip("/"))
    return archive


# ---------------------------------------------------------------------------------------------------------------------
# Sources that cannot be mounted


def nowhere(place: Path) -> Path:
    return place / "nowhere.daf.zip"


def no_daf_directory(place: Path) -> Path:
    (place / "photos").mkdir()
    return place / "photos"


def no_zip(place: Path) -> Path:
    (place / "text.daf.zip").write_text("This is no archive.\n" * 100)
    return place / "text.daf.zip"


def zip_without_daf(place: Path) -> Path:
    with zipfile.ZipFile(place / "photos.daf.zip", "w") as stream:
        stream.writestr("cat.jpg", b"\xff\xd8\xff")
    return place / "photos.daf.zip"


def newer_minor(place: Path) -> Path:
    return write_daf(place / "newer.daf", "[1,99]")


def newer_major(place: Path) -> Path:
    return write_daf(place / "newer.daf", "[2,0]")


def no_such_group(place: Path) -> str:
    return f"{zip_daf(place / 'many.dafs.zip', 'alpha', 'beta/inner')}#/gamma"


def cut_short(place: Path) -> Path:
    archive = zip_daf(place / "cut.daf.zip")
    os.truncate(archive, archive.stat().st_size - 30)
    return archive


def cut_to_half(place: Path) -> Path:
    archive = zip_daf(place / "half.daf.zip")
    os.truncate(archive, archive.stat().st_size // 2)
    return archive


def empty(place: Path) -> Path:
    (place / "empty.daf.zip").touch()
    return place / "empty.daf.zip"


UNUSABLE: dict[Callable[[Path], Path | str], tuple[int, list[str]]] = {
    nowhere: (NO_SOURCE, ["nowhere.daf.zip"]),
    no_daf_directory: (NO_DAF, ["photos", "daf.json"]),
    no_zip: (NO_DAF, ["text.daf.zip"]),
    zip_without_daf: (NO_DAF, ["photos.daf.zip", "daf.json"]),
    newer_minor: (UNSUPPORTED, ["newer.daf", "1.99"]),
    newer_major: (UNSUPPORTED, ["newer.daf", "2.0"]),
    no_such_group: (NO_GROUP, ["many.dafs.zip", "gamma", "alpha", "beta/inner"]),
    cut_short: (DAMAGED, ["cut.daf.zip"]),
    cut_to_half: (DAMAGED, ["half.daf.zip"]),
    empty: (EMPTY, ["empty.daf.zip"]),
}


def check_refusal(done: subprocess.CompletedProcess[str], status: int, words: list[str]) -> None:
    """One line on stderr that names what matters, nothing on stdout, and the exit code of that kind of trouble."""
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert [word for word in words if word not in done.stderr] == [], done.stderr
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("mode", [(), ("-f",)], ids=["background", "foreground"])
@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
def test_an_unusable_source_is_refused_with_one_line_and_its_own_code(
    make: Callable[[Path], Path | str], mode: tuple[str, ...], tmp_path: Path, mountpoint: Path
) -> None:
    status, words = UNUSABLE[make]
    check_refusal(run_dafmount(str(make(tmp_path)), mountpoint, *mode), status, words)
    assert not is_mounted(mountpoint)
    assert servers(mountpoint) == []


@needs_setpriv
def test_a_source_without_permission_is_refused(tmp_path: Path, mountpoint: Path) -> None:
    archive = zip_daf(tmp_path / "secret.daf.zip")
    archive.chmod(0)
    powers = "-dac_override,-dac_read_search" if os.geteuid() == 0 else ""
    prefix = ("setpriv", f"--bounding-set={powers}") if powers else ()
    check_refusal(run_dafmount(archive, mountpoint, prefix=prefix), DENIED, ["secret.daf.zip"])


# ---------------------------------------------------------------------------------------------------------------------
# Mount points and arguments that cannot be used


def test_a_missing_mount_point_is_refused(daf: Path, tmp_path: Path) -> None:
    check_refusal(run_dafmount(daf, tmp_path / "missing"), NO_MOUNT, ["missing"])


def test_a_file_as_mount_point_is_refused(daf: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    check_refusal(run_dafmount(daf, tmp_path / "file"), NO_MOUNT, ["file"])


def test_mounting_twice_on_one_place_is_refused(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    check_refusal(run_dafmount(daf, mountpoint), NO_MOUNT, [str(mountpoint)])
    assert (mountpoint / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert not is_mounted(mountpoint)


@needs_setpriv
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up the right to mount")
@pytest.mark.parametrize("mode", [(), ("-f",)], ids=["background", "foreground"])
def test_a_mount_that_the_kernel_refuses_is_reported(mode: tuple[str, ...], daf: Path, mountpoint: Path) -> None:
    done = run_dafmount(daf, mountpoint, *mode, prefix=("setpriv", "--bounding-set=-sys_admin"))
    check_refusal(done, NO_MOUNT, [str(mountpoint), "not permitted"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["only-a-source"],
        ["a", "b", "c"],
        ["a", "b", "--no-such-flag"],
        ["a", "b", "-o", "no_such_option"],
        ["a", "b", "-o", "cache=much"],
        ["a", "b", "-o", "cache=-1"],
        ["a", "b", "-o", "layout=2.0"],
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_is_a_usage_error(arguments: list[str], tmp_path: Path) -> None:
    done = run_dafmount(*arguments, cwd=tmp_path)
    assert done.returncode == USAGE
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip()


def test_version_and_help() -> None:
    version = run_dafmount("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert importlib.metadata.version("dafmount") in version.stdout
    manual = run_dafmount("--help")
    assert (manual.returncode, manual.stderr) == (0, "")
    for word in ("SOURCE", "MOUNTPOINT", "--unmount", "--log-file", "cache=", "layout="):
        assert word in manual.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Background, unmounting, ends


def test_the_prompt_comes_back_when_the_mount_is_usable_and_unmount_ends_it(daf: Path, mountpoint: Path) -> None:
    done = run_dafmount(daf, mountpoint)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (mountpoint / "vectors" / "cell" / "age.data").read_bytes() == b"\x01\x02\x03"
    gone = run_dafmount("--unmount", mountpoint)
    assert (gone.returncode, gone.stdout, gone.stderr) == (0, "", "")
    assert not is_mounted(mountpoint)
    wait_until(lambda: servers(mountpoint) == [], "ending")


def test_relative_paths_are_those_of_the_shell_that_typed_them(daf: Path, mountpoint: Path) -> None:
    place = mountpoint.parent
    assert run_dafmount(f"./{daf.name}", f"./{mountpoint.name}", cwd=place).returncode == 0
    assert (mountpoint / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    assert run_dafmount("--unmount", f"./{mountpoint.name}", cwd=place).returncode == 0
    wait_until(lambda: servers(mountpoint) == [], "ending")


def test_words_that_mount_passes_are_accepted(daf: Path, mountpoint: Path) -> None:
    words = "ro,dev,suid,nodev,nosuid,defaults,noauto,auto,user,nofail,_netdev,x-systemd.automount,x-gvfs-show"
    done = run_dafmount(daf, mountpoint, "-o", words)
    assert (done.returncode, done.stderr) == (0, "")
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_unmount_of_what_is_not_mounted_says_so(mountpoint: Path) -> None:
    check_refusal(run_dafmount("--unmount", mountpoint), NO_MOUNT, [str(mountpoint)])


def test_unmount_while_in_use_is_refused_and_changes_nothing(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    with (mountpoint / "axes" / "cell.txt").open() as stream:
        check_refusal(run_dafmount("--unmount", mountpoint), NO_MOUNT, [str(mountpoint)])
        assert stream.read() == "a\nb\nc\n"
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def kill_server(mountpoint: Path) -> None:
    """Leaves a dead mount, on which the kernel still answers some calls from memory."""
    for server in servers(mountpoint):
        os.kill(server, signal.SIGKILL)

    def is_dead() -> bool:
        try:
            os.listdir(mountpoint)
        except OSError as error:
            return error.errno == errno.ENOTCONN
        return False

    wait_until(is_dead, "dying")


def test_a_dead_mount_point_is_mounted_over(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    kill_server(mountpoint)

    done = run_dafmount(daf, mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert (mountpoint / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert not is_mounted(mountpoint)


def test_unmount_frees_a_dead_mount_point(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    kill_server(mountpoint)
    assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert not is_mounted(mountpoint)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_foreground_and_unmounts(number: signal.Signals, daf: Path, mountpoint: Path) -> None:
    command = [*DAFMOUNT, str(daf), str(mountpoint), "-f"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as server:
        try:
            wait_until(lambda: is_mounted(mountpoint) or server.poll() is not None, "mounting")
            assert (mountpoint / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
            server.send_signal(number)
            _, stderr = server.communicate(timeout=LIMIT_S)
        finally:
            server.kill()
    assert (server.returncode, is_mounted(mountpoint)) == (0, False), stderr
    assert b"Traceback" not in stderr


# ---------------------------------------------------------------------------------------------------------------------
# Options


def test_shards_are_shown_on_request(corpus: Path, mounted: Mounted) -> None:
    source = corpus / "julia" / "fpk" / "zs.files"
    shards = [path.relative_to(source) for path in source.rglob("*.zip")]
    assert len(shards) == 5
    with mounted(source) as place:
        assert [shard for shard in shards if (place / shard).exists()] == []
    with mounted(source, "-o", "shards") as place:
        for shard in shards:
            assert (place / shard).read_bytes() == (source / shard).read_bytes()
        assert (place / "vectors" / "cell" / "label.txt").stat().st_size == 6093


def test_verbose_goes_to_the_log_file(daf: Path, mounted: Mounted, tmp_path: Path) -> None:
    quiet, loud = tmp_path / "quiet", tmp_path / "loud"
    for log, options in ((quiet, ()), (loud, ("-v",))):
        with mounted(daf, *options, log=log) as place:
            assert not (place / "nothing").exists()
            assert (place / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    assert loud.stat().st_size > (quiet.stat().st_size if quiet.exists() else 0)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def test_every_kind_of_write_is_refused_as_on_a_read_only_file_system(daf: Path, mounted: Mounted) -> None:
    with mounted(daf) as place:
        file, new, directory = place / "axes" / "cell.txt", place / "new", place / "vectors"
        attempts: dict[str, Callable[[], object]] = {
            "open": lambda: os.open(file, os.O_WRONLY),
            "open for both": lambda: os.open(file, os.O_RDWR),
            "append": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
            "create": lambda: os.open(new, os.O_WRONLY | os.O_CREAT),
            "truncate": lambda: os.truncate(file, 0),
            "unlink": lambda: os.unlink(file),
            "rename": lambda: os.rename(file, new),
            "mkdir": lambda: os.mkdir(new),
            "rmdir": lambda: os.rmdir(directory),
            "symlink": lambda: os.symlink("x", new),
            "link": lambda: os.link(file, new),
            "mknod": lambda: os.mkfifo(new),
            "chmod": lambda: os.chmod(file, 0o777),
            "chown": lambda: os.chown(file, 0, 0),
            "utime": lambda: os.utime(file),
            "setxattr": lambda: os.setxattr(file, "user.x", b"y"),
        }
        errors = {}
        for name, attempt in attempts.items():
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is checked below
                attempt()
            errors[name] = errno.errorcode[caught.value.errno or 0]
        assert errors == dict.fromkeys(attempts, "EROFS")
        assert file.read_text() == "a\nb\nc\n"


# ---------------------------------------------------------------------------------------------------------------------
# From a checkout


@pytest.mark.skipif(
    not (Path(sys.prefix) / "cache" / "installed-test").exists(),
    reason="not in the environment that scripts/test makes",
)
def test_the_script_shows_a_sample_and_leaves_nothing_behind(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "scripts" / "dafmount"
    place = os.environ | {"DAFMOUNT_VENV": sys.prefix, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [script], env=place, capture_output=True, stdin=subprocess.DEVNULL, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("ls -l", "grep ", "wc -l", "numpy.memmap", "--unmount"):
        assert any(command in line for line in done.stdout.splitlines() if line.startswith("$ "))
    assert list(tmp_path.iterdir()) == []
