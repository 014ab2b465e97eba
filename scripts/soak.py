"""Mounts under mixed load for a while, every byte checked: soak.py [--seconds N]

Sequential, random and mapping readers, readers that are killed, walkers, mounting and unmounting, an archive that is
appended to, one that is replaced, and a web server that is slow, breaks off and answers with errors now and then.
Prints figures; ends with code 1 after a wrong byte, an error, a warning in a log, a daemon that grew or did not end.

A further kind of source is one more `Served` in `start_sources`. However the soak ends, nothing stays behind: what it
starts is told to end by the kernel when the soak is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import faulthandler
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from types import FrameType
from typing import NoReturn

from web import Handler, Web

import fuzzing
from mounts import DAFMOUNT, is_mounted, wait_until
from zip_append import Append

N_CELLS = 400_000
"""Enough that a file is read on and on, and decoded ahead by processes of the daemon."""

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

DISK_CACHE = "cache-dir-size=1M"
"""Less than what is read, so that it gives up entries all the time."""

STALE = ("changed", "replaced")
"""What the log tells of whoever holds a file of an archive that was replaced."""

N_KILLED = (8, 8, 8, 200)
REPLACED_FOR_S = 1.5

MADV_POPULATE_READ = 22
"""mman.h of Linux 5.14"""

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Served:
    """A mount that lasts for the whole time, and what it must show."""

    name: str
    mountpoint: Path
    server: subprocess.Popen[bytes]
    truth: Mapping[str, bytes]
    log: Path

    def resident_bytes(self) -> int:
        """Of the daemon alone: the processes that decode for it come and go."""
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
        self.seconds = seconds
        self.end = float("inf")
        self.figures = Figures()
        self.seeds = [fuzzing.make_seed(codec, N_CELLS) for codec in ("blosc_zstd_bitshuffle", "gzip_shuffle")]
        self.others = [self.seeds[0], fuzzing.make_seed("zstd", N_CELLS, start=1)]
        self.served: list[Served] = []
        self.growing = place / "growing.daf.zip"
        self.replaced = place / "replaced.daf.zip"
        self.next_states = cycle([fuzzing.as_archive(seed.stored, zipfile.ZIP_STORED) for seed in self.others[::-1]])
        self.n_appended = 0
        self.n_faults: Synchronized[int] = multiprocessing.get_context("spawn").Value("l", 0)
        self.web: SpawnProcess | None = None
        self.children: set[subprocess.Popen[bytes]] = set()

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end or bool(self.figures.failures)

    def start(self, command: Sequence[str | Path], at_the_end: str) -> subprocess.Popen[bytes]:
        """A process that gets the signal `at_the_end` when this one is gone."""
        child = subprocess.Popen(
            ["setpriv", "--pdeathsig", at_the_end, *command], stdin=subprocess.DEVNULL, start_new_session=True
        )
        self.children.add(child)
        return child

    def mount(self, name: str, source: Path | str, truth: Mapping[str, bytes], *options: str) -> Served:
        """Starts a mount and waits until it can be used."""
        mountpoint = self.place / name
        mountpoint.mkdir(exist_ok=True)
        log = self.place / f"{name}.log"
        words = ["-o", ",".join(options)] if options else []
        server = self.start([*DAFMOUNT, str(source), mountpoint, "-f", "--log-file", log, *words], "TERM")
        wait_until(lambda: is_mounted(mountpoint) or server.poll() is not None, "mounting")
        return Served(name, mountpoint, server, truth, log)

    def unmount(self, served: Served) -> None:
        """Ends a mount as a user does; a reader that was killed may take a moment to go."""
        end = time.monotonic() + END_LIMIT_S
        while subprocess.run(["fusermount3", "-u", served.mountpoint], capture_output=True, check=False).returncode:
            assert time.monotonic() < end, f"{served.name} cannot be unmounted"
            time.sleep(0.1)
        assert served.server.wait(END_LIMIT_S) == 0, f"{served.name} ended with {served.server.returncode}"
        wait_until(lambda: not session(served.server.pid), f"the processes of {served.name} to end")
        self.children.discard(served.server)

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
        self.replaced.write_bytes(fuzzing.as_archive(self.others[0].stored, zipfile.ZIP_STORED))
        url = self.start_web({"x.daf.zip": fuzzing.as_archive(gzip.stored, zipfile.ZIP_STORED)})
        disk_cache = f"cache-dir={self.place / 'fetched'}"
        self.served = [
            self.mount("directory", directory, blosc.truth, "cache=4M"),
            self.mount("archive", packed, gzip.truth, "cache=4M", f"spool={self.place}"),
            self.mount("growing", self.growing, blosc.truth, "cache=4M", "refresh=0.2", "verify=all"),
            self.mount("web", f"{url}/x.daf.zip", gzip.truth, "cache=4M"),
            self.mount("web-on-disk", f"{url}/x.daf.zip", gzip.truth, "cache=1M", disk_cache, DISK_CACHE),
        ]
        self.served_by_turns = self.mount("replaced", self.replaced, {}, "cache=4M", "refresh=0.2")

    def start_web(self, files: Mapping[str, bytes]) -> str:
        """The URL of a server in a process of its own: a page fault here would wait for one that needs this lock."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        self.web = spawn.Process(target=serve_badly, args=(files, theirs, self.n_faults), daemon=True)
        self.web.start()
        theirs.close()
        self.web_pipe = ours
        return str(ours.recv())

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
                    _fault_in(mapped, at)
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
        command = ["dd", f"if={served.mountpoint / path}", "of=/dev/null", "bs=512", "iflag=direct", "status=none"]
        readers = [self.start(command, "KILL") for _ in range(choose.choice(N_KILLED))]
        time.sleep(choose.random() / 2)
        for reader in readers:
            reader.kill()
        for reader in readers:
            reader.wait()
        self.children.difference_update(readers)
        self.figures.add(killed=len(readers))
        time.sleep(1)

    def mount_and_unmount(self, choose: random.Random) -> None:
        """A mount from start to end."""
        served = self.mount("cycle", self.place / "files.daf", self.seeds[0].truth)
        path = choose.choice(sorted(self.seeds[0].truth))
        assert (served.mountpoint / path).read_bytes() == self.seeds[0].truth[path]
        self.unmount(served)
        self.figures.add(mounts=1)
        time.sleep(1)

    def replace(self, choose: random.Random) -> None:
        """Another archive in the place of one that is mounted."""
        new = self.place / "new.daf.zip"
        new.write_bytes(next(self.next_states))
        new.rename(self.replaced)
        self.figures.add(replaced=1)
        time.sleep(REPLACED_FOR_S * choose.random() * 2)

    def read_replaced(self, choose: random.Random) -> None:
        """A file of an archive that is replaced: the old bytes, the new ones or ESTALE, but never some of each."""
        path = choose.choice(sorted(path for path, data in self.others[0].truth.items() if data))
        size, found = choose.choice((4096, 65_536, 1 << 20)), b""
        try:
            with (self.served_by_turns.mountpoint / path).open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while piece := file.read(size):
                    found += piece
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            self.figures.add(stale=1)
            states = [seed.truth[path][: len(found)] for seed in self.others]
        else:
            states = [seed.truth[path] for seed in self.others]
        assert found in states, f"replaced: {path}: {len(found)} bytes that no state of the archive has"
        self.figures.add(bytes=len(found), requests=1)

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
        self.start_sources()
        self.web_pipe.send("misbehave")
        self.end = time.monotonic() + self.seconds
        kinds: list[Callable[[random.Random], None]] = [
            *[self.read_sequentially] * 2, *[self.read_at_random] * 2, self.map, self.walk, self.kill_readers,
            self.mount_and_unmount, self.append, self.replace, self.read_replaced,
        ]  # fmt: skip
        threads = [threading.Thread(target=self._repeat, args=(kind, at), daemon=True) for at, kind in enumerate(kinds)]
        for thread in threads:
            thread.start()
        time.sleep(self.seconds * WARM_UP)
        before = self._sizes()
        for thread in threads:
            thread.join(max(0.0, self.end - time.monotonic()) + END_LIMIT_S)
        if any(thread.is_alive() for thread in threads):
            self.figures.failures.append("some requests did not end")
        self._report(before, self._sizes())
        for served in [*self.served, self.served_by_turns]:
            self._end(served)
        for failure in self.figures.failures:
            print(f"soak: {failure}", file=sys.stderr)
        return not self.figures.failures

    def _sizes(self) -> dict[str, tuple[int, int]]:
        """Resident bytes and open files of each daemon."""
        return {
            served.name: (served.resident_bytes(), served.open_files())
            for served in [*self.served, self.served_by_turns]
        }

    def _end(self, served: Served) -> None:
        try:
            self.unmount(served)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            self.figures.failures.append(str(error))
        for line in served.log.read_text().splitlines():
            is_fault = " ERROR " in line or " WARNING " in line or line.startswith("Traceback")
            if is_fault and not (served is self.served_by_turns and any(word in line for word in STALE)):
                self.figures.failures.append(f"{served.log.name}: {line}")

    def _repeat(self, kind: Callable[[random.Random], None], seed: int) -> None:
        choose = random.Random(seed)
        while not self.is_over:
            try:
                kind(choose)
            except Exception:
                self.figures.failures.append(f"{kind.__name__}: {traceback.format_exc()}")

    def _report(self, before: Mapping[str, tuple[int, int]], after: Mapping[str, tuple[int, int]]) -> None:
        counts = self.figures.counts
        print(
            f"{counts['bytes'] / 1e9:.2f} GB in {counts['requests']} requests checked, {counts['walks']} walks,"
            f" {counts['mounts']} mounts, {counts['killed']} readers killed, {counts['appends']} appends,"
            f" {counts['replaced']} archives replaced ({counts['stale']} readers told so),"
            f" {self.n_faults.value} faults of the web server survived"
        )
        print(f"longest stall {self.figures.longest_stall_s:.2f} s ({self.figures.slowest})")
        if self.figures.longest_stall_s > MAX_STALL_S:
            self.figures.failures.append("a request took too long")
        for name, (bytes_before, files_before) in before.items():
            bytes_after, files_after = after[name]
            print(
                f"{name}: {bytes_before >> 20} -> {bytes_after >> 20} MiB resident,"
                f" {files_before} -> {files_after} open files"
            )
            if bytes_after - bytes_before > MAX_GROWTH_BYTES or files_after - files_before > MAX_MORE_FILES:
                self.figures.failures.append(f"{name}: its daemon grew")

    def stop(self) -> None:
        """Leave nothing running and nothing mounted, whatever happened."""
        self.end = 0.0
        for mountpoint in [path for path in self.place.iterdir() if path.is_dir() and is_mounted(path)]:
            subprocess.run(["fusermount3", "-uz", mountpoint], check=False)
        for child in list(self.children):
            for process in session(child.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            child.wait()
        if self.web is not None:
            self.web.kill()


def session(leader: int) -> list[int]:
    """The processes of a session, its leader among them, that still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, _, _, number = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(number) == leader and state != "Z":
                found.append(int(process.name))
    return found


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
        return faults[int(kind * len(faults))](handler)

    faults = (_is_busy, _has_a_fault, _breaks_off, _breaks_off_half_way, _is_slow)
    with Web(files) as web:
        pipe.send(web.url)
        with contextlib.suppress(EOFError):
            pipe.recv()
            web.behave = misbehave
            pipe.recv()  # until the soak is gone


def _is_busy(handler: Handler) -> bool:
    handler.send_whole(503, b"busy", Retry_After="0")
    return True


def _has_a_fault(handler: Handler) -> bool:
    handler.send_whole(500, b"<html>Something went wrong</html>")
    return True


def _breaks_off(handler: Handler) -> bool:
    handler.cut_off()
    return True


def _breaks_off_half_way(handler: Handler) -> bool:
    send_body = handler.send_body

    def send_half(body: bytes | memoryview) -> None:
        send_body(body[: len(body) // 2])
        handler.cut_off()

    handler.send_body = send_half  # type: ignore[method-assign]
    return False


def _is_slow(handler: Handler) -> bool:
    time.sleep(1)
    return False


def _stop(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _fault_in(mapped: mmap.mmap, at: int) -> None:
    """Raises OSError where a page cannot be read, which otherwise would end the process."""
    start = at // PAGE_BYTES * PAGE_BYTES
    try:
        mapped.madvise(MADV_POPULATE_READ, start, min(3 * PAGE_BYTES, len(mapped) - start))
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 5.14
            raise


def _raise(error: OSError) -> None:
    raise error


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    arguments = parser.parse_args()
    faulthandler.enable()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as place:
        soak = Soak(Path(place), arguments.seconds)
        try:
            return 0 if soak.run() else 1
        finally:
            soak.stop()


if __name__ == "__main__":
    sys.exit(main())
