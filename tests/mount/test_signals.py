"""How a mount begins and ends: signals, terminals that close, streams that are closed, a manager that listens."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mounts import DAFMOUNT, LIMIT_S, is_mounted, run_dafmount, servers, wait_until

pytestmark = pytest.mark.fuse

NO_SOURCE = 3
NO_MOUNT = 8
ENDS = [signal.SIGTERM, signal.SIGINT]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture(autouse=True)
def no_server_stays(mountpoint: Path) -> Iterator[None]:
    yield
    for server in servers(mountpoint):
        os.kill(server, signal.SIGKILL)


def server_of(mountpoint: Path) -> int:
    (server,) = servers(mountpoint)
    return server


def is_usable(mountpoint: Path) -> bool:
    try:
        return is_mounted(mountpoint) and (mountpoint / "axes" / "cell.txt").read_text() == "a\nb\nc\n"
    except OSError:  # a dead mount
        return False


def wait_for_end(mountpoint: Path) -> None:
    wait_until(lambda: servers(mountpoint) == [], "ending")


def wait_for_line(log: Path, words: str) -> None:
    wait_until(lambda: log.exists() and words in log.read_text(), f"logging {words!r}")


@contextmanager
def working_in(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose working directory is inside the mount."""
    with subprocess.Popen(["cat"], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


# ---------------------------------------------------------------------------------------------------------------------
# Signals


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_unmounts_and_ends_the_background(
    number: signal.Signals, daf: Path, mountpoint: Path, log: Path
) -> None:
    assert run_dafmount(daf, mountpoint, "--log-file", log).returncode == 0
    os.kill(server_of(mountpoint), number)
    wait_for_end(mountpoint)
    assert not is_mounted(mountpoint)
    assert number.name in log.read_text()
    assert "WARNING" not in log.read_text()


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_detaches_a_mount_in_use_and_says_so(
    number: signal.Signals, daf: Path, mountpoint: Path, log: Path
) -> None:
    assert run_dafmount(daf, mountpoint, "--log-file", log).returncode == 0
    with working_in(mountpoint / "axes") as process:
        os.kill(server_of(mountpoint), number)
        wait_for_end(mountpoint)
        assert not is_mounted(mountpoint)
        assert os.listdir(mountpoint) == []
        with pytest.raises(OSError, match="not connected"):
            os.listdir(f"/proc/{process.pid}/cwd")
    assert "in use" in log.read_text()
    assert run_dafmount(daf, mountpoint).returncode == 0
    assert is_usable(mountpoint)
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_a_foreground_that_was_in_use_ends_well_and_says_so(daf: Path, mountpoint: Path) -> None:
    command = [*DAFMOUNT, str(daf), str(mountpoint), "-f"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            wait_until(lambda: is_mounted(mountpoint), "mounting")
            with working_in(mountpoint / "axes"):
                server.send_signal(signal.SIGINT)
                _, stderr = server.communicate(timeout=LIMIT_S)
        finally:
            server.kill()
    assert (server.returncode, is_mounted(mountpoint)) == (0, False)
    assert "in use" in stderr
    assert "Traceback" not in stderr


def test_a_second_signal_waits_for_nothing(daf: Path, mountpoint: Path, log: Path, tmp_path: Path) -> None:
    """Unmounting takes for ever here, as it may where the machine is in trouble."""
    for name in ("umount", "fusermount3"):
        (tmp_path / name).write_text("#!/bin/sh\nexec sleep 1000\n")
        (tmp_path / name).chmod(0o755)
    slow = ("env", f"PATH={tmp_path}:{os.environ['PATH']}")
    assert run_dafmount(daf, mountpoint, "--log-file", log, prefix=slow).returncode == 0
    server = server_of(mountpoint)
    os.kill(server, signal.SIGTERM)
    wait_for_line(log, "SIGTERM, unmounting")
    assert is_mounted(mountpoint)
    os.kill(server, signal.SIGTERM)
    wait_for_end(mountpoint)
    assert not is_mounted(mountpoint)
    assert "ending without waiting" in log.read_text()


@pytest.mark.parametrize("mode", [(), ("-f",)], ids=["background", "foreground"])
def test_a_hangup_opens_the_log_anew(mode: tuple[str, ...], daf: Path, mountpoint: Path, log: Path) -> None:
    command = [*DAFMOUNT, str(daf), str(mountpoint), "--log-file", str(log), *mode]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as started:
        wait_for_line(log, "is mounted at")
        if not mode:
            assert started.wait(LIMIT_S) == 0
        old = log.rename(log.with_suffix(".1"))
        os.kill(server_of(mountpoint), signal.SIGHUP)
        wait_for_line(log, "opened anew")
        assert is_usable(mountpoint)
        before = old.read_text()
        assert run_dafmount("--unmount", mountpoint).returncode == 0
    wait_for_line(log, "unmounted")
    assert old.read_text() == before


def test_a_hangup_of_a_background_without_a_log_file_changes_nothing(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    server = server_of(mountpoint)
    for _ in range(3):
        os.kill(server, signal.SIGHUP)
    assert is_usable(mountpoint)
    assert server_of(mountpoint) == server
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_a_signal_logs_the_status_on_one_line(daf: Path, mountpoint: Path, log: Path) -> None:
    assert run_dafmount(daf, mountpoint, "--log-file", log).returncode == 0
    assert is_usable(mountpoint)
    os.kill(server_of(mountpoint), signal.SIGUSR1)
    wait_for_line(log, "status: ")
    (line,) = [line for line in log.read_text().splitlines() if "status: " in line]
    found = json.loads(line.partition("status: ")[2])
    assert found["requests"]["read"] == 1
    assert found["bytes_served"] == 6
    assert run_dafmount("--unmount", mountpoint).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# SIGKILL


def kill(mountpoint: Path) -> None:
    os.kill(server_of(mountpoint), signal.SIGKILL)
    wait_for_end(mountpoint)


@pytest.mark.parametrize("mode", [(), ("-f",)], ids=["background", "foreground"])
def test_a_dead_mount_that_is_some_processs_working_directory_is_mounted_over(
    mode: tuple[str, ...], daf: Path, mountpoint: Path
) -> None:
    assert run_dafmount(daf, mountpoint).returncode == 0
    with working_in(mountpoint / "axes"):
        kill(mountpoint)
        with subprocess.Popen([*DAFMOUNT, str(daf), str(mountpoint), *mode], stdin=subprocess.DEVNULL):
            wait_until(lambda: is_usable(mountpoint), "mounting")
            assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert not is_mounted(mountpoint)


def test_dead_mounts_on_top_of_each_other_are_all_taken_away(daf: Path, mountpoint: Path) -> None:
    for _ in range(3):
        assert run_dafmount(daf, mountpoint, "-o", "nonempty").returncode == 0
    for server in servers(mountpoint):
        os.kill(server, signal.SIGKILL)
    wait_for_end(mountpoint)
    done = run_dafmount(daf, mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert run_dafmount("--unmount", mountpoint).returncode == 0
    assert not is_mounted(mountpoint)


# ---------------------------------------------------------------------------------------------------------------------
# Terminals, streams, environments


@contextmanager
def terminal(command: str) -> Iterator[int]:
    """A shell that runs a command in a terminal, which closes at the end; gives the terminal's other side."""
    shell, master = pty.fork()
    if shell == 0:
        os.execv("/bin/sh", ["/bin/sh", "-c", f"{command}; echo 'status '$?; exec cat"])
    try:
        yield master
    finally:
        os.close(master)  # the kernel tells every process of the terminal
        os.waitpid(shell, 0)


def read_until(master: int, words: bytes) -> bytes:
    seen = b""
    with contextlib.suppress(OSError):
        while words not in seen:
            part = os.read(master, 4096)
            if not part:
                break
            seen += part
    assert words in seen, seen
    return seen


def test_the_background_survives_the_terminal(daf: Path, mountpoint: Path) -> None:
    with terminal(shlex.join([*DAFMOUNT, str(daf), str(mountpoint)])) as master:
        assert read_until(master, b"status 0").split() == [b"status", b"0"]
        server = server_of(mountpoint)
    assert is_usable(mountpoint)
    assert server_of(mountpoint) == server
    assert run_dafmount("--unmount", mountpoint).returncode == 0


@pytest.mark.parametrize("options", [(), ("--log-file", "log")], ids=["logging to it", "with a log file"])
def test_the_foreground_ends_with_its_terminal(
    options: tuple[str, ...], daf: Path, mountpoint: Path, tmp_path: Path
) -> None:
    command = shlex.join([*DAFMOUNT, str(daf), str(mountpoint), "-f", *options])
    with terminal(f"cd {shlex.quote(str(tmp_path))} && exec {command}"):
        wait_until(lambda: is_usable(mountpoint), "mounting")
    wait_for_end(mountpoint)
    assert not is_mounted(mountpoint)


def test_nohup_keeps_the_foreground(daf: Path, mountpoint: Path, tmp_path: Path) -> None:
    command = shlex.join(["nohup", *DAFMOUNT, str(daf), str(mountpoint), "-f"])
    with terminal(f"cd {shlex.quote(str(tmp_path))} && {{ {command} & }}"):
        wait_until(lambda: is_usable(mountpoint), "mounting")
        server = server_of(mountpoint)
    assert is_usable(mountpoint)
    assert server_of(mountpoint) == server
    os.kill(server, signal.SIGTERM)
    wait_for_end(mountpoint)
    assert not is_mounted(mountpoint)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_obstacle(closed: str, daf: Path, mountpoint: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> int:
        command = ["/bin/sh", "-c", f"{shlex.join([*DAFMOUNT, *arguments])} {closed}"]
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False, timeout=LIMIT_S).returncode

    assert run(str(tmp_path / "nowhere"), str(mountpoint)) == NO_SOURCE
    assert run(str(daf), str(tmp_path / "nowhere")) == NO_MOUNT
    assert run(str(daf), str(mountpoint), "--log-file", str(tmp_path / "log")) == 0
    assert is_usable(mountpoint)
    assert [os.readlink(f"/proc/{server_of(mountpoint)}/fd/{number}") for number in (0, 1, 2)] == ["/dev/null"] * 3
    assert run("--status", str(mountpoint)) == 0
    assert run("--unmount", str(mountpoint)) == 0
    wait_for_end(mountpoint)


def test_a_bare_environment_as_that_of_cron_is_enough(daf: Path, mountpoint: Path) -> None:
    bare = ("env", "-i", f"PYTHONPATH={os.pathsep.join(sys.path)}")
    done = run_dafmount(daf.name, mountpoint.name, cwd=daf.parent, prefix=bare)
    assert (done.returncode, done.stderr) == (0, "")
    assert is_usable(mountpoint)
    assert run_dafmount("--unmount", mountpoint, prefix=bare).returncode == 0


def test_the_background_holds_neither_its_streams_nor_its_directory(daf: Path, mountpoint: Path) -> None:
    assert run_dafmount(daf, mountpoint, cwd=daf.parent).returncode == 0
    server = server_of(mountpoint)
    assert os.readlink(f"/proc/{server}/cwd") == "/"
    assert [os.readlink(f"/proc/{server}/fd/{number}") for number in (0, 1, 2)] == ["/dev/null"] * 3
    assert os.getsid(server) != os.getsid(0)
    assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_systemd_is_told_of_the_beginning_and_the_end(daf: Path, mountpoint: Path, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(LIMIT_S)
        environment = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        command = [*DAFMOUNT, str(daf), str(mountpoint), "-f"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment) as server:
            told = manager.recv(4096).decode().splitlines()
            assert "READY=1" in told
            assert f"MAINPID={server.pid}" in told
            assert is_usable(mountpoint)
            server.send_signal(signal.SIGHUP)  # a service has no terminal that could be gone
            assert is_usable(mountpoint)
            server.send_signal(signal.SIGTERM)
            assert manager.recv(4096) == b"STOPPING=1"
            assert server.wait(LIMIT_S) == 0
    assert not is_mounted(mountpoint)
