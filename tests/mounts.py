"""How tests start, watch and end real mounts. Imported by tests; owns no fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

DAFMOUNT = (sys.executable, "-m", "dafmount.cli.dafmount")
LIMIT_S = 30

Mounted = Callable[..., AbstractContextManager[Path]]
"""What the fixture `mounted` is."""


def run_dafmount(
    *arguments: str | Path, cwd: Path | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end. In background mode this shows too that the server holds none of its streams."""
    return subprocess.run(
        [*prefix, *DAFMOUNT, *arguments],
        cwd=cwd,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )


def write_daf(place: Path, version: str = "[1,1]") -> Path:
    """A small flat data set."""
    (place / "axes").mkdir(parents=True)
    (place / "vectors" / "cell").mkdir(parents=True)
    (place / "daf.json").write_text(f'{{"version":{version}}}\n')
    (place / "axes" / "cell.txt").write_text("a\nb\nc\n")
    (place / "vectors" / "cell" / "age.json").write_text('{"format":"dense","eltype":"UInt8"}\n')
    (place / "vectors" / "cell" / "age.data").write_bytes(b"\x01\x02\x03")
    return place


def is_mounted(mountpoint: Path) -> bool:
    """Whether something is mounted there, found without touching it."""
    return any(line.split()[4] == str(mountpoint) for line in Path("/proc/self/mountinfo").read_text().splitlines())


def servers(mountpoint: Path) -> list[int]:
    """The processes that were started to serve this mount point, as an absolute or a `./` path, and still run."""
    names = {os.fsencode(mountpoint), b"./" + os.fsencode(mountpoint.name)}
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it just ended
            continue
        if not names.isdisjoint(arguments) and b"dafmount.cli.dafmount" in arguments:
            found.append(int(process.name))
    return found


def wait_until(condition: Callable[[], bool], what: str) -> None:
    """Polls for a condition; fails when it takes too long."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} took longer than {LIMIT_S} s"
        time.sleep(0.01)
