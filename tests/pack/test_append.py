"""Appending a group: the archive is readable after every write, after every kill and power cut, and after failures."""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from dafmount.errors import CorruptArchive, DestinationBusy, DestinationExists, UnsupportedFormat, UsageError
from dafmount.pack.append import AppendSink, Disk, FileDisk
from dafmount.source.local import LocalFile
from dafmount.source.resolve import daf_roots
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from packing import assert_same_trees, remains, run_pack, run_unpack

SECTOR_BYTES = 512
PAGE_BYTES = 4096
OLD_GROUPS = ["deep/old", "one"]
NEW_GROUP = "two/new"


class Write(NamedTuple):
    """One write of an append; `data` None is an fsync."""

    data: bytes | None
    offset: int = 0


class RecordingDisk:
    """Writes nothing, remembers everything."""

    def __init__(self) -> None:
        self.writes: list[Write] = []

    def write(self, data: bytes, offset: int) -> None:
        self.writes.append(Write(data, offset))

    def sync(self) -> None:
        self.writes.append(Write(None))


@pytest.fixture(scope="module")
def archive(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive of two groups, with a directory of several pages."""
    path = tmp_path_factory.mktemp("archive") / "x.dafs.zip"
    for group in OLD_GROUPS:
        run_pack(corpus / "dafr" / "small-flat.daf", f"{path}#/{group}", "zstd")
    with zipfile.ZipFile(path, "a") as other:  # by another program, with 32-bit records and a comment
        for n in range(150):
            other.writestr(f"notes/of the archive/number {n}.txt", f"{n}" * n)
        other.comment = b"made by hand"
    return path


@pytest.fixture(scope="module")
def writes(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Write]:
    """The writes that append a group to it."""
    copy = tmp_path_factory.mktemp("copy") / "x.dafs.zip"
    copy.write_bytes(archive.read_bytes())
    disk = RecordingDisk()
    append_files(copy, lambda fd: disk)
    return disk.writes


def append_files(archive: Path, make_disk: Callable[[int], Disk]) -> None:
    with AppendSink(archive, NEW_GROUP + "/", make_disk) as sink:
        for name, data in new_files():
            out = sink.create(name)
            out.write(data)
            out.close()
        sink.commit(lambda: None)


def new_files() -> Iterator[tuple[str, bytes]]:
    numbers = random.Random(1)
    yield "daf.json", b'{"version":[1,1]}\n'
    yield "axes/cell.txt", b"A\nB\n"
    for n in range(30):
        yield f"scalars/s{n}.json", numbers.randbytes(n * 700)


def apply(data: bytearray, write: Write, start: int = 0, stop: int | None = None) -> None:
    """Some of a write's bytes, as `pwrite` puts them."""
    assert write.data is not None
    part = write.data[start:stop]
    at = write.offset + start
    if part:
        data.extend(bytes(max(0, at - len(data))))
        data[at : at + len(part)] = part


def groups_of(path: Path) -> list[str]:
    """The groups of an archive, after a look at every entry of the old ones and of the notes."""
    file = LocalFile(path, "x")
    opened = ZipArchive(file, "x", 0, Spool(), verify="all")
    try:
        for group in OLD_GROUPS:
            assert opened.read_small(f"{group}/daf.json", 100) == b'{"version":[1,1]}\n'
            assert opened.open(f"{group}/matrices/cell/gene/dense.zip").size > 10000
        for n in range(150):
            assert opened.read_small(f"notes/of the archive/number {n}.txt", 1000).decode() == f"{n}" * n
        groups = daf_roots(opened)
        if NEW_GROUP in groups:
            for name, data in new_files():
                assert opened.read_small(f"{NEW_GROUP}/{name}", 1 << 20) == data
        return groups
    finally:
        opened.close()


@pytest.fixture
def check(tmp_path: Path) -> Callable[[bytes | bytearray], list[str]]:
    path = tmp_path / "state.dafs.zip"

    def check(data: bytes | bytearray) -> list[str]:
        path.write_bytes(data)
        return groups_of(path)

    return check


def test_each_write_leaves_the_old_state_or_the_new(
    archive: Path, writes: list[Write], check: Callable[[bytes | bytearray], list[str]], tmp_path: Path
) -> None:
    data = bytearray(archive.read_bytes())
    old = bytes(data)
    found = [check(data)]
    n_writes = sum(write.data is not None for write in writes)
    assert n_writes >= 6
    n = 0
    for write in writes:
        if write.data is None:
            continue
        n += 1
        before = bytes(data)
        for stop in range(PAGE_BYTES - write.offset % PAGE_BYTES, len(write.data), PAGE_BYTES):
            torn = bytearray(before)  # a kill may end a write after any page
            apply(torn, write, 0, stop)
            assert check(torn) == OLD_GROUPS
        apply(data, write)
        found.append(check(data))
        assert data[: len(old)] == old
        state = tmp_path / "now.zip"
        state.write_bytes(data)
        assert subprocess.run(["7z", "t", state], check=False, capture_output=True).returncode == 0
        if n >= 3:  # until then readers that insist on a directory directly before the end records find none
            assert subprocess.run(["unzip", "-tq", state], check=False, capture_output=True).returncode == 0
            with zipfile.ZipFile(state) as opened:
                assert opened.testzip() is None
                assert opened.comment == b"made by hand"
    assert found == [OLD_GROUPS] * n_writes + [sorted([*OLD_GROUPS, NEW_GROUP])]


@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_leaves_the_old_state_or_the_new(
    archive: Path, writes: list[Write], check: Callable[[bytes | bytearray], list[str]], seed: int
) -> None:
    """Whatever subset of the sectors written since the last fsync has reached the disk."""
    numbers = random.Random(seed)
    durable = bytearray(archive.read_bytes())
    since: list[Write] = []
    new = sorted([*OLD_GROUPS, NEW_GROUP])
    for write in writes:
        if write.data is not None:
            since.append(write)
            continue
        state = bytearray(durable)
        for one in since:
            assert one.data is not None
            first = SECTOR_BYTES - one.offset % SECTOR_BYTES
            cuts = [0, *range(first, len(one.data), SECTOR_BYTES), len(one.data)]
            for start, stop in pairwise(cuts):
                if numbers.random() < 0.5:
                    apply(state, one, start, stop)
        assert check(state) in (OLD_GROUPS, new)
        for one in since:
            apply(durable, one)
        since = []
    assert since == []
    assert check(durable) == new


def test_the_file_grows_once_and_by_less_than_a_sector_s_write(archive: Path, writes: list[Write]) -> None:
    size = archive.stat().st_size
    first = writes[0]
    assert first.data is not None
    assert first.offset >= size
    assert first.offset // SECTOR_BYTES == (first.offset + len(first.data) - 1) // SECTOR_BYTES
    end = first.offset + len(first.data)
    assert all(write.offset + len(write.data) <= end for write in writes if write.data is not None)


def copied(archive: Path, folder: Path) -> Path:
    copy = folder / "x.dafs.zip"
    copy.write_bytes(archive.read_bytes())
    return copy


class FailingDisk(FileDisk):
    """A disk that is full after some writes."""

    def __init__(self, fd: int, n_writes: int) -> None:
        super().__init__(fd)
        self.left = n_writes

    def write(self, data: bytes, offset: int) -> None:
        if self.left == 0:
            raise OSError(28, "No space left on device")
        self.left -= 1
        super().write(data, offset)


@pytest.mark.parametrize("n_writes", range(6))
def test_a_failure_at_any_write_takes_everything_back(archive: Path, tmp_path: Path, n_writes: int) -> None:
    copy = copied(archive, tmp_path)
    with pytest.raises(OSError, match="No space"):
        append_files(copy, lambda fd: FailingDisk(fd, n_writes))
    assert copy.read_bytes() == archive.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["x.dafs.zip"]


def test_nothing_is_touched_before_everything_is_encoded(archive: Path, tmp_path: Path) -> None:
    copy = copied(archive, tmp_path)
    before = copy.stat()
    with AppendSink(copy, NEW_GROUP + "/") as sink:
        out = sink.create("daf.json")
        out.write(b"x")
        out.close()
    assert copy.stat().st_mtime_ns == before.st_mtime_ns
    assert copy.read_bytes() == archive.read_bytes()


def test_a_second_writer_is_kept_out(archive: Path, corpus: Path, tmp_path: Path) -> None:
    copy = copied(archive, tmp_path)
    fd = os.open(copy, os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(DestinationBusy, match=r"another process is writing to the archive"):
        run_pack(corpus / "julia" / "jf11", f"{copy}#/three")
    os.close(fd)
    run_pack(corpus / "julia" / "jf11", f"{copy}#/three")


def test_groups_are_added_one_after_the_other(corpus: Path, tmp_path: Path) -> None:
    source = corpus / "julia" / "jf11"
    run_unpack(source, tmp_path / "expected.daf")
    names = [f"g{n}/{'x' * n}y" for n in range(12)]
    for name in names:
        run_pack(source, f"{tmp_path}/x.dafs.zip#/{name}")
    for name in names:
        run_unpack(f"{tmp_path}/x.dafs.zip#/{name}", tmp_path / name.replace("/", "-"))
        assert_same_trees(tmp_path / name.replace("/", "-"), tmp_path / "expected.daf")
    assert remains(tmp_path) == []


def test_a_group_may_be_made_of_another_of_the_same_archive(archive: Path, tmp_path: Path) -> None:
    copy = copied(archive, tmp_path)
    run_pack(f"{copy}#/one", f"{copy}#/{NEW_GROUP}", "gzip", jobs=2)
    run_unpack(f"{copy}#/one", tmp_path / "one.daf")
    run_unpack(f"{copy}#/{NEW_GROUP}", tmp_path / "two.daf")
    assert_same_trees(tmp_path / "one.daf", tmp_path / "two.daf")


def test_a_mounted_reader_goes_on_reading(archive: Path, tmp_path: Path, corpus: Path) -> None:
    copy = copied(archive, tmp_path)
    opened = ZipArchive(LocalFile(copy, "x"), "x", 0, Spool(), verify="all")
    entry = opened.open("one/matrices/cell/gene/dense.zip")
    before = entry.read(0, entry.size)
    run_pack(corpus / "julia" / "jf11", f"{copy}#/three")
    assert entry.read(0, entry.size) == before
    opened.close()


def test_archives_that_dafr_wrote_take_more(corpus: Path, tmp_path: Path) -> None:
    copy = copied(corpus / "dafr" / "gzip.dafs.zip", tmp_path)
    run_pack(corpus / "julia" / "jf11", f"{copy}#/three")
    assert subprocess.run(["unzip", "-tq", copy], check=False, capture_output=True).returncode == 0
    for group in ("one", "two/nested"):
        for source, kind in ((copy, "new"), (corpus / "dafr" / "gzip.dafs.zip", "old")):
            run_unpack(f"{source}#/{group}", tmp_path / f"{kind}-{group.replace('/', '-')}")
    assert_same_trees(tmp_path / "new-one", tmp_path / "old-one")
    assert_same_trees(tmp_path / "new-two-nested", tmp_path / "old-two-nested")


def test_a_group_that_exists_is_never_replaced(archive: Path, corpus: Path, tmp_path: Path) -> None:
    copy = copied(archive, tmp_path)
    with pytest.raises(DestinationExists, match="#/one: exists already"):
        run_pack(corpus / "julia" / "jf11", f"{copy}#/one")
    with pytest.raises(UsageError, match="append-only"):
        run_pack(corpus / "julia" / "jf11", f"{copy}#/one", overwrite=True)
    assert copy.read_bytes() == archive.read_bytes()
    run_pack(corpus / "julia" / "jf11", f"{copy}#/deep", overwrite=True)  # a folder of groups may be one itself


def test_what_is_no_whole_archive_is_left_alone(archive: Path, corpus: Path, tmp_path: Path) -> None:
    source = corpus / "julia" / "jf11"
    cut = tmp_path / "cut.dafs.zip"
    cut.write_bytes(archive.read_bytes()[:-50])
    with pytest.raises(CorruptArchive):
        run_pack(source, f"{cut}#/new")
    prepended = tmp_path / "prepended.dafs.zip"
    prepended.write_bytes(b"#!/bin/sh\n" + archive.read_bytes())
    with pytest.raises(UnsupportedFormat, match="10 bytes were put before"):
        run_pack(source, f"{prepended}#/new")
