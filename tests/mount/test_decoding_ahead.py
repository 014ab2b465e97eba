"""What a mount decodes ahead and gives to the kernel before it asks: the same bytes, in fewer requests."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from mounts import LIMIT_S, Mounted, wait_until
from packing import run_dafpack

N_CELLS, N_GENES = 200_000, 40
COUNTS = "matrices/cell/gene/UMIs"
KERNEL_READS_BYTES = 128 * 1024
"""What the kernel asks for at once by itself."""

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


def same(flat: Path, shown: Path) -> bool:
    command = ["cmp", flat / f"{COUNTS}.data", shown / f"{COUNTS}.data"]
    return subprocess.run(command, check=False, timeout=LIMIT_S).returncode == 0


def drop(path: Path) -> None:
    """Have the kernel forget a file's bytes."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def n_reads(shown: Path) -> int:
    said = json.loads(os.getxattr(shown, "user.dafmount.statistics"))
    return int(said["requests"].get("read", 0))


several_cores = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no room for other threads")


@several_cores
def test_the_kernel_gets_most_before_it_asks(flat: Path, packed: Path, mounted: Mounted) -> None:
    size = (flat / f"{COUNTS}.data").stat().st_size
    with mounted(packed, "-o", "readahead=0,decoders=0") as shown:
        assert same(flat, shown)
        assert n_reads(shown) >= size // KERNEL_READS_BYTES
    with mounted(packed, "-o", "readahead=0") as shown:

        def gets_most() -> bool:  # on a machine that has something else to do it may have to ask sooner
            before = n_reads(shown)
            drop(shown / f"{COUNTS}.data")
            assert same(flat, shown)
            return n_reads(shown) - before < size // KERNEL_READS_BYTES // 2

        wait_until(gets_most, "a reading with half the requests")


@pytest.mark.parametrize("option", ["readahead=0", "readahead=4M", "decoders=0", "cache=1M", "decoders=1"])
def test_programs_that_read_in_their_own_ways_get_the_same_bytes(
    flat: Path, packed: Path, mounted: Mounted, option: str
) -> None:
    with mounted(packed, "-o", option) as shown:
        path, expected = shown / f"{COUNTS}.data", (flat / f"{COUNTS}.data").read_bytes()
        readers = [
            subprocess.Popen(["cmp", flat / f"{COUNTS}.data", path, *more], stdout=subprocess.DEVNULL)
            for more in ([], ["-i", "9999999"], ["-n", "12345678"])
        ]
        for command in (
            ["dd", f"if={path}", "bs=64K", "iflag=direct", "status=none"],
            ["dd", f"if={path}", "bs=4K", "status=none"],
            ["tail", "-c", "+4000001", path],
            ["cat", path],
        ):
            done = subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
            assert done.stdout == expected[-len(done.stdout) :]
            assert len(done.stdout) in (len(expected), len(expected) - 4_000_000)
        assert [reader.wait(LIMIT_S) for reader in readers] == [0, 0, 0]
        drop(path)
        assert (np.memmap(path, "<i4", "r") == np.frombuffer(expected, "<i4")).all()
        assert same(flat, shown)


def test_who_stops_reading_holds_up_neither_others_nor_the_end(flat: Path, packed: Path, mounted: Mounted) -> None:
    size = (flat / f"{COUNTS}.data").stat().st_size
    with mounted(packed, "-o", "readahead=0") as shown:
        for length in range(1 << 20, size, 5 << 20):
            subprocess.run(["head", "-c", str(length), shown / f"{COUNTS}.data"], stdout=subprocess.DEVNULL, check=True)
            drop(shown / f"{COUNTS}.data")
        killed = subprocess.Popen(["cat", shown / f"{COUNTS}.data"], stdout=subprocess.PIPE)
        assert killed.stdout is not None
        killed.stdout.read(6 << 20)
        killed.kill()
        killed.wait(LIMIT_S)
        killed.stdout.close()
    # Unmounted at once, whatever was under way.
