"""Archives that are written to while they are open: appending is told from rewriting."""

from __future__ import annotations

import os
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dafmount.errors import CorruptArchive, SourceChanged
from dafmount.source.growing import GrowingFile
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from zip_append import Append, append

BIG = bytes(range(256)) * 2000
OTHER = bytes(reversed(BIG))
Open = Callable[[Path], ZipArchive]


@pytest.fixture
def open_growing(spool: Spool) -> Open:
    def open_path(path: Path) -> ZipArchive:
        file = GrowingFile(str(path), path.name)
        return ZipArchive(file, path.name, file.mtime_ns, spool, on_directory=file.trust)

    return open_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write(tmp_path / "x.zip", ("daf.json", b"{}"), ("a", BIG), ("b", BIG))


def write(path: Path, *members: tuple[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), data)
    return path


def whole(archive: ZipArchive, name: str) -> bytes:
    entry = archive.open(name)
    try:
        return entry.read(0, entry.size)
    finally:
        entry.close()


def rewrite(path: Path, *members: tuple[str, bytes]) -> None:
    """In place: the same inode, other bytes."""
    other = write(path.with_name("other"), *members)
    path.write_bytes(other.read_bytes())


def test_appending_disturbs_nothing_that_is_open(path: Path, open_growing: Open) -> None:
    archive = open_growing(path)
    entry = archive.open("a")
    for number in range(3):
        steps = Append(path, f"new{number}", BIG)
        steps.write_directory()
        assert entry.read(1000, 10) == BIG[1000:1010]
        steps.write_entry()
        assert entry.read(2000, 10) == BIG[2000:2010]
        assert whole(archive, "b") == BIG
    assert whole(open_growing(path), "new2") == BIG


def test_a_directory_that_is_away_for_a_while_disturbs_nothing(path: Path, open_growing: Open) -> None:
    archive = open_growing(path)
    entry = archive.open("a")
    with zipfile.ZipFile(path, "a") as stream:
        stream.writestr("new", BIG)
        assert stream.fp is not None
        stream.fp.flush()
        with pytest.raises(CorruptArchive):
            open_growing(path)
        assert entry.read(1000, 10) == BIG[1000:1010]
        assert whole(archive, "b") == BIG
    assert entry.read(5000, 10) == BIG[5000:5010]


def test_rewriting_is_a_change_for_ever(path: Path, open_growing: Open) -> None:
    archive = open_growing(path)
    entry = archive.open("a")
    rewrite(path, ("daf.json", b"{}"), ("a", OTHER), ("b", BIG), ("c", BIG))
    for _ in range(2):
        with pytest.raises(SourceChanged, match=r"x\.zip: the archive was rewritten after it was opened"):
            entry.read(1000, 10)
        with pytest.raises(SourceChanged):
            archive.open("b")
    append(path, "d", b"d")
    with pytest.raises(SourceChanged):
        entry.read(1000, 10)


def test_rewriting_half_done_is_a_change(path: Path, open_growing: Open) -> None:
    entry = open_growing(path).open("a")
    other = write(path.with_name("other"), ("daf.json", b"{}"), ("a", OTHER), ("b", BIG)).read_bytes()
    with path.open("r+b") as stream:
        stream.write(other[:200_000])
        stream.truncate()
        stream.flush()
        with pytest.raises(SourceChanged):
            entry.read(1000, 10)
        with pytest.raises(SourceChanged):
            entry.read(400_000, 10)


def test_the_same_bytes_written_anew_are_no_change(path: Path, open_growing: Open) -> None:
    entry = open_growing(path).open("a")
    data = path.read_bytes()
    path.write_bytes(data)
    os.utime(path, (5, 5))
    assert entry.read(1000, 10) == BIG[1000:1010]


def test_a_replaced_archive_is_read_on_until_it_is_let_go(path: Path, open_growing: Open) -> None:
    archive = open_growing(path)
    write(path.with_name("other"), ("a", OTHER)).replace(path)
    assert whole(archive, "a") == BIG
    assert not open_growing(path).continues(archive)


def test_an_older_archive_goes_on_in_a_newer_one(path: Path, open_growing: Open) -> None:
    older = open_growing(path)
    append(path, "a", OTHER)  # supersedes
    newer = open_growing(path)
    assert newer.continues(older)
    assert whole(newer, "a") == OTHER
    assert newer.unfinished_since(older) is None


def test_an_archive_that_lost_an_entry_does_not_go_on(path: Path, open_growing: Open) -> None:
    older = open_growing(path)
    rewrite(path, ("daf.json", b"{}"), ("a", BIG), ("c", BIG))
    assert not open_growing(path).continues(older)


@pytest.mark.parametrize("crc", [False, True])
def test_an_entry_is_unfinished_until_its_header_and_checksum_are_there(
    path: Path, open_growing: Open, crc: bool
) -> None:
    older = open_growing(path)
    steps = Append(path, "new", BIG)
    steps.write_directory()
    if crc:
        steps.write_entry()
        complete = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            checksum = struct.pack("<L", archive.getinfo("new").CRC)
        at = complete.rindex(checksum)
        path.write_bytes(complete[:at] + bytes(4) + complete[at + 4 :])
    newer = open_growing(path)
    assert newer.continues(older)
    assert newer.unfinished_since(older) == "new"
    steps.write_directory()
    steps.write_entry()
    last = open_growing(path)
    assert last.continues(older)
    assert last.continues(newer)
    assert last.unfinished_since(older) is None


def test_real_archives_go_on(corpus: Path, tmp_path: Path, open_growing: Open) -> None:
    for source in sorted((corpus / "dafr").glob("zstd*.zip")):
        path = Path(shutil.copyfile(source, tmp_path / source.name))
        older = open_growing(path)
        append(path, "vectors/cell/new.txt", b"new")
        newer = open_growing(path)
        assert newer.continues(older)
        assert not older.continues(newer)
        assert whole(newer, "vectors/cell/new.txt") == b"new"
        with zipfile.ZipFile(path) as archive:
            assert archive.read("vectors/cell/new.txt") == b"new"
            assert archive.testzip() is None
        with zipfile.ZipFile(path, "a") as archive:  # which writes the whole directory in its own way
            archive.writestr("another", b"other")
        assert open_growing(path).continues(newer)


def test_copies_of_compressed_entries_go_with_the_last_user(tmp_path: Path, open_growing: Open, spool: Spool) -> None:
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("a", BIG)
    archive = open_growing(path)
    entry = archive.open("a")
    assert entry.read(0, 3) == BIG[:3]
    assert spool.used_bytes == len(BIG)
    del archive
    assert entry.read(5, 3) == BIG[5:8]
    entry.close()
    del entry
    assert spool.used_bytes == 0
