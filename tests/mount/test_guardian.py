"""A daemon that is killed while it gives the kernel pages takes nobody with it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from dafmount.mount.guardian import CONNECTIONS, Guardian, _open
from mounts import LIMIT_S, is_mounted, wait_until

EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}.get(platform.machine())

STUCK = """
import ctypes, os, stat, sys, threading, time
from pathlib import Path
import pyfuse3, trio
from dafmount.mount.guardian import Guardian
from dafmount.mount.mountpoint import mount_at

class Stuck(pyfuse3.Operations):
    def attributes(self, number):
        entry = pyfuse3.EntryAttributes()
        entry.st_ino, entry.st_size, entry.entry_timeout = number, 1 << 20, 3600
        entry.st_mode = stat.S_IFREG | 0o444 if number > 1 else stat.S_IFDIR | 0o555
        return entry
    async def lookup(self, parent, name, ctx=None):
        return self.attributes(2)
    async def getattr(self, number, ctx=None):
        return self.attributes(number)
    async def open(self, number, flags, ctx):
        return pyfuse3.FileInfo(fh=number)
    async def read(self, handle, offset, length):
        store = threading.Thread(target=pyfuse3.notify_store, args=(2, offset, bytes(length)), daemon=True)
        store.start()
        await trio.sleep_forever()

mountpoint = sys.argv[1]
pyfuse3.init(Stuck(), mountpoint, {"fsname=stuck"})
connection = mount_at(mountpoint).device.partition(":")[2]
guardian = Guardian.started(connection)
while not guardian.is_on_guard():
    time.sleep(0.01)
print(connection, flush=True)
trio.run(pyfuse3.main)
"""


@pytest.fixture
def abort_file(tmp_path: Path) -> Path:
    path = tmp_path / "7" / "abort"
    path.parent.mkdir()
    path.write_bytes(b"")
    return path


def started(abort_file: Path) -> Guardian:
    guardian = Guardian.started("7", abort_file.parent.parent)
    assert guardian is not None
    wait_until(guardian.is_on_guard, "the guardian")
    return guardian


def test_it_ends_without_a_word(abort_file: Path) -> None:
    guardian = started(abort_file)
    pid = guardian._process.pid
    assert b"dafmount-guardian" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    guardian.close()
    assert not Path(f"/proc/{pid}").exists()
    assert abort_file.read_bytes() == b""


def test_signals_to_a_whole_service_do_not_end_the_connection(abort_file: Path) -> None:
    guardian = started(abort_file)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGRTMIN):
        os.kill(guardian._process.pid, number)
    with pytest.raises(subprocess.TimeoutExpired):
        guardian._process.wait(1.5)  # it looks for a second whether there is something in it
    assert guardian.is_on_guard()
    guardian.close()
    assert abort_file.read_bytes() == b""


def test_one_that_was_killed_is_not_relied_on(abort_file: Path) -> None:
    guardian = started(abort_file)
    guardian._process.kill()
    wait_until(lambda: not guardian.is_on_guard(), "its end")
    guardian.close()


def test_there_is_none_where_it_could_do_nothing(abort_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_open = len(os.listdir("/proc/self/fd"))
    assert Guardian.started("8", abort_file.parent.parent) is None
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    assert Guardian.started("7", abort_file.parent.parent) is None
    assert len(os.listdir("/proc/self/fd")) == n_open


@pytest.mark.skipif(EXIT_OF_A_THREAD is None, reason="the number of the system call is not known here")
def test_the_end_of_the_main_thread_is_enough(abort_file: Path) -> None:
    """Others may be stuck in the kernel."""
    program = f"""
import ctypes, sys, threading, time
from pathlib import Path
from dafmount.mount.guardian import Guardian
guardian = Guardian.started("7", Path(sys.argv[1]).parent.parent)
while not guardian.is_on_guard():
    time.sleep(0.01)
threading.Thread(target=ctypes.CDLL(None).pause, daemon=True).start()
print("on guard", flush=True)
sys.stdin.readline()
ctypes.CDLL(None).syscall({EXIT_OF_A_THREAD}, 0)
"""
    command = [sys.executable, "-c", program, str(abort_file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert abort_file.read_bytes() == b""
        process.stdin.write(b"\n")
        process.stdin.flush()
        wait_until(lambda: abort_file.read_bytes() == b"1", "the guardian")
        assert process.poll() is None
        process.kill()


@pytest.mark.fuse
def test_a_daemon_that_is_killed_while_its_thread_is_stuck_in_the_kernel_ends(tmp_path: Path) -> None:
    mountpoint = tmp_path / "mnt"
    mountpoint.mkdir()
    connection = ""
    with subprocess.Popen([sys.executable, "-c", STUCK, str(mountpoint)], stdout=subprocess.PIPE) as daemon:
        try:
            assert daemon.stdout is not None
            connection = daemon.stdout.readline().decode().strip()
            assert connection
            reader = subprocess.Popen(["cat", mountpoint / "x"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_until(lambda: is_stuck(daemon.pid), "the thread to be stuck")
            daemon.kill()
            assert reader.wait(LIMIT_S) == 1
            daemon.wait(LIMIT_S)
        finally:
            daemon.kill()
            with suppress(OSError):
                os.write(_open(connection, CONNECTIONS), b"1")  # or nothing here would ever end
            if is_mounted(mountpoint):
                subprocess.run(["fusermount3", "-u", "-z", mountpoint], check=True, timeout=LIMIT_S)


def is_stuck(pid: int) -> bool:
    """Whether a thread waits in the kernel and cannot be killed."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return "D" in states
