"""A folder of data sets: each is a folder, opened when entered, and none spoils the others."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mounts import Mounted, run_dafmount, servers, wait_until
from zip_append import append

pytestmark = pytest.mark.fuse

QUICK = ("-o", "refresh=0.1")
F64 = "vectors/cell/f64.data"
MAX_OPEN = 64


@pytest.fixture
def lab(corpus: Path, tmp_path: Path) -> Path:
    """A folder of one data set of each kind, at several depths, among other things."""
    place = tmp_path / "lab"
    (place / "2024" / "deep").mkdir(parents=True)
    (place / "empty").mkdir()
    shutil.copyfile(corpus / "dafr" / "zstd.daf.zip", place / "one.daf.zip")
    shutil.copyfile(corpus / "dafr" / "zstd.dafs.zip", place / "2024" / "many.dafs.zip")
    shutil.copytree(corpus / "dafr" / "gzip.daf", place / "2024" / "deep" / "plain.daf", copy_function=shutil.copyfile)
    (place / "notes.txt").write_text("read me\n")
    (place / "2024" / "other.zip").write_bytes(b"PK\5\6" + bytes(18))
    return place


def tiny(path: Path, version: str = "[1,1]", text: str = "a\n") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("daf.json", f'{{"version":{version}}}\n')
        archive.writestr("axes/cell.txt", text)
    return path


def open_archives(server: int) -> int:
    count = 0
    for descriptor in Path(f"/proc/{server}/fd").iterdir():
        try:
            count += ".daf.zip" in os.readlink(descriptor)
        except FileNotFoundError:  # closed meanwhile
            continue
    return count


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_each_data_set_is_a_folder_under_its_name(lab: Path, corpus: Path, mounted: Mounted) -> None:
    flat = (corpus / "dafr" / "flat.daf" / F64).read_bytes()
    with mounted(lab) as shown:
        assert names(shown) == ["2024", "empty", "notes.txt", "one.daf"]
        assert names(shown / "2024") == ["deep", "many.dafs", "other.zip"]
        assert (shown / "one.daf" / F64).read_bytes() == flat
        assert (shown / "2024/deep/plain.daf" / F64).read_bytes() == flat
        assert "f64.zip" not in names(shown / "2024/deep/plain.daf/vectors/cell")
        with zipfile.ZipFile(lab / "2024/many.dafs.zip") as archive:
            roots = [os.path.dirname(name) for name in archive.namelist() if os.path.basename(name) == "daf.json"]
        assert set(names(shown / "2024/many.dafs")) == {root.partition("/")[0] for root in roots}
        for root in roots:
            assert {"axes", "daf.json", "metadata.json"} <= set(names(shown / "2024/many.dafs" / root))
        assert (shown / "notes.txt").read_text() == "read me\n"
        assert names(shown / "empty") == []


def test_whatever_has_the_name_already_keeps_it(tmp_path: Path, mounted: Mounted) -> None:
    (tmp_path / "x.daf").mkdir()
    tiny(tmp_path / "x.daf.zip", text="from the archive\n")
    with mounted(tmp_path) as shown:
        assert names(shown) == ["x.daf", "x.daf.zip"]
        assert names(shown / "x.daf") == []
        assert (shown / "x.daf.zip/axes/cell.txt").read_text() == "from the archive\n"


def test_a_broken_archive_is_a_folder_that_cannot_be_entered(lab: Path, corpus: Path, mounted: Mounted) -> None:
    (lab / "cut.daf.zip").write_bytes((lab / "one.daf.zip").read_bytes()[:5000])
    (lab / "empty.daf.zip").write_bytes(b"")
    (lab / "text.daf.zip").write_text("no archive")
    tiny(lab / "next.daf.zip", version="[2,0]")
    broken = {"cut.daf": errno.EIO, "empty.daf": errno.EIO, "text.daf": errno.EIO, "next.daf": errno.EOPNOTSUPP}
    logged = [rf"{name}\.zip" for name in broken]
    with mounted(lab, expect_log=logged) as shown:
        assert set(broken) < set(names(shown))
        for _ in range(2):
            for name, code in broken.items():
                assert os.path.isdir(shown / name)
                with pytest.raises(OSError, match=os.strerror(code)):
                    os.listdir(shown / name)
                with pytest.raises(OSError, match=os.strerror(code)):
                    (shown / name / "daf.json").read_bytes()
        assert (shown / "one.daf" / F64).read_bytes() == (corpus / "dafr" / "flat.daf" / F64).read_bytes()


def test_a_broken_archive_is_whole_once_it_is_mended(lab: Path, mounted: Mounted) -> None:
    (lab / "late.daf.zip").write_bytes(b"")
    with mounted(lab, *QUICK, expect_log=[r"late\.daf\.zip"]) as shown:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.listdir(shown / "late.daf")
        tiny(lab / "late.daf.zip", text="late\n")
        assert (shown / "late.daf/axes/cell.txt").read_text() == "late\n"


def test_archives_come_change_and_go(lab: Path, mounted: Mounted) -> None:
    with mounted(lab, *QUICK) as shown:
        assert not (shown / "new.daf").exists()
        assert "new.daf" not in names(shown)
        tiny(lab / "unfinished").replace(lab / "new.daf.zip")
        wait_until(lambda: (shown / "new.daf/axes/cell.txt").exists(), "the new archive")
        assert "new.daf" in names(shown)
        assert (shown / "new.daf/axes/cell.txt").read_text() == "a\n"
        tiny(lab / "unfinished", text="b\nc\n").replace(lab / "new.daf.zip")
        wait_until(lambda: os.stat(shown / "new.daf/axes/cell.txt").st_size == 4, "the archive changing")
        assert (shown / "new.daf/axes/cell.txt").read_text() == "b\nc\n"
        (lab / "new.daf.zip").unlink()
        wait_until(lambda: not (shown / "new.daf").exists(), "the archive going")
        assert names(shown) == ["2024", "empty", "notes.txt", "one.daf"]
        shutil.copytree(lab / "2024/deep/plain.daf", lab / "empty/copy.daf")
        wait_until(lambda: (shown / "empty/copy.daf" / F64).exists(), "a data set in a directory that had none")


def test_a_directory_becomes_a_data_set(lab: Path, mounted: Mounted) -> None:
    with mounted(lab, *QUICK) as shown:
        assert names(shown / "empty") == []
        (lab / "empty/axes").mkdir()
        (lab / "empty/axes/cell.txt").write_text("a\n")
        (lab / "empty/daf.json").write_text('{"version":[1,0]}\n')
        wait_until(lambda: (shown / "empty/metadata.json").exists(), "the directory being shown as a data set")
        assert (shown / "empty/daf.json").read_text() == '{"version":[1,1]}\n'
        assert names(shown / "empty/matrices/cell") == ["cell"]


def test_few_archives_stay_open_and_those_in_use_do(tmp_path: Path, mounted: Mounted) -> None:
    n_archives = 3 * MAX_OPEN
    text = "in use\n" * 10_000
    for number in range(n_archives):
        tiny(tmp_path / f"{number:03}.daf.zip", text=text)
    with mounted(tmp_path) as shown:
        (server,) = servers(shown)
        with (shown / "000.daf/axes/cell.txt").open() as used:
            assert used.read(7) == "in use\n"
            for number in range(n_archives):
                assert (shown / f"{number:03}.daf/daf.json").exists()
            wait_until(lambda: open_archives(server) <= MAX_OPEN, "closing what is unused")
            os.posix_fadvise(used.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert used.read() == text[7:]
        for number in (0, n_archives // 2, n_archives - 1):
            assert (shown / f"{number:03}.daf/axes/cell.txt").read_text() == text
        assert len(names(shown)) == n_archives


def test_listing_opens_nothing(tmp_path: Path, mounted: Mounted) -> None:
    """Were any of the archives opened, the log would say that they are none."""
    for number in range(3_000):
        (tmp_path / f"{number}.daf.zip").touch()
        (tmp_path / f"{number}" / "nothing").mkdir(parents=True)
    with mounted(tmp_path) as shown:
        assert len(os.listdir(shown)) == 6_000
        assert all(entry.is_dir() and entry.stat().st_ino for entry in os.scandir(shown))


@pytest.fixture
def sleepy(lab: Path, tmp_path: Path) -> Iterator[int]:
    """A file system in the folder, `inner/stuck/slow.daf.zip` in it; gives its server, which a test may stop."""
    slow, source = tiny(tmp_path / "slow.daf.zip"), tmp_path / "inner.dafs.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("one/daf.json", '{"version":[1,1]}')
        archive.write(slow, "stuck/slow.daf.zip")
    mountpoint = lab / "inner"
    mountpoint.mkdir()
    assert run_dafmount(source, mountpoint).returncode == 0
    (server,) = servers(mountpoint)
    try:
        yield server
    finally:
        os.kill(server, signal.SIGCONT)
        assert run_dafmount("--unmount", mountpoint).returncode == 0


def test_an_archive_that_does_not_answer_holds_up_nobody(
    lab: Path, corpus: Path, sleepy: int, mounted: Mounted
) -> None:
    flat = (corpus / "dafr" / "flat.daf" / F64).read_bytes()
    with mounted(lab, "-o", "refresh=0.1,timeout=1", expect_log=[r"slow\.daf.*no answer within 1 s"]) as shown:
        assert names(shown / "inner/stuck") == ["slow.daf"]
        assert names(shown / "2024") == ["deep", "many.dafs", "other.zip"]
        os.kill(sleepy, signal.SIGSTOP)
        try:
            with pytest.raises(OSError, match=os.strerror(errno.ETIMEDOUT)):
                os.listdir(shown / "inner/stuck/slow.daf")
            assert (shown / "one.daf" / F64).read_bytes() == flat
            append(lab / "one.daf.zip", "axes/late.txt", b"late\n")
            wait_until(lambda: (shown / "one.daf/axes/late.txt").exists(), "an archive that grows being followed")
            tiny(lab / "2024" / "late.daf.zip")
            wait_until(lambda: (shown / "2024/late.daf").exists(), "a folder being followed")
        finally:
            os.kill(sleepy, signal.SIGCONT)
        assert (shown / "inner/stuck/slow.daf/axes/cell.txt").read_text() == "a\n"


@pytest.mark.parametrize("below", [(), ("a", "a/b"), ("x.zip",)])
def test_a_folder_without_data_sets_is_refused(tmp_path: Path, below: tuple[str, ...]) -> None:
    source, mountpoint = tmp_path / "source", tmp_path / "mnt"
    source.mkdir()
    mountpoint.mkdir()
    for name in below:
        if name.endswith(".zip"):
            (source / name).touch()
        else:
            (source / name).mkdir()
    done = run_dafmount(source, mountpoint)
    assert done.returncode
    assert "no daf.json, nor are there data sets below it" in done.stderr
    assert len(done.stderr.splitlines()) == 1
