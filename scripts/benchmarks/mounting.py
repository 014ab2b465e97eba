"""Mounts as a user makes them, of dafmount and of programs like it, and what can be asked of their servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

DAFMOUNT = (sys.executable, "-m", "dafmount.cli.dafmount")
BARE = (sys.executable, str(Path(__file__).with_name("bare.py")))
"""Takes a number of names instead of a source."""
LIMIT_S = 120
DEFAULT_READ_AHEAD_KIB = 128
"""The kernel's."""
RAISED_READ_AHEAD_KIB = 4096


class CannotMeasure(Exception):
    """Something that a line needs is not here; the message says what."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A live mount."""

    mountpoint: Path
    command: tuple[str, ...]
    mount_s: float
    """From the start of the command until it returned, with the mount usable."""

    def path(self, relative: str) -> Path:
        """A file of the mount."""
        return self.mountpoint / relative

    def server_pid(self) -> int:
        """The process that serves the mount."""
        names = os.fsencode(self.mountpoint)
        for process in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:  # it just ended
                continue
            if names in arguments and int(process.name) != os.getpid():
                return int(process.name)
        raise CannotMeasure(f"no process serves {self.mountpoint}")

    def memory_mb(self, field: str = "VmHWM") -> float:
        """Most memory that was resident in the server at any time (`VmHWM`), or is now (`VmRSS`), in 10^6 bytes."""
        for line in Path(f"/proc/{self.server_pid()}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024 / 1e6
        raise CannotMeasure(f"the kernel does not tell {field}")

    def read_ahead_file(self) -> Path:
        """Where the kernel keeps how far it reads ahead on this mount."""
        device = os.stat(self.mountpoint).st_dev
        return Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")

    def set_read_ahead(self, kib: int) -> None:
        """Raises CannotMeasure without the right to."""
        try:
            if int(self.read_ahead_file().read_text()) != kib:
                self.read_ahead_file().write_text(str(kib))
        except OSError as error:
            raise CannotMeasure(f"read-ahead of {kib} KiB: {error}; run as root") from error


@contextmanager
def mounted(
    source: Path | str,
    *options: str,
    read_ahead_kib: int | None = None,
    command: Sequence[str] = DAFMOUNT,
) -> Iterator[Mount]:
    """A fresh mount: nothing of it is in the kernel's caches. Unmounted when done, and its server has ended."""
    mountpoint = Path(tempfile.mkdtemp(prefix="dafmount-bench-"))
    arguments = [*command, *options, str(source), str(mountpoint)]
    try:
        start = time.perf_counter()
        done = subprocess.run(
            arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S, env=_as_installed()
        )
        mount_s = time.perf_counter() - start
        if done.returncode:
            raise CannotMeasure(f"{' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
        mount = Mount(mountpoint, tuple(arguments), mount_s)
        if read_ahead_kib is not None:
            mount.set_read_ahead(read_ahead_kib)
        yield mount
    finally:
        _unmount(mountpoint)


def _as_installed() -> dict[str, str]:
    """The environment, but Python keeps compiled modules, as those of an installed program are."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _unmount(mountpoint: Path) -> None:
    if os.path.ismount(mountpoint):
        server = None
        with suppress(CannotMeasure):
            server = Mount(mountpoint, (), 0).server_pid()
        for options in ("-u", "-uz"):
            if subprocess.run(["fusermount3", options, str(mountpoint)], capture_output=True).returncode == 0:
                break
        end = time.monotonic() + LIMIT_S
        while server is not None and Path(f"/proc/{server}").exists() and time.monotonic() < end:
            time.sleep(0.01)
    mountpoint.rmdir()
