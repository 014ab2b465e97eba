"""The lines about data on a web server that answers each request after 20 ms."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.bench import Bench
from benchmarks.data import ITEM_BYTES, Data, matrix_path
from benchmarks.figures import Figure, Reach, interleave, ratio
from benchmarks.mounting import CannotMeasure, Mount, mounted
from benchmarks.reading import read_whole
from benchmarks.serving import Server, serving

MATRIX = "fractions"
"""Half of its bytes are left when packed; of counts so few that the shard's index outweighs fifty columns."""
COMPRESSION = "blosc_zstd_bitshuffle"
DELAY_S = 0.02
N_COLUMNS = 50
MORE_REQUESTS = 4
"""For the shard's end and the like."""
MORE_BYTES = 1.3
NETWORKS = {"1 Gbit/s": 1e9 / 8, "2.5 Gbit/s": 2.5e9 / 8, "this machine, no limit": 0.0}
"""Bytes a second that all connections share; 0 for as many as the machine copies."""


def line_h1(bench: Bench) -> list[Figure]:
    """One column of a packed matrix on a web server."""
    return _columns(bench.data, "H1", "one column", [bench.data.scale.n_columns[MATRIX] // 3])


def line_h2(bench: Bench) -> list[Figure]:
    """Columns far apart of a packed matrix on a web server."""
    n_columns = bench.data.scale.n_columns[MATRIX]
    chosen = list(range(0, n_columns, -(-n_columns // N_COLUMNS)))
    random.Random(1).shuffle(chosen)
    return _columns(bench.data, "H2", f"{len(chosen)} columns far apart", chosen)


def line_h3(bench: Bench) -> list[Figure]:
    """Sequential reading of a file on a web server, against curl, over networks of some speeds."""
    curl = shutil.which("curl")
    if curl is None:
        raise CannotMeasure("curl is not installed")
    return [_sequentially(bench.data, curl, network, rate) for network, rate in NETWORKS.items()]


def _sequentially(data: Data, curl: str, network: str, bytes_per_s: float) -> Figure:
    directory = data.flat_directory("counts")
    with serving(data.place, DELAY_S, bytes_per_s) as server:
        url = f"{server.url}/{directory.name}"

        def read() -> float:
            with mounted(url) as mount:
                return read_whole(mount.path(matrix_path("counts")))

        def fetch() -> float:
            start = time.perf_counter()
            subprocess.run([curl, "-sfo", "/dev/null", f"{url}/{matrix_path('counts')}"], check=True)
            return time.perf_counter() - start

        samples = interleave({"dafmount": read, "curl": fetch}, data.scale.rounds)
    n_bytes = os.stat(data.flat("counts")).st_size
    note = ", ".join(f"{name} {n_bytes / statistics.median(taken) / 1e6:.0f} MB/s" for name, taken in samples.items())
    what = f"flat file on a web server, 20 ms away, cold, sequentially, against curl: {network}"
    return Figure("H3", what, ratio(samples, "curl", "dafmount"), "x", Reach("at least", 0.8), note, samples)


def _columns(data: Data, line: str, what: str, columns: Sequence[int]) -> list[Figure]:
    archive = data.packed_archive(MATRIX, COMPRESSION)
    needed = _bytes_of_columns(data, columns)
    figures = []
    with serving(data.place, DELAY_S) as server:
        for how, read in (("pread", _pread), ("numpy.memmap", _memmap)):
            with mounted(f"{server.url}/{archive.name}") as mount:
                os.stat(mount.path(matrix_path(MATRIX)))
                figures += _measured(server, mount, read, line, f"{what} by {how}", columns, needed)
    return figures


def _measured(
    server: Server,
    mount: Mount,
    read: Callable[[Path, int, Sequence[int]], None],
    line: str,
    what: str,
    columns: Sequence[int],
    needed: int,
) -> list[Figure]:
    path = mount.path(matrix_path(MATRIX))
    column_bytes = os.stat(path).st_size // _n_columns(mount)
    server.counts()
    start = time.perf_counter()
    read(path, column_bytes, columns)
    taken = time.perf_counter() - start
    n_requests, n_bytes = server.counts()
    most = len(columns) + MORE_REQUESTS
    share = n_bytes / needed
    return [
        Figure(line, f"{what}: requests", n_requests, "", Reach("at most", most)),
        Figure(line, f"{what}: bytes fetched, against those of the chunks", share, "x", Reach("at most", MORE_BYTES)),
        Figure(line, f"{what}: time, each request 20 ms", taken, "s"),
    ]


def _n_columns(mount: Mount) -> int:
    return mount.path("axes/gene.txt").read_bytes().count(b"\n")


def _pread(path: Path, column_bytes: int, columns: Sequence[int]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    for column in columns:
        assert len(os.pread(descriptor, column_bytes, column * column_bytes)) == column_bytes
    os.close(descriptor)


def _memmap(path: Path, column_bytes: int, columns: Sequence[int]) -> None:
    values = np.memmap(path, "<i4", "r").reshape(-1, column_bytes // ITEM_BYTES)
    for column in columns:
        values[column].sum()


def _bytes_of_columns(data: Data, columns: Sequence[int]) -> int:
    payloads = data.payloads(MATRIX, COMPRESSION)
    per_column = len(payloads) // data.scale.n_columns[MATRIX]
    return sum(len(payload) for column in columns for payload in payloads[column * per_column :][:per_column])
