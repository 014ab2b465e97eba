"""The ways of reading that are timed; each gives seconds.

`python -m benchmarks.reading FILE` reads a file once a line comes on its standard input, for readers side by side.
"""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

BLOCK_BYTES = 1 << 20
PAGE_BYTES = 4096


def read_whole(path: Path, most_bytes: int | None = None, offset: int = 0) -> float:
    """From start to end, or `most_bytes` from `offset` on, a mebibyte a call.

    To a buffer that begins with a page, as those of cat, cp and dd do. Some processors copy to one that begins 16 bytes
    later, as malloc's do, at a sixth of the speed, whatever file system the bytes come from.
    """
    buffer = mmap.mmap(-1, BLOCK_BYTES)
    left = os.stat(path).st_size if most_bytes is None else most_bytes
    start = time.perf_counter()
    descriptor = os.open(path, os.O_RDONLY)
    os.lseek(descriptor, offset, os.SEEK_SET)
    while left > 0:
        count = os.readv(descriptor, [buffer])
        if count == 0:
            raise EOFError(f"{path}: {left} bytes are missing")
        left -= count
    os.close(descriptor)
    return time.perf_counter() - start


def read_pages(path: Path, offsets: Sequence[int]) -> float:
    """The median time of a pread of 4 KiB."""
    times = []
    descriptor = os.open(path, os.O_RDONLY)
    os.pread(descriptor, 1, 0)  # what only the first read of a file costs is another line's
    for offset in offsets:
        start = time.perf_counter()
        data = os.pread(descriptor, PAGE_BYTES, offset)
        times.append(time.perf_counter() - start)
        assert len(data) == PAGE_BYTES
    os.close(descriptor)
    return statistics.median(times)


def fault_pages(path: Path, offsets: Sequence[int]) -> float:
    """The median time of reading one element through a numpy.memmap made just now.

    Only of those that had to wait for their page: what the kernel reads around one answers others, and how many is
    a matter of the file's size.
    """
    times = []
    values = np.memmap(path, "<i4", "r")
    int(values[0])
    for offset in offsets:
        before = _waited_for()
        start = time.perf_counter()
        int(values[offset // 4])
        taken = time.perf_counter() - start
        if _waited_for() > before:
            times.append(taken)
    return statistics.median(times) if times else 0.0


def _waited_for() -> int:
    """Page faults of this process that were not answered from the page cache."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def random_offsets(path: Path, count: int, seed: int) -> list[int]:
    """Places of pages, none twice."""
    n_pages = os.stat(path).st_size // PAGE_BYTES
    pages = np.random.default_rng(seed).choice(n_pages, min(count, n_pages), replace=False)
    return [int(page) * PAGE_BYTES for page in pages]


def forget(path: Path) -> None:
    """Nothing of a file on a disk stays in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def remember(*paths: Path) -> None:
    """All of some files on a disk is in the page cache."""
    for path in paths:
        read_whole(path)


def read_side_by_side(paths: Sequence[Path]) -> list[float]:
    """What each of several processes takes that read a file each, started together."""
    command = [sys.executable, "-m", "benchmarks.reading"]
    readers = [
        subprocess.Popen([*command, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for path in paths
    ]
    for reader in readers:
        assert reader.stdout is not None
        reader.stdout.readline()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    return [float(reader.communicate()[0]) for reader in readers]


def _main(path: str) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    print(read_whole(Path(path)))


if __name__ == "__main__":
    _main(sys.argv[1])
