"""A source that does not answer costs the files it concerns, for a limited time; everything else goes on."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from mounts import DAFMOUNT, LIMIT_S, Mounted, is_mounted, wait_until

pytestmark = pytest.mark.fuse

STUCK = "matrices/cell/gene/fraction"
HEALTHY = ("matrices/cell/gene/counts.data", "vectors/cell/label.txt", "axes/cell.txt", "notes.txt")
STUCK_FS = Path(__file__).parents[1] / "stuck_fs.py"
TIMEOUT_S = 3


class StuckSource:
    """A mirror of a data set whose files can be made to hang."""

    def __init__(self, place: Path, control: Path) -> None:
        self.place = place
        self._control = control

    def hang(self, *parts: str) -> None:
        beside = self._control.with_suffix(".new")
        beside.write_text("\n".join(parts))
        beside.rename(self._control)

    def held(self) -> int:
        """Requests that hang now."""
        try:
            return int(self._control.with_suffix(".held").read_text())
        except FileNotFoundError:
            return 0

    def free(self) -> None:
        self._control.unlink(missing_ok=True)


@pytest.fixture
def source(made: Path, tmp_path: Path) -> Iterator[StuckSource]:
    mountpoint, control = tmp_path / "source.daf", tmp_path / "control"
    mountpoint.mkdir()
    with subprocess.Popen([sys.executable, STUCK_FS, made / "packed.daf", mountpoint, control]) as server:
        try:
            wait_until(lambda: is_mounted(mountpoint), "mounting the source")
            yield StuckSource(mountpoint, control)
        finally:
            control.unlink(missing_ok=True)
            subprocess.run(["fusermount3", "-uz", mountpoint], check=False, timeout=LIMIT_S)
            try:
                server.wait(LIMIT_S)
            except subprocess.TimeoutExpired:
                server.kill()


@contextmanager
def readers(source: StuckSource, path: Path, count: int, length: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that read one file, which may hang; freed, ended and reaped afterwards."""
    script = "import os, sys; f = os.open(sys.argv[1], 0); print(len(os.pread(f, int(sys.argv[2]), int(sys.argv[3]))))"
    command = [sys.executable, "-S", "-c", script, path, str(length)]
    started = [
        subprocess.Popen([*command, str(at * 4096)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for at in range(count)
    ]
    try:
        yield started
    finally:
        source.free()
        for process in started:
            process.kill()
        for process in started:
            process.wait(LIMIT_S)


def check(shown: Path, flat: Path, names: Sequence[str] = HEALTHY) -> None:
    for name in names:
        assert (shown / name).read_bytes() == (flat / name).read_bytes(), name


def test_a_stuck_read_times_out_and_other_files_are_read_meanwhile(
    source: StuckSource, made: Path, mounted: Mounted
) -> None:
    with mounted(source.place, "-o", f"timeout={TIMEOUT_S}", expect_log=[f"{STUCK}.*no answer"]) as shown:
        with (shown / f"{STUCK}.data").open("rb", buffering=0) as stuck:
            assert len(stuck.read(100)) == 100
            source.hang(STUCK)
            errors: list[int | None] = []

            def read() -> None:
                try:
                    os.pread(stuck.fileno(), 1, 2_000_000)
                except OSError as error:
                    errors.append(error.errno)

            thread = threading.Thread(target=read)
            thread.start()
            check(shown, made / "flat.daf")
            assert os.stat(shown / f"{STUCK}.data").st_size == (made / "flat.daf" / f"{STUCK}.data").stat().st_size
            thread.join(LIMIT_S)
            assert errors in ([errno.ETIMEDOUT], [errno.EIO])  # a page that could not be read is EIO to some kernels
        source.free()
        check(shown, made / "flat.daf", [f"{STUCK}.data"])


@pytest.mark.parametrize("length", [1, 300_000], ids=["pages", "read ahead"])
def test_many_stuck_readers_of_many_files_starve_nobody(
    length: int, source: StuckSource, made: Path, mounted: Mounted
) -> None:
    files = ["vectors/cell/f64.data", "vectors/cell/is_odd.data", "vectors/cell/label.txt", f"{STUCK}.data"]
    with mounted(source.place, "-o", "timeout=60") as shown, ExitStack() as stack:
        for name in files:
            assert (shown / name).stat().st_size
        source.hang("vectors/cell", STUCK)
        stuck = [one for name in files for one in stack.enter_context(readers(source, shown / name, 20, length))]
        wait_until(lambda: source.held() >= len(files), "getting stuck")
        began = time.monotonic()
        check(shown, made / "flat.daf", [name for name in HEALTHY if name not in files])
        assert time.monotonic() - began < LIMIT_S
        assert source.held() >= len(files)
        assert [one.returncode for one in stuck if one.poll()] == []  # they still wait, in spite of hurried requests


def test_a_mount_with_a_stuck_read_ends_by_signal(source: StuckSource, tmp_path: Path) -> None:
    mountpoint, log = tmp_path / "mnt", tmp_path / "log"
    mountpoint.mkdir()
    command = [*DAFMOUNT, str(source.place), str(mountpoint), "-f", "--log-file", str(log)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as server:
        try:
            wait_until(lambda: is_mounted(mountpoint) or server.poll() is not None, "mounting")
            source.hang(STUCK)
            with readers(source, mountpoint / f"{STUCK}.data", 2) as stuck:
                wait_until(lambda: source.held() > 0, "getting stuck")
                server.send_signal(signal.SIGTERM)
                wait_until(lambda: not is_mounted(mountpoint), "unmounting")
                wait_until(lambda: all(one.poll() is not None for one in stuck), "ending the readers")
                assert all(one.returncode for one in stuck)
            # What a thread waits for in the kernel keeps the process until it is answered.
            source.free()
            assert server.wait(LIMIT_S) == 0
        finally:
            source.free()
            server.kill()
            subprocess.run(["fusermount3", "-uz", mountpoint], check=False, capture_output=True, timeout=LIMIT_S)
