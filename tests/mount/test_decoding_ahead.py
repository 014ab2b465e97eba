"""Processes that decode for a mount: they serve the same bytes, and end with it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mounts import LIMIT_S, Mounted, run_dafmount, servers, wait_until
from packing import run_dafpack

N_CELLS, N_GENES = 200_000, 40
COUNTS = "matrices/cell/gene/UMIs"

pytestmark = pytest.mark.fuse


@pytest.fixture(scope="module")
def flat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A matrix of 32 MB."""
    place = tmp_path_factory.mktemp("flat") / "x.daf"
    (place / "axes").mkdir(parents=True)
    (place / COUNTS).parent.mkdir(parents=True)
    (place / "daf.json").write_text('{"version":[1,1]}\n')
    (place / "axes" / "cell.txt").write_text("".join(f"c{k}\n" for k in range(N_CELLS)))
    (place / "axes" / "gene.txt").write_text("".join(f"g{k}\n" for k in range(N_GENES)))
    (place / f"{COUNTS}.json").write_text('{"format":"dense","eltype":"Int32"}\n')
    counts = np.random.default_rng(8).poisson(2, N_CELLS * N_GENES).astype("<i4")
    (place / f"{COUNTS}.data").write_bytes(counts.tobytes())
    return place


@pytest.fixture(scope="module")
def packed(flat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    archive = tmp_path_factory.mktemp("packed") / "x.daf.zip"
    done = run_dafpack(flat, archive)
    assert done.returncode == 0, done.stderr
    return archive


def children(server: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


def same(flat: Path, shown: Path) -> bool:
    command = ["cmp", flat / f"{COUNTS}.data", shown / f"{COUNTS}.data"]
    return subprocess.run(command, check=False, timeout=LIMIT_S).returncode == 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no room for another process")
def test_processes_decode_ahead_are_replaced_when_killed_and_end_with_the_mount(
    flat: Path, packed: Path, mounted: Mounted
) -> None:
    with mounted(packed) as shown:
        (server,) = servers(shown)
        assert children(server) == []
        assert same(flat, shown)
        started = children(server)
        assert started
        for child in started:
            os.kill(child, signal.SIGKILL)
        with (shown / f"{COUNTS}.data").open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert same(flat, shown)
        started = children(server)
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in started), "the processes to end")


def test_a_daemon_that_is_killed_takes_them_along(flat: Path, packed: Path, mountpoint: Path) -> None:
    assert run_dafmount(packed, mountpoint).returncode == 0
    (server,) = servers(mountpoint)
    assert same(flat, mountpoint)
    started = children(server)
    os.kill(server, signal.SIGKILL)
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in started), "the processes to end")


def test_none_are_started_where_none_are_wanted(flat: Path, packed: Path, mounted: Mounted) -> None:
    with mounted(packed, "-o", "decoders=0") as shown:
        (server,) = servers(shown)
        assert same(flat, shown)
        assert children(server) == []
