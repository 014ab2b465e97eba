"""What is measured, line by line. Each function gives the rows of one line of the table.

A cold mount is a fresh one, of which the kernel has cached nothing, with the archive itself in the page cache. A cold
file of the disk is one that was dropped from the page cache (posix_fadvise, DONTNEED).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import zstandard

from benchmarks.bench import Bench
from benchmarks.data import LARGE_FACTOR, matrix_path
from benchmarks.figures import Figure, Reach, Samples, interleave, ratio
from benchmarks.mounting import BARE, DAFMOUNT, DEFAULT_READ_AHEAD_KIB, RAISED_READ_AHEAD_KIB, CannotMeasure, mounted
from benchmarks.reading import (
    fault_pages,
    forget,
    random_offsets,
    read_pages,
    read_side_by_side,
    read_whole,
    remember,
)
from benchmarks.web import line_h1, line_h2, line_h3

BLOSC = "blosc_zstd_bitshuffle"
GROWTH = 1.1
"""Time a byte that is no more than this times as long has not grown; runs differ by as much."""


def cold_read(
    archive: Path,
    relative: str,
    read_ahead_kib: int | None = DEFAULT_READ_AHEAD_KIB,
    command: Sequence[str] = DAFMOUNT,
) -> float:
    """Seconds to read a file of a fresh mount from start to end."""
    with mounted(archive, read_ahead_kib=read_ahead_kib, command=command) as mount:
        return read_whole(mount.path(relative))


def decode_blosc(payloads: list[bytes]) -> float:
    """Seconds of a loop of blosc2.decompress in this process."""
    import blosc2

    blosc2.set_nthreads(1)
    decompress = blosc2.decompress
    start = time.perf_counter()
    for payload in payloads:
        decompress(payload)
    return time.perf_counter() - start


def decode_zstd(payloads: list[bytes]) -> float:
    """Seconds of a loop of the zstandard module's decompressor in this process."""
    decompress = zstandard.ZstdDecompressor().decompress
    start = time.perf_counter()
    for payload in payloads:
        decompress(payload)
    return time.perf_counter() - start


def decode_zlib(payloads: list[bytes]) -> float:
    """Seconds of a loop of zlib.decompress in this process."""
    decompress = zlib.decompress
    start = time.perf_counter()
    for payload in payloads:
        decompress(payload, -15)
    return time.perf_counter() - start


DECODERS: dict[str, Callable[[list[bytes]], float]] = {
    "blosc_zstd_bitshuffle": decode_blosc,
    "blosc_lz4_bitshuffle": decode_blosc,
    "zstd": decode_zstd,
    "gzip": decode_zlib,
}


def packed_against_decoder(
    bench: Bench, line: str, what: str, matrix: str, compression: str, read_ahead_kib: int, reach: Reach | None
) -> Figure:
    """A cold sequential read against the decoder's loop over the same chunks, their payloads in memory."""
    archive = bench.data.packed_archive(matrix, compression)
    payloads = bench.data.payloads(matrix, compression)
    remember(archive)
    samples = interleave(
        {
            "dafmount": partial(cold_read, archive, matrix_path(matrix), read_ahead_kib),
            "decoder": partial(DECODERS[compression], payloads),
        },
        bench.rounds,
    )
    note = speeds(samples, os.stat(bench.data.flat(matrix)).st_size)
    return Figure(line, what, ratio(samples, "decoder", "dafmount"), "x", reach, note, samples)


def line_1(bench: Bench) -> list[Figure]:
    """Cold sequential read, the kernel's default read-ahead."""
    what = "packed .data, cold, read-ahead 128 KiB, against its decoder's loop: "
    figures = []
    for matrix, compression, reach in (
        ("counts", BLOSC, Reach("at least", 0.6)),
        ("fractions", BLOSC, None),
        ("counts", "blosc_lz4_bitshuffle", None),
    ):
        one = packed_against_decoder(
            bench, "1", f"{what}{matrix}, {compression}", matrix, compression, DEFAULT_READ_AHEAD_KIB, reach
        )
        figures.append(one)
    return figures


def line_2(bench: Bench) -> list[Figure]:
    """The same with more read-ahead."""
    what = f"the same with read-ahead {RAISED_READ_AHEAD_KIB >> 10} MiB: counts, {BLOSC}"
    reach = Reach("at least", 0.85)
    return [packed_against_decoder(bench, "2", what, "counts", BLOSC, RAISED_READ_AHEAD_KIB, reach)]


def line_3(bench: Bench) -> list[Figure]:
    """Against programs that users have now."""
    packed, flat = bench.data.packed_archive("counts", BLOSC), bench.data.flat_archive("counts")
    path = matrix_path("counts")
    ratarmount = bench.peers.ratarmount()
    remember(packed, flat)
    samples = interleave(
        {
            "dafmount": partial(cold_read, packed, path, None),
            "ratarmount": partial(cold_read, flat, path, None, ratarmount),
        },
        bench.rounds,
    )
    n_bytes = os.stat(bench.data.flat("counts")).st_size
    against_ratarmount = Figure(
        "3",
        "packed .data, cold, against ratarmount reading the flat one from a STORED ZIP",
        ratio(samples, "ratarmount", "dafmount"),
        "x",
        Reach("at least", 1.6),
        speeds(samples, n_bytes),
        samples,
    )
    array, share = bench.data.zarr_array("counts", BLOSC), bench.data.scale.zarr_share
    samples = interleave(
        {
            "dafmount": lambda: cold_read(packed, path, None),
            "zarr": lambda: bench.peers.read_with_zarr(array, share) * n_bytes,
        },
        min(3, bench.rounds),
    )
    against_zarr = Figure(
        "3",
        "the same, against zarr-python reading the shard",
        ratio(samples, "zarr", "dafmount"),
        "x",
        Reach("at least", 30),
        f"{speeds(samples, n_bytes)} (zarr: of a {share}th)",
        samples,
    )
    return [against_ratarmount, against_zarr]


def line_4(bench: Bench) -> list[Figure]:
    """Flat data in a ZIP."""
    flat, path = bench.data.flat_archive("counts"), matrix_path("counts")
    remember(flat)
    what = "flat .data inside a STORED ZIP, cold, against "
    n_bytes = os.stat(bench.data.flat("counts")).st_size
    figures = []
    for name, find, reach in (
        ("ratarmount", bench.peers.ratarmount, Reach("at least", 1.5)),
        ("mount-zip", bench.peers.mount_zip, None),
    ):
        try:
            command = find()
        except CannotMeasure as error:
            figures.append(Figure("4", what + name, None, "x", reach, str(error)))
            continue
        runs = {"dafmount": partial(cold_read, flat, path, None), name: partial(cold_read, flat, path, None, command)}
        samples = interleave(runs, bench.rounds)
        figures.append(
            Figure("4", what + name, ratio(samples, name, "dafmount"), "x", reach, speeds(samples, n_bytes), samples)
        )
    return figures


def line_5(bench: Bench) -> list[Figure]:
    """Out of the kernel's page cache."""
    archive, flat = bench.data.packed_archive("counts", BLOSC), bench.data.flat("counts")
    with mounted(archive) as mount:
        path = mount.path(matrix_path("counts"))
        read_whole(path), read_whole(flat)
        samples = interleave({"dafmount": lambda: read_whole(path), "disk": lambda: read_whole(flat)}, 2 * bench.rounds)
    what = "second sequential read, against the same file on the disk's file system"
    note = speeds(samples, os.stat(flat).st_size)
    return [Figure("5", what, ratio(samples, "disk", "dafmount"), "x", Reach("at least", 0.9), note, samples)]


def line_6(bench: Bench) -> list[Figure]:
    """Random reads."""
    samples = random_access(bench, read_pages, bench.data.scale.n_random, DEFAULT_READ_AHEAD_KIB)
    what = "random 4 KiB preads, cold mount: median time against the disk's, cold"
    return [Figure("6", what, ratio(samples, "dafmount", "disk"), "x", Reach("at most", 1.5), times(samples), samples)]


def line_7(bench: Bench) -> list[Figure]:
    """Random page faults."""
    figures = []
    for kib, reach in ((DEFAULT_READ_AHEAD_KIB, Reach("at most", 2)), (RAISED_READ_AHEAD_KIB, None)):
        samples = random_access(bench, fault_pages, bench.data.scale.n_faults, kib)
        what = f"random numpy.memmap page faults, cold mount, read-ahead {kib} KiB, against the disk's, cold"
        figures.append(Figure("7", what, ratio(samples, "dafmount", "disk"), "x", reach, times(samples), samples))
    return figures


def random_access(
    bench: Bench, read: Callable[[Path, Sequence[int]], float], count: int, read_ahead_kib: int
) -> Samples:
    """Median times of random accesses, each round to other places."""
    archive, flat = bench.data.packed_archive("counts", BLOSC), bench.data.flat("counts")
    remember(archive)
    seeds = iter(range(1000))

    def of_mount() -> float:
        with mounted(archive, read_ahead_kib=read_ahead_kib) as mount:
            path = mount.path(matrix_path("counts"))
            return read(path, random_offsets(path, count, next(seeds)))

    def of_disk() -> float:
        forget(flat)
        return read(flat, random_offsets(flat, count, next(seeds)))

    return interleave({"dafmount": of_mount, "disk": of_disk}, bench.rounds)


def line_8(bench: Bench) -> list[Figure]:
    """Readers side by side."""
    archive = bench.data.packed_archive("counts", BLOSC, copies=4)
    remember(archive)
    fairness: list[float] = []

    def read(n_readers: int) -> float:
        with mounted(archive, read_ahead_kib=DEFAULT_READ_AHEAD_KIB) as mount:
            seconds = read_side_by_side([mount.path(matrix_path("counts", k)) for k in range(1, n_readers + 1)])
        if n_readers > 1:
            fairness.append(min(seconds) / max(seconds))
        return max(seconds) / n_readers

    samples = interleave({"four": lambda: read(4), "one": lambda: read(1)}, bench.rounds)
    n_bytes = os.stat(bench.data.flat("counts")).st_size
    what = "four processes reading four matrices: total throughput against one"
    return [
        Figure("8", what, ratio(samples, "one", "four"), "x", Reach("at least", 1), speeds(samples, n_bytes), samples),
        Figure(
            "8",
            "the same: time of the first to end, against the last",
            statistics.median(fairness),
            "x",
            Reach("at least", 0.5),
            "",
            {"fairness": fairness},
        ),
    ]


STEPS = ("mount", "find", "ls -l", "cat", "MB")


def line_9(bench: Bench) -> list[Figure]:
    """Very many names."""
    archive = bench.data.many_archive()
    remember(archive)
    n_names, n_reads = 2 * bench.data.scale.n_vectors, bench.data.scale.n_small_reads
    samples: Samples = {step: [] for step in STEPS}
    bare: Samples = {step: [] for step in STEPS}
    for _ in range(bench.rounds):
        for kept, steps in (
            (samples, metadata_steps(archive, "vectors/cell", n_reads, DAFMOUNT)),
            (bare, metadata_steps(str(n_names), "names", n_reads, BARE)),
        ):
            for step, value in steps.items():
                kept[step].append(value)
    others, missing = peers_metadata(bench, archive, n_reads)
    texts = {
        "mount": (f"mounting an archive of {n_names} properties' files", "s", 0.5),
        "find": ("then find", "s", 0.7),
        "ls -l": (f"then ls -l of a directory of {n_names} names", "s", 1),
        "cat": (f"then cat of {n_reads} small files", "s", 2.5),
        "MB": ("then the most memory that was resident in the server", "MB", 150),
    }
    figures = []
    for step, (what, unit, value) in texts.items():
        alone = f"a bare pyfuse3 server {statistics.median(bare[step]):.2f} {unit}"
        note = ", ".join([alone, *(f"{name} {seconds[step]:.2f} {unit}" for name, seconds in others.items())])
        note = "; ".join(part for part in (note, missing if step == "mount" else "") if part)
        mine = samples[step]
        figures.append(
            Figure(
                "9",
                what,
                statistics.median(mine),
                unit,
                Reach("at most", value),
                note,
                {step: mine, "bare": bare[step]},
            )
        )
    return figures


def peers_metadata(bench: Bench, archive: Path, n_reads: int) -> tuple[dict[str, dict[str, float]], str]:
    """What other programs take, once; and which were not measured, why."""
    others, missing = {}, []
    for name, find in (("ratarmount", bench.peers.ratarmount), ("mount-zip", bench.peers.mount_zip)):
        try:
            others[name] = metadata_steps(archive, "vectors/cell", n_reads, find())
        except CannotMeasure as error:
            missing.append(f"{name} not measured: {error}")
    return others, "; ".join(missing)


def metadata_steps(source: Path | str, names_in: str, n_reads: int, command: Sequence[str]) -> dict[str, float]:
    """Seconds of each step, one after the other on one mount; and the server's memory."""
    with mounted(source, command=command) as mount:
        directory = str(mount.path(names_in))
        steps = {"mount": mount.mount_s}
        steps["find"] = _run(["find", str(mount.mountpoint)])
        steps["ls -l"] = _run(["ls", "-l", directory])
        names = b"\0".join(os.fsencode(f"{directory}/{name}") for name in sorted(os.listdir(directory))[:n_reads])
        steps["cat"] = _run(["xargs", "-0", "cat"], names)
        steps["MB"] = mount.memory_mb()
        return steps


def line_10(bench: Bench) -> list[Figure]:
    """Starting."""
    archive = bench.data.small_archive()
    remember(archive)
    started = []
    for _ in range(2 * bench.rounds):
        with mounted(archive) as mount:
            started.append(mount.mount_s + read_whole(mount.path("vectors/cell/age.data")))
    what = "from starting dafmount on a small archive until a packed vector was read"
    return [Figure("10", what, statistics.median(started), "s", Reach("at most", 0.5), "", {"dafmount": started})]


def line_11(bench: Bench) -> list[Figure]:
    """Memory."""
    archive = bench.data.large_packed_archive("counts", BLOSC)
    most = 8 * os.stat(bench.data.flat("counts")).st_size
    with mounted(archive, "-o", "cache=64M", read_ahead_kib=RAISED_READ_AHEAD_KIB) as mount:
        read_whole(mount.path(matrix_path("counts")), most)
        memory = mount.memory_mb()
    what = f"most resident memory while {most / 2**30:.2g} GiB of a packed matrix are read, cache=64M"
    return [Figure("11", what, memory, "MB", Reach("at most", 200), "", {"MB": [memory]})]


def line_12(bench: Bench) -> list[Figure]:
    """Other codecs."""
    what = "packed .data, cold, read-ahead 128 KiB, against its decoder's loop: counts, "
    reach = Reach("at least", 0.6)
    return [
        packed_against_decoder(bench, "12", what + compression, "counts", compression, DEFAULT_READ_AHEAD_KIB, reach)
        for compression in ("zstd", "gzip")
    ]


def line_13(bench: Bench) -> list[Figure]:
    """A matrix ten times as large."""
    path = matrix_path("counts")
    figures = []
    for line, what, compression, kib in (
        ("1", "packed .data", BLOSC, DEFAULT_READ_AHEAD_KIB),
        ("2", "packed .data, read-ahead 4 MiB", BLOSC, RAISED_READ_AHEAD_KIB),
        ("4", "flat .data", None, DEFAULT_READ_AHEAD_KIB),
        ("12", "packed .data, zstd", "zstd", DEFAULT_READ_AHEAD_KIB),
        ("12", "packed .data, gzip", "gzip", DEFAULT_READ_AHEAD_KIB),
    ):
        small, large = archives(bench, compression)
        remember(small, large)
        runs: dict[str, Callable[[], float]] = {
            "small": partial(cold_read, small, path, kib),
            "large": partial(cold_read_of_share, large, path, kib),
        }
        figures.append(growth(f"line {line} ({what}, cold, as many bytes)", interleave(runs, bench.rounds)))
    figures.append(whole_growth(bench))
    small, large = archives(bench, BLOSC)
    accesses: tuple[tuple[str, str, Callable[[Path], float]], ...] = (
        ("5", "second read", warm_read),
        ("6", "random preads", lambda file: read_pages(file, random_offsets(file, bench.data.scale.n_random, 1))),
        ("7", "random page faults", lambda file: fault_pages(file, random_offsets(file, bench.data.scale.n_faults, 1))),
    )
    for line, what, read in accesses:
        runs = {
            "small": partial(on_fresh_mount, small, read),
            "large": partial(on_fresh_mount, large, read),
        }
        figures.append(growth(f"line {line} ({what})", interleave(runs, min(3, bench.rounds))))
    return figures


def line_v(bench: Bench) -> list[Figure]:
    """What checking checksums costs: time of a cold read, and of the processor while it is served."""
    figures = []
    for compression in (BLOSC, "zstd", "gzip", None):
        data = bench.data
        archive = data.packed_archive("counts", compression) if compression else data.flat_archive("counts")
        remember(archive)
        name = compression or "flat, stored"
        wall = interleave({how: partial(cold_read_verified, archive, how) for how in HOW}, bench.rounds)
        busy = interleave({how: partial(busy_s_of_read, archive, how) for how in HOW}, bench.rounds)
        for what, samples in (("time of a cold read", wall), ("the server's processor time for it", busy)):
            note = ", ".join(f"{how} {statistics.median(taken):.2f} s" for how, taken in samples.items())
            for how in HOW[1:]:
                text = f"{name}: {what}, verify={how} against verify=off"
                figures.append(Figure("V", text, ratio(samples, how, "off"), "x", None, note, samples))
    return figures


HOW = ("off", "auto", "all")


def cold_read_verified(archive: Path, how: str) -> float:
    """Seconds to read the matrix of a fresh mount with one way to verify."""
    with mounted(archive, "-o", f"verify={how}") as mount:
        return read_whole(mount.path(matrix_path("counts")))


def busy_s_of_read(archive: Path, how: str) -> float:
    """Seconds of processor time that the server takes for that, all in one process; others do not change it much."""
    with mounted(archive, "-o", f"verify={how},decoders=0") as mount:
        stat = Path(f"/proc/{mount.server_pid()}/stat")
        before = _ticks(stat)
        read_whole(mount.path(matrix_path("counts")))
        return (_ticks(stat) - before) / os.sysconf("SC_CLK_TCK")


def _ticks(stat: Path) -> int:
    fields = stat.read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def cold_read_of_share(archive: Path, relative: str, read_ahead_kib: int) -> float:
    """As `cold_read`, of a tenth from the middle on of what is ten times as large."""
    with mounted(archive, read_ahead_kib=read_ahead_kib) as mount:
        path = mount.path(relative)
        size = os.stat(path).st_size
        return read_whole(path, size // LARGE_FACTOR, size // 2)


def whole_growth(bench: Bench) -> Figure:
    """How much longer a byte takes when all of the large matrix is read, and what the disk's file system does then.

    Nothing to be reached: the kernel's page cache takes longer for more bytes, much longer in a virtual machine whose
    host has to find the memory.
    """
    path = matrix_path("counts")
    small, large = archives(bench, BLOSC)
    flat, large_flat = archives(bench, None)
    remember(small, large)

    def of_disk(file: Path, share: int) -> float:
        forget(file)
        return read_whole(file) / share

    runs: dict[str, Callable[[], float]] = {
        "small": partial(cold_read, small, path),
        "large": lambda: cold_read(large, path) / LARGE_FACTOR,
        "disk, small": partial(of_disk, flat, 1),
        "disk, large": partial(of_disk, large_flat, LARGE_FACTOR),
    }
    samples = interleave(runs, min(3, bench.rounds))
    note = f"the disk's file system: {ratio(samples, 'disk, large', 'disk, small'):.3g} x"
    what = "ten times as large: line 1, all of its bytes"
    return Figure("13", what, ratio(samples, "large", "small"), "x", None, note, samples)


def archives(bench: Bench, compression: str | None) -> tuple[Path, Path]:
    """A matrix and one ten times as large, flat or packed."""
    data = bench.data
    if compression is None:
        return data.flat_archive("counts"), data.large_flat_archive("counts")
    return data.packed_archive("counts", compression), data.large_packed_archive("counts", compression)


def growth(what: str, samples: Samples) -> Figure:
    """How time a byte, or an access, grows with the size."""
    figure = ratio(samples, "large", "small")
    return Figure("13", f"ten times as large: {what}", figure, "x", Reach("at most", GROWTH), "", samples)


def on_fresh_mount(archive: Path, read: Callable[[Path], float]) -> float:
    """What `read` gives for the matrix of a fresh mount."""
    with mounted(archive, read_ahead_kib=DEFAULT_READ_AHEAD_KIB) as mount:
        return read(mount.path(matrix_path("counts")))


def warm_read(file: Path) -> float:
    """Seconds a byte of the second sequential read."""
    read_whole(file)
    return read_whole(file) / os.stat(file).st_size


def speeds(samples: Samples, n_bytes: int) -> str:
    """Medians of what was timed, as throughput."""
    return ", ".join(f"{name} {n_bytes / statistics.median(taken) / 1e9:.2f} GB/s" for name, taken in samples.items())


def times(samples: Samples) -> str:
    """Medians of what was timed, in microseconds."""
    return ", ".join(f"{name} {statistics.median(taken) * 1e6:.0f} us" for name, taken in samples.items())


def _run(command: Sequence[str], given: bytes = b"") -> float:
    start = time.perf_counter()
    subprocess.run(command, input=given, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


LINES: dict[str, Callable[[Bench], list[Figure]]] = {
    "1": line_1,
    "2": line_2,
    "3": line_3,
    "4": line_4,
    "5": line_5,
    "6": line_6,
    "7": line_7,
    "8": line_8,
    "9": line_9,
    "10": line_10,
    "11": line_11,
    "12": line_12,
    "13": line_13,
    "V": line_v,
    "H1": line_h1,
    "H2": line_h2,
    "H3": line_h3,
}
