"""What a mount shows while its source is appended to, replaced, rewritten, deleted, or changed file by file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mounts import LIMIT_S, Mounted, wait_until
from zip_append import Append, append

pytestmark = pytest.mark.fuse

QUICK = ("-o", "refresh=0.1")
NEW = "vectors/cell/fresh"
NEW_JSON = b'{"format":"dense","eltype":"String"}\n'
NEW_TEXT = b"one\ntwo\n"
F64 = "vectors/cell/f64.data"
COUNTS = "matrices/cell/gene/counts.data"
REPLACED = r"the archive was replaced while the file was open"


@pytest.fixture
def archive(corpus: Path, tmp_path: Path) -> Path:
    """A packed archive that may be written to."""
    return Path(shutil.copyfile(corpus / "dafr" / "zstd.daf.zip", tmp_path / "x.daf.zip"))


@pytest.fixture
def files(corpus: Path, tmp_path: Path) -> Path:
    """A packed FilesDaf directory that may be written to."""
    place = tmp_path / "x.daf"
    shutil.copytree(corpus / "dafr" / "zstd.daf", place, copy_function=shutil.copyfile)
    return place


@pytest.fixture
def flat(corpus: Path) -> Path:
    """What is in both."""
    return corpus / "dafr" / "flat.daf"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDONLY)
    try:
        yield file
    finally:
        os.close(file)


def read_whole(file: int) -> bytes:
    """To the end; the kernel itself gives fewer bytes where those before a failure are in its cache."""
    size = os.fstat(file).st_size
    data = b""
    while len(data) < size:
        data += os.pread(file, size - len(data), len(data))
    return data


def is_stale(file: int) -> bool:
    try:
        read_whole(file)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return True
    return False


def bytes_or_none(path: Path) -> bytes | None:
    """The file's bytes; None where it is missing, or changes while it is opened and read."""
    try:
        return path.read_bytes()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None


def becomes(path: Path, data: bytes) -> None:
    wait_until(lambda: bytes_or_none(path) == data, f"{path} showing its new bytes")


def replace(path: Path, data: bytes) -> None:
    """As careful writers do: a new file takes the old one's name."""
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


class Mapping:
    """Another process that has mapped a file and tells its bytes."""

    PROGRAM = """
import mmap, sys
with open(sys.argv[1], "rb") as stream:
    data = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
for line in sys.stdin:
    print(data[int(line)], flush=True)
"""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, path],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def byte(self, offset: int) -> int | None:
        """The byte at an offset of the mapping; None where the process died of a page that is no more."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(f"{offset}\n")
        except BrokenPipeError:
            return None
        line = self.process.stdout.readline()
        return int(line) if line else None

    def end(self) -> int:
        """Ends it; its exit status."""
        with contextlib.suppress(BrokenPipeError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[Mapping]:
    mapping = Mapping(path)
    try:
        yield mapping
    finally:
        mapping.process.kill()
        mapping.process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# Archives that grow


def test_what_is_appended_is_shown_and_open_files_do_not_notice(archive: Path, flat: Path, mounted: Mounted) -> None:
    with mounted(archive) as shown, opened(shown / F64) as file, mapped(shown / COUNTS) as mapping:
        before = os.fstat(file)
        assert os.pread(file, 100, 0) == (flat / F64).read_bytes()[:100]
        assert bytes_or_none(shown / f"{NEW}.txt") is None  # the kernel remembers that it is not there
        names = set(os.listdir(shown / "vectors/cell"))
        append(archive, f"{NEW}.txt", NEW_TEXT)
        append(archive, f"{NEW}.json", NEW_JSON)
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        becomes(shown / f"{NEW}.json", NEW_JSON)
        assert set(os.listdir(shown / "vectors/cell")) - names == {"fresh.txt", "fresh.json"}
        wait_until(lambda: NEW in json.loads((shown / "metadata.json").read_bytes()), "metadata.json listing it")
        assert read_whole(file) == (flat / F64).read_bytes()
        assert os.fstat(file) == before
        assert os.stat(shown / F64).st_ino == before.st_ino
        assert mapping.byte(-1) == (flat / COUNTS).read_bytes()[-1]
        assert mapping.end() == 0


def test_new_entries_show_within_two_seconds_of_the_default_interval(archive: Path, mounted: Mounted) -> None:
    with mounted(archive) as shown:
        assert bytes_or_none(shown / f"{NEW}.txt") is None
        append(archive, f"{NEW}.txt", NEW_TEXT)
        begin = time.monotonic()
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        # A second is what is promised on a machine that has nothing else to do.
        assert time.monotonic() - begin < LIMIT_S / 2


def test_a_new_axis_brings_its_directories(archive: Path, mounted: Mounted) -> None:
    with mounted(archive, *QUICK) as shown:
        os.listdir(shown / "matrices/cell")
        append(archive, "axes/sample.txt", b"b1\nb2\n")
        becomes(shown / "axes/sample.txt", b"b1\nb2\n")
        for name in ("vectors/sample", "matrices/sample/cell", "matrices/cell/sample", "matrices/sample/sample"):
            assert os.listdir(shown / name) == []


def test_an_entry_is_not_shown_until_it_is_complete(archive: Path, flat: Path, mounted: Mounted) -> None:
    with mounted(archive, *QUICK) as shown, opened(shown / F64) as file:
        steps = Append(archive, f"{NEW}.txt", NEW_TEXT)
        steps.write_directory()
        second = archive.with_name("y.daf.zip")
        shutil.copyfile(archive, second)
        with mounted(second, *QUICK) as other:  # has no older state: the entry is there, and bad
            assert "fresh.txt" in os.listdir(other / "vectors/cell")
        assert read_whole(file) == (flat / F64).read_bytes()
        assert bytes_or_none(shown / f"{NEW}.txt") is None
        assert (shown / COUNTS).read_bytes() == (flat / COUNTS).read_bytes()
        steps.write_entry()
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        assert read_whole(file) == (flat / F64).read_bytes()


def test_open_files_are_read_on_while_an_archive_has_no_directory(archive: Path, flat: Path, mounted: Mounted) -> None:
    with mounted(archive, *QUICK) as shown, opened(shown / F64) as file:
        with zipfile.ZipFile(archive, "a") as stream:
            stream.writestr(f"{NEW}.txt", NEW_TEXT * 100_000)
            assert stream.fp is not None
            stream.fp.flush()
            assert not zipfile.is_zipfile(archive)
            assert read_whole(file) == (flat / F64).read_bytes()
            assert (shown / COUNTS).read_bytes() == (flat / COUNTS).read_bytes()
        becomes(shown / f"{NEW}.txt", NEW_TEXT * 100_000)
        assert read_whole(file) == (flat / F64).read_bytes()


def test_a_property_written_anew_by_appending_is_another_file(archive: Path, mounted: Mounted) -> None:
    name = "axes/cell.txt"
    with mounted(archive, *QUICK) as shown, opened(shown / name) as file:
        old = read_whole(file)
        number = os.fstat(file).st_ino
        new = old.replace(b"1", b"2")
        append(archive, name, new)
        becomes(shown / name, new)
        assert os.stat(shown / name).st_ino != number
        assert read_whole(file) == old


def test_a_group_that_is_appended_appears(corpus: Path, tmp_path: Path, mounted: Mounted) -> None:
    archive = Path(shutil.copyfile(corpus / "dafr" / "zstd.dafs.zip", tmp_path / "x.dafs.zip"))
    with mounted(archive, *QUICK) as shown:
        groups = set(os.listdir(shown))
        append(archive, "another/daf.json", b'{"version":[1,1]}\n')
        wait_until(lambda: set(os.listdir(shown)) == groups | {"another"}, "the new group")
        assert {"axes", "scalars", "vectors", "matrices", "metadata.json"} < set(os.listdir(shown / "another"))


def test_a_mounted_group_follows_its_archive(corpus: Path, tmp_path: Path, mounted: Mounted) -> None:
    archive = Path(shutil.copyfile(corpus / "dafr" / "zstd.dafs.zip", tmp_path / "x.dafs.zip"))
    with zipfile.ZipFile(archive) as stream:
        group = next(name for name in stream.namelist() if name.endswith("/daf.json")).removesuffix("/daf.json")
    with mounted(f"{archive}#/{group}", *QUICK) as shown:
        assert bytes_or_none(shown / "axes/late.txt") is None
        append(archive, f"{group}/axes/late.txt", b"late\n")
        append(archive, "another/daf.json", b'{"version":[1,1]}\n')
        becomes(shown / "axes/late.txt", b"late\n")
        assert not (shown / "another").exists()


def test_without_refresh_nothing_changes(archive: Path, mounted: Mounted) -> None:
    with mounted(archive, "-o", "refresh=0") as shown:
        names = os.listdir(shown / "vectors/cell")
        append(archive, f"{NEW}.txt", NEW_TEXT)
        with mounted(archive, *QUICK) as other:  # until this one has mounted and looked, the first one would have
            append(archive, f"{NEW}.json", NEW_JSON)
            becomes(other / f"{NEW}.json", NEW_JSON)
        assert os.listdir(shown / "vectors/cell") == names


# ---------------------------------------------------------------------------------------------------------------------
# Archives that are replaced, rewritten, cut, deleted


def test_a_replaced_archive_is_stale_for_old_handles_and_new_for_others(
    archive: Path, corpus: Path, flat: Path, mounted: Mounted
) -> None:
    other = corpus / "dafr" / "small-flat.daf.zip"
    with zipfile.ZipFile(other) as stream:
        new_axis = stream.read("axes/cell.txt")
    with (
        mounted(archive, *QUICK, expect_log=[REPLACED]) as shown,
        opened(shown / F64) as file,
        opened(shown / "axes/cell.txt") as axis,
        mapped(shown / COUNTS) as mapping,
    ):
        old_axis = read_whole(axis)
        assert mapping.byte(0) == (flat / COUNTS).read_bytes()[0]
        assert old_axis != new_axis
        replace(archive, other.read_bytes())
        becomes(shown / "axes/cell.txt", new_axis)
        wait_until(lambda: is_stale(file) and is_stale(axis), "old handles becoming stale")
        last = len((flat / COUNTS).read_bytes()) - 1
        wait_until(lambda: mapping.byte(last) is None, "the old mapping ending")
        assert mapping.end() == -signal.SIGBUS


def test_an_archive_rewritten_in_place_is_never_mixed(archive: Path, flat: Path, mounted: Mounted) -> None:
    """The new archive is larger, has the same names, and other bytes at most of the old places."""
    old = (flat / F64).read_bytes()
    new = bytes(reversed(old))
    data = archive.with_name("new")
    with zipfile.ZipFile(data, "w") as stream:
        for name in ("daf.json", "axes/cell.txt", "axes/gene.txt"):
            stream.write(flat / name, name)
        stream.write(flat / "vectors/cell/f64.json", "vectors/cell/f64.json")
        stream.writestr(F64, new)
        stream.writestr("filler", bytes(2 * archive.stat().st_size))
    with mounted(archive, *QUICK, expect_log=[r"f64\.data: .*(changed|replaced|rewritten|shrank|written to)"]) as shown:
        handles = [os.open(shown / F64, os.O_RDONLY) for _ in range(2)]
        try:
            assert os.pread(handles[0], 4096, 0) == old[:4096]
            with archive.open("r+b") as stream:
                stream.truncate(0)
                written = data.read_bytes()
                for at in range(0, len(written), 256 * 1024):
                    stream.write(written[at : at + 256 * 1024])
                    stream.flush()
                    for handle in handles:
                        with contextlib.suppress(OSError):
                            assert read_whole(handle) == old
            becomes(shown / F64, new)
            wait_until(lambda: all(map(is_stale, handles)), "old handles becoming stale")
        finally:
            for handle in handles:
                os.close(handle)


def test_a_deleted_archive_is_missing_until_it_is_back(archive: Path, flat: Path, mounted: Mounted) -> None:
    away = archive.with_name("away")
    with mounted(archive, *QUICK, expect_log=[r"x\.daf\.zip: the file is gone"]) as shown, opened(shown / F64) as file:
        assert (shown / COUNTS).read_bytes() == (flat / COUNTS).read_bytes()
        archive.rename(away)
        wait_until(lambda: bytes_or_none(shown / COUNTS) is None, "the archive being missed")
        with pytest.raises(FileNotFoundError):
            os.listdir(shown)
        assert os.path.isdir(shown)
        assert read_whole(file) == (flat / F64).read_bytes()  # still open, as with every file that is deleted
        away.rename(archive)
        becomes(shown / COUNTS, (flat / COUNTS).read_bytes())
        assert "vectors" in os.listdir(shown)


def test_an_archive_cut_short_stays_as_it_was_until_it_is_whole(archive: Path, flat: Path, mounted: Mounted) -> None:
    data = archive.read_bytes()
    with mounted(archive, *QUICK, expect_log=[r"shrank|changed|written"]) as shown, opened(shown / F64) as file:
        os.truncate(archive, 100)
        names = os.listdir(shown / "vectors/cell")
        assert is_stale(file)
        archive.write_bytes(data)
        append(archive, f"{NEW}.txt", NEW_TEXT)
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        becomes(shown / F64, (flat / F64).read_bytes())
        assert set(names) < set(os.listdir(shown / "vectors/cell"))


def test_a_touched_archive_disturbs_nobody(archive: Path, flat: Path, mounted: Mounted) -> None:
    with mounted(archive, *QUICK) as shown, opened(shown / F64) as file:
        number = os.fstat(file).st_ino
        os.utime(archive, (1, 1))
        append(archive, f"{NEW}.txt", NEW_TEXT)  # what makes it certain that the first change was seen
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        assert read_whole(file) == (flat / F64).read_bytes()
        assert os.stat(shown / F64).st_ino == number


# ---------------------------------------------------------------------------------------------------------------------
# FilesDaf directories


def test_a_property_comes_changes_and_goes(files: Path, flat: Path, mounted: Mounted) -> None:
    with mounted(files, *QUICK) as shown:
        assert bytes_or_none(shown / f"{NEW}.txt") is None
        (files / f"{NEW}.txt").write_bytes(NEW_TEXT)
        (files / f"{NEW}.json").write_bytes(NEW_JSON)
        becomes(shown / f"{NEW}.txt", NEW_TEXT)
        becomes(shown / f"{NEW}.json", NEW_JSON)
        wait_until(lambda: NEW in json.loads((shown / "metadata.json").read_bytes()), "metadata.json listing it")
        replace(files / f"{NEW}.txt", NEW_TEXT * 3)
        becomes(shown / f"{NEW}.txt", NEW_TEXT * 3)
        (files / f"{NEW}.txt").unlink()
        (files / f"{NEW}.json").unlink()
        wait_until(lambda: bytes_or_none(shown / f"{NEW}.json") is None, "the property going")
        wait_until(lambda: NEW not in json.loads((shown / "metadata.json").read_bytes()), "metadata.json forgetting it")
        assert (shown / F64).read_bytes() == (flat / F64).read_bytes()


def test_a_file_rewritten_in_place_is_stale_for_old_handles(files: Path, mounted: Mounted) -> None:
    name = "axes/gene.txt"
    with mounted(files, *QUICK, expect_log=[r"axes/gene\.txt"]) as shown, opened(shown / name) as file:
        old = read_whole(file)
        new = old.upper()[::-1] + b"more\n"
        (files / name).write_bytes(new)
        becomes(shown / name, new)
        wait_until(lambda: is_stale(file), "the old handle becoming stale")
        assert os.stat(shown / name).st_size == len(new)


def test_a_file_replaced_by_rename_is_read_on_where_it_is_open(files: Path, mounted: Mounted) -> None:
    name = "axes/gene.txt"
    with mounted(files, *QUICK) as shown, opened(shown / name) as file:
        old = read_whole(file)
        replace(files / name, b"new\n")
        becomes(shown / name, b"new\n")
        assert read_whole(file) == old


def test_a_property_that_was_packed_becomes_flat(files: Path, flat: Path, mounted: Mounted) -> None:
    stem = F64.removesuffix(".data")
    with mounted(files, *QUICK) as shown:
        data = (flat / F64).read_bytes()
        assert (shown / F64).read_bytes() == data
        (files / F64).write_bytes(data[::-1])
        replace(files / f"{stem}.json", (flat / f"{stem}.json").read_bytes())
        (files / f"{stem}.zip").unlink()
        becomes(shown / F64, data[::-1])


def test_a_longer_axis_changes_the_size_of_its_properties(files: Path, flat: Path, mounted: Mounted) -> None:
    size = (flat / F64).stat().st_size
    with mounted(files, *QUICK) as shown:
        assert os.stat(shown / F64).st_size == size
        replace(files / "axes/cell.txt", (files / "axes/cell.txt").read_bytes() + b"another\n")
        wait_until(lambda: os.stat(shown / F64).st_size == size + 8, "the size following the axis")


def test_a_deleted_directory_is_missing_until_it_is_back(files: Path, flat: Path, mounted: Mounted) -> None:
    away = files.with_name("away")
    with mounted(files, *QUICK, expect_log=[r"x\.daf: no such"]) as shown:
        assert (shown / F64).read_bytes() == (flat / F64).read_bytes()
        files.rename(away)
        wait_until(lambda: bytes_or_none(shown / F64) is None, "the directory being missed")
        away.rename(files)
        becomes(shown / F64, (flat / F64).read_bytes())


def test_readers_see_old_or_new_bytes_while_a_property_changes_all_the_time(files: Path, mounted: Mounted) -> None:
    name = "vectors/cell/busy.data"
    states = [bytes([value]) * (100_000 + value) for value in range(40)]
    (files / name).write_bytes(states[0])

    with mounted(files, "-o", "refresh=0.02") as shown:
        for state in states[1:]:
            replace(files / name, state)
            for _ in range(10):
                found = bytes_or_none(shown / name)
                assert found is None or found in states
        becomes(shown / name, states[-1])
