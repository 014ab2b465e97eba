"""Mounts under mixed load for a while, every byte checked: soak.py [--seconds N]

Sequential, random and mapping readers, readers that are killed, walkers, mounting and unmounting, an archive that is
appended to, and a web server that is slow, breaks off and answers with errors now and then. Prints figures; ends with
code 1 after a wrong byte, an error, a daemon that grew or one that did not end.

A further kind of source is one more `Served` in `start_sources`.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from web import Handler, Web

import fuzzing
from mounts import DAFMOUNT, is_mounted, wait_until
from zip_append import Append

N_CELLS = 150_000
WARM_UP = 0.3
"""The part of the time after which the daemons have their final size."""

MAX_GROWTH_BYTES = 48 << 20
MAX_MORE_FILES = 72
"""A mount keeps 64 contents of files read lately, each perhaps of another state of its archive."""

MAX_STALL_S = 30.0
MAX_APPENDS = 100
END_LIMIT_S = 30
FAULT_RATE = 0.02
"""Of the answers of the web server."""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Served:
    """A mount that lasts for the whole time, and what it must show."""

    name: str
    mountpoint: Path
    server: subprocess.Popen[bytes]
    truth: Mapping[str, bytes]

    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.server.pid}/statm").read_text().split()[1]) * PAGE_BYTES

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))


@dataclass
class Figures:
    """What happened, counted by all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    longest_stall_s: float = 0.0
    slowest: str = ""
    failures: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, **counts: int) -> None:
        with self.lock:
            self.counts.update(counts)

    def took(self, what: str, seconds: float) -> None:
        with self.lock:
            if seconds > self.longest_stall_s:
                self.longest_stall_s, self.slowest = seconds, what


class Soak:
    """The load; each kind of it is a method that does one round."""

    def __init__(self, place: Path, seconds: float) -> None:
        self.place = place
        self.end = time.monotonic() + seconds
        self.figures = Figures()
        self.seeds = [fuzzing.make_seed(codec, N_CELLS) for codec in ("blosc_zstd_bitshuffle", "gzip_shuffle")]
        self.served: list[Served] = []
        self.growing = place / "growing.daf.zip"
        self.n_appended = 0
        self.n_faults: Synchronized[int] = multiprocessing.get_context("spawn").Value("l", 0)
        self.web: SpawnProcess | None = None

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end or bool(self.figures.failures)

    def mount(self, name: str, source: Path | str, truth: Mapping[str, bytes], *options: str) -> Served:
        """Starts a mount and waits until it can be used."""
        mountpoint = self.place / name
        mountpoint.mkdir(exist_ok=True)
        log = self.place / f"{name}.log"
        command = [*DAFMOUNT, str(source), str(mountpoint), "-f", "--log-file", str(log), *options]
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        wait_until(lambda: is_mounted(mountpoint) or server.poll() is not None, "mounting")
        return Served(name, mountpoint, server, truth)

    def unmount(self, served: Served) -> None:
        """Ends a mount as a user does; a reader that was killed may take a moment to go."""
        end = time.monotonic() + END_LIMIT_S
        while subprocess.run(["fusermount3", "-u", served.mountpoint], capture_output=True, check=False).returncode:
            assert time.monotonic() < end, f"{served.name} cannot be unmounted"
            time.sleep(0.1)
        assert served.server.wait(END_LIMIT_S) == 0, f"{served.name} ended with {served.server.returncode}"

    def start_sources(self) -> None:
        """Everything that is mounted for the whole time."""
        blosc, gzip = self.seeds
        directory = self.place / "files.daf"
        for path, data in blosc.stored.items():
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            (directory / path).write_bytes(data)
        packed = self.place / "packed.daf.zip"
        packed.write_bytes(fuzzing.as_archive(gzip.stored, zipfile.ZIP_DEFLATED))
        self.growing.write_bytes(fuzzing.as_archive(blosc.stored, zipfile.ZIP_STORED))
        small = ("-o", "cache=4M")
        self.served = [
            self.mount("directory", directory, blosc.truth, *small),
            self.mount("archive", packed, gzip.truth, *small),
            self.mount("growing", self.growing, blosc.truth, "-o", "cache=4M,refresh=0.2"),
        ]
        stored = {"x.daf.zip": fuzzing.as_archive(gzip.stored, zipfile.ZIP_STORED)}
        # In a process of its own: a page fault in this one would wait for a server that needs the interpreter's lock.
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.web = spawn.Process(target=serve_badly, args=(stored, theirs, self.n_faults), daemon=True)
        self.web.start()
        self.served.append(self.mount("web", f"{ours.recv()}/x.daf.zip", gzip.truth, *small))
        ours.send("misbehave")

    # Kinds of load.

    def read_sequentially(self, choose: random.Random) -> None:
        """A whole file, its pages dropped from the kernel's cache first."""
        served, path, truth = self._any(choose)
        file = os.open(served.mountpoint / path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            size, at = choose.choice((4096, 65_536, 1 << 20)), 0
            while at < len(truth):
                at += self._check(file, served, path, truth, at, size)
        finally:
            os.close(file)

    def read_at_random(self, choose: random.Random) -> None:
        """Many small ranges of a file."""
        served, path, truth = self._any(choose)
        file = os.open(served.mountpoint / path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
            for _ in range(100):
                self._check(file, served, path, truth, choose.randrange(len(truth)), choose.randrange(1, 20_000))
        finally:
            os.close(file)

    def map(self, choose: random.Random) -> None:
        """Pages of a mapped file."""
        served, path, truth = self._any(choose)
        with (served.mountpoint / path).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                for _ in range(50):
                    at = choose.randrange(len(truth))
                    began = time.monotonic()
                    found = mapped[at : at + 5000]
                    self.figures.took(f"{served.name}: {path}", time.monotonic() - began)
                    assert found == truth[at : at + 5000], f"{served.name}: {path}: wrong bytes at {at}"
                    self.figures.add(bytes=len(found), requests=1)

    def walk(self, choose: random.Random) -> None:
        """Names and sizes of everything."""
        served = choose.choice(self.served)
        sizes = {}
        for directory, _, names in os.walk(served.mountpoint, onerror=_raise):
            for name in names:
                path = Path(directory) / name
                sizes[str(path.relative_to(served.mountpoint))] = path.stat().st_size
        wrong = {path for path, data in served.truth.items() if sizes.get(path) != len(data)}
        assert not wrong, f"{served.name}: wrong or missing: {sorted(wrong)[:5]}"
        self.figures.add(walks=1, requests=len(sizes))

    def kill_readers(self, choose: random.Random) -> None:
        """Processes killed in the middle of a request."""
        served, path, _ = self._any(choose)
        script = "while cat < \"$0\"; do :; done > /dev/null"
        readers = [
            subprocess.Popen(["sh", "-c", script, served.mountpoint / path], start_new_session=True) for _ in range(8)
        ]
        time.sleep(choose.random() / 2)
        for reader in readers:
            os.killpg(reader.pid, signal.SIGKILL)
        for reader in readers:
            reader.wait()
        self.figures.add(killed=len(readers))

    def mount_and_unmount(self, choose: random.Random) -> None:
        """A mount from start to end."""
        served = self.mount("cycle", self.place / "files.daf", self.seeds[0].truth)
        path = choose.choice(sorted(self.seeds[0].truth))
        assert (served.mountpoint / path).read_bytes() == self.seeds[0].truth[path]
        self.unmount(served)
        self.figures.add(mounts=1)
        time.sleep(1)

    def append(self, choose: random.Random) -> None:
        """A new entry in an archive that is mounted, which must show up."""
        if self.n_appended >= MAX_APPENDS:
            time.sleep(1)
            return
        data = choose.randbytes(choose.randrange(20_000))
        name = f"extra-{self.n_appended}.bin"
        self.n_appended += 1
        append = Append(self.growing, name, data)
        append.write_directory()
        append.write_entry()
        growing = next(served for served in self.served if served.name == "growing")
        began = time.monotonic()
        wait_until(lambda: name in os.listdir(growing.mountpoint), "an appended entry")
        wait_until(lambda: (growing.mountpoint / name).read_bytes() == data, "an appended entry's bytes")
        self.figures.took("an appended entry to be shown", time.monotonic() - began)
        self.figures.add(appends=1)
        time.sleep(1)

    def _any(self, choose: random.Random) -> tuple[Served, str, bytes]:
        served = choose.choice(self.served)
        path = choose.choice([path for path, data in served.truth.items() if data])
        return served, path, served.truth[path]

    def _check(self, file: int, served: Served, path: str, truth: bytes, at: int, size: int) -> int:
        began = time.monotonic()
        found = os.pread(file, size, at)
        self.figures.took(f"{served.name}: {path}", time.monotonic() - began)
        assert found == truth[at : at + size], f"{served.name}: {path}: wrong bytes in {size} at {at}"
        self.figures.add(bytes=len(found), requests=1)
        return len(found)

    # The whole.

    def run(self) -> bool:
        """The load until the time is over; prints figures; whether all went well."""
        seconds = self.end - time.monotonic()
        self.start_sources()
        kinds: list[Callable[[random.Random], None]] = [
            *[self.read_sequentially] * 2, *[self.read_at_random] * 2, self.map, self.walk, self.kill_readers,
            self.mount_and_unmount, self.append,
        ]  # fmt: skip
        threads = [threading.Thread(target=self._repeat, args=(kind, at)) for at, kind in enumerate(kinds)]
        for thread in threads:
            thread.start()
        time.sleep(seconds * WARM_UP)
        before = [(served.resident_bytes(), served.open_files()) for served in self.served]
        for thread in threads:
            thread.join()
        after = [(served.resident_bytes(), served.open_files()) for served in self.served]
        self._report(before, after)
        for served in self.served:
            try:
                self.unmount(served)
            except AssertionError as error:
                self.figures.failures.append(str(error))
        self._check_logs()
        for failure in self.figures.failures:
            print(f"soak: {failure}", file=sys.stderr)
        return not self.figures.failures

    def _repeat(self, kind: Callable[[random.Random], None], seed: int) -> None:
        choose = random.Random(seed)
        while not self.is_over:
            try:
                kind(choose)
            except Exception:
                self.figures.failures.append(f"{kind.__name__}: {traceback.format_exc()}")

    def _report(self, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
        counts = self.figures.counts
        print(
            f"{counts['bytes'] / 1e9:.2f} GB in {counts['requests']} requests checked, {counts['walks']} walks,"
            f" {counts['mounts']} mounts, {counts['killed']} readers killed, {counts['appends']} appends,"
            f" {self.n_faults.value} faults of the web server survived"
        )
        print(f"longest stall {self.figures.longest_stall_s:.2f} s ({self.figures.slowest})")
        if self.figures.longest_stall_s > MAX_STALL_S:
            self.figures.failures.append("a request took too long")
        for served, (bytes_before, files_before), (bytes_after, files_after) in zip(
            self.served, before, after, strict=True
        ):
            print(
                f"{served.name}: {bytes_before >> 20} -> {bytes_after >> 20} MiB resident,"
                f" {files_before} -> {files_after} open files"
            )
            if bytes_after - bytes_before > MAX_GROWTH_BYTES or files_after - files_before > MAX_MORE_FILES:
                self.figures.failures.append(f"{served.name}: its daemon grew")

    def _check_logs(self) -> None:
        for log in self.place.glob("*.log"):
            if log.name == "web.log":
                continue  # it tells of the faults
            for line in log.read_text().splitlines():
                if " ERROR " in line or " WARNING " in line or line.startswith("Traceback"):
                    self.figures.failures.append(f"{log.name}: {line}")

    def stop(self) -> None:
        """Leave nothing mounted, whatever happened."""
        for mountpoint in [path for path in self.place.iterdir() if path.is_dir() and is_mounted(path)]:
            subprocess.run(["fusermount3", "-uz", mountpoint], check=False)
        for served in self.served:
            served.server.kill()
        if self.web is not None:
            self.web.kill()


def serve_badly(files: Mapping[str, bytes], pipe: Connection, n_faults: Synchronized[int]) -> None:
    """A web server that, once told to, answers every now and then with a fault."""
    choose = random.Random(1)

    def misbehave(handler: Handler) -> bool:
        web.requests.clear()
        kind = choose.random() / FAULT_RATE
        if kind >= 1:
            return False
        with n_faults.get_lock():
            n_faults.value += 1
        if kind < 0.25:
            handler.send_whole(503, b"busy", Retry_After="0")
        elif kind < 0.5:
            handler.cut_off()
        elif kind < 0.75:
            handler.send_head(206, Content_Length="100000", Content_Range="bytes 0-99999/1000000")
            handler.cut_off()
        else:
            time.sleep(1)
            return False
        return True

    with Web(files) as web:
        pipe.send(web.url)
        pipe.recv()
        web.behave = misbehave
        threading.Event().wait()


def _raise(error: OSError) -> None:
    raise error


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as place:
        soak = Soak(Path(place), arguments.seconds)
        try:
            return 0 if soak.run() else 1
        finally:
            soak.stop()


if __name__ == "__main__":
    sys.exit(main())
