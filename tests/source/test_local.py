from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import pytest

from dafmount.errors import Corrupt, NotFound, ShortRead, SourceChanged, SourceUnavailable
from dafmount.source.base import Range
from dafmount.source.local import LocalDirectory, LocalFile


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(256)) * 1000)
    return path


def read_when_in_memory(file: LocalFile, path: Path) -> bytes:
    while (data := file.read_nowait(0, 10)) is None:
        path.read_bytes()  # into the page cache
    return data


def set_mtime(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


class TestLocalFile:
    def test_reads_what_the_file_holds(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        data = numbers.read_bytes()
        assert file.size == len(data)
        assert file.read(0, file.size) == data
        assert file.read(255, 3) == data[255:258]
        assert file.read(file.size, 0) == b""
        assert file.read_ranges([Range(5, 9), Range(0, 2)]) == [data[5:9], data[:2]]
        assert file.mtime_ns == numbers.stat().st_mtime_ns

    @pytest.mark.parametrize(("offset", "length"), [(255_999, 2), (300_000, 1), (-1, 1), (0, -1)])
    def test_a_range_that_is_not_in_the_file_is_a_short_read(self, numbers: Path, offset: int, length: int) -> None:
        file = LocalFile(numbers, "n")
        with pytest.raises(ShortRead, match=r"^n: asked for"):
            file.read(offset, length)
        with pytest.raises(ShortRead, match=r"^n: asked for"):
            file.read_nowait(offset, length)

    def test_reads_on_where_the_system_gives_less_than_asked(
        self, numbers: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pread = os.pread
        monkeypatch.setattr(os, "pread", lambda fd, length, offset: pread(fd, min(length, 1000), offset))
        assert LocalFile(numbers, "n").read(3, 200_000) == numbers.read_bytes()[3:200_003]

    def test_reads_without_waiting_what_is_in_memory(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        data = file.read(0, file.size)
        assert file.read_nowait(10, 5000) in (data[10:5010], None)

    @pytest.mark.parametrize("code", [errno.EAGAIN, errno.EOPNOTSUPP, errno.EINVAL])
    def test_would_have_to_wait_where_the_system_cannot_tell(
        self, numbers: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        def refuse(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "preadv", refuse)
        file = LocalFile(numbers, "n")
        assert file.read_nowait(0, 10) is None
        assert file.read_nowait(0, 10) is None
        assert file.read(0, 3) == b"\0\1\2"

    def test_a_partial_answer_is_none(self, numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset, flags: 4096)
        assert LocalFile(numbers, "n").read_nowait(0, 10_000) is None

    def test_a_disk_error_while_not_waiting_is_raised(self, numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> int:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="broken"):
            LocalFile(numbers, "n").read_nowait(0, 10)

    def test_may_grow(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        with numbers.open("ab") as stream:
            stream.write(b"more")
        set_mtime(numbers, 5)
        assert file.size == 256_000
        assert file.read(255_999, 1) == b"\xff"

    def test_shrinking_is_a_change(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        os.truncate(numbers, 1000)
        with pytest.raises(SourceChanged, match="n: the file shrank from 256000 to 1000"):
            file.read(0, 10)
        with pytest.raises(SourceChanged):
            file.read(200_000, 10)

    def test_being_written_to_in_place_is_a_change(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        with numbers.open("r+b") as stream:
            stream.write(b"other")
        set_mtime(numbers, 5)
        with pytest.raises(SourceChanged, match="n: the file was written to"):
            file.read(0, 10)
        with pytest.raises(SourceChanged):
            read_when_in_memory(file, numbers)

    def test_a_replaced_file_is_read_on_and_its_stamp_tells(self, numbers: Path, tmp_path: Path) -> None:
        file = LocalFile(numbers, "n")
        before = file.stamp()
        other = tmp_path / "other"
        other.write_bytes(b"other")
        other.rename(numbers)
        assert file.read(1, 2) == b"\1\2"
        assert file.stamp().identity != before.identity
        numbers.unlink()
        with pytest.raises(NotFound):
            file.stamp()

    def test_growing_keeps_the_identity(self, numbers: Path) -> None:
        file = LocalFile(numbers, "n")
        before = file.stamp()
        with numbers.open("ab") as stream:
            stream.write(b"more")
        after = file.stamp()
        assert (after.identity, after.size) == (before.identity, before.size + 4)

    def test_closing_waits_for_a_read_in_progress(self, numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pread, reading, closed = os.pread, threading.Event(), threading.Event()

        def slow(fd: int, length: int, offset: int) -> bytes:
            reading.set()
            assert closed.wait(30)
            return pread(fd, length, offset)

        monkeypatch.setattr(os, "pread", slow)
        file = LocalFile(numbers, "n")
        found: list[bytes] = []
        reader = threading.Thread(target=lambda: found.append(file.read(0, 3)))
        reader.start()
        assert reading.wait(30)
        file.close()
        closed.set()
        reader.join(30)
        assert found == [b"\0\1\2"]
        with pytest.raises(SourceUnavailable, match="closed"):
            file.read(0, 1)

    def test_no_descriptor_is_left_open(self, numbers: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            LocalFile(numbers, "n").close()
        assert len(os.listdir("/proc/self/fd")) == before

    def test_missing_and_unusual_files(self, tmp_path: Path) -> None:
        with pytest.raises(NotFound, match=r"^gone: no such file"):
            LocalFile(tmp_path / "gone", "gone")
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(NotFound, match="not a regular file"):
            LocalFile(tmp_path / "pipe", "pipe")


class TestLocalDirectory:
    def test_lists_by_name_with_sizes_and_times(self, tree: Path) -> None:
        set_mtime(tree / "empty", 1_600_000_000)
        directory = LocalDirectory(tree)
        entries = directory.listdir("")
        assert [(entry.name, entry.is_directory, entry.size) for entry in entries] == [
            ("daf.json", False, 18),
            ("deep", True, 0),
            ("empty", False, 0),
        ]
        assert entries[2].mtime_ns == 1_600_000_000 * 10**9
        assert [entry.name for entry in directory.listdir("deep")] == ["er", "numbers.txt"]
        assert directory.mtime_ns == tree.stat().st_mtime_ns

    def test_opens_and_reads(self, tree: Path) -> None:
        directory = LocalDirectory(tree, "t")
        with pytest.raises(Corrupt, match=r"^t/deep/numbers.txt: .* expected at most 100$"):
            directory.read_small("deep/numbers.txt", 100)
        assert directory.read_small("daf.json", 1000) == b'{"version":[1,1]}\n'
        file = directory.open("deep/er/random.data")
        assert file.read(0, file.size) == (tree / "deep/er/random.data").read_bytes()
        assert file.name == "t/deep/er/random.data"

    @pytest.mark.parametrize("path", ["", "deep", "gone", "gone/x", "daf.json/x", "../tree/daf.json", "deep/../empty"])
    def test_what_is_no_file_below_it_is_not_found(self, tree: Path, path: str) -> None:
        with pytest.raises(NotFound):
            LocalDirectory(tree).open(path)

    @pytest.mark.parametrize("path", ["/daf.json", "./daf.json", "deep//numbers.txt", "deep/", "a\0b", ".."])
    def test_only_plain_paths_are_taken(self, tree: Path, path: str) -> None:
        directory = LocalDirectory(tree)
        for use in (directory.open, directory.listdir, directory.stamp):
            with pytest.raises(NotFound):
                use(path)

    @pytest.mark.parametrize("path", ["gone", "daf.json"])
    def test_what_is_no_directory_is_not_listed(self, tree: Path, path: str) -> None:
        with pytest.raises(NotFound, match="no such directory"):
            LocalDirectory(tree).listdir(path)

    def test_links_are_followed_inside_and_left_out_outside(
        self, tree: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        secret = tmp_path / "secret"
        secret.mkdir()
        (secret / "key").write_text("key")
        (tree / "inside").symlink_to("deep/er")
        (tree / "file").symlink_to(tree / "daf.json")
        (tree / "outside").symlink_to(secret)
        (tree / "outside-file").symlink_to("../secret/key")
        (tree / "dangling").symlink_to("nowhere")
        (tree / "circle").symlink_to("circle")
        (tree / "deep" / "up").symlink_to("..")
        directory = LocalDirectory(tree, "t")
        with caplog.at_level(logging.WARNING):
            names = [entry.name for entry in directory.listdir("")]
            directory.listdir("")
            assert [entry.name for entry in directory.listdir("deep")] == ["er", "numbers.txt"]
        assert names == ["daf.json", "deep", "empty", "file", "inside"]
        assert sorted(record.getMessage() for record in caplog.records) == [
            "t/circle: left out, a symbolic link that leads nowhere",
            "t/dangling: left out, a symbolic link that leads nowhere",
            "t/deep/up: left out, a symbolic link to a directory that holds it",
            "t/outside-file: left out, a symbolic link that leads outside",
            "t/outside: left out, a symbolic link that leads outside",
        ]
        assert directory.read_small("file", 1000) == b'{"version":[1,1]}\n'
        assert [entry.name for entry in directory.listdir("inside")] == ["random.data"]
        for path in ("outside-file", "outside/key", "dangling"):
            with pytest.raises(NotFound):
                directory.open(path)
        for path in ("outside", "outside/key"):
            with pytest.raises(NotFound):
                directory.listdir(path)
            with pytest.raises(NotFound):
                directory.stamp(path)

    def test_links_to_each_others_directories_make_no_endless_tree(self, tmp_path: Path) -> None:
        for one, other in ("ab", "ba"):
            (tmp_path / one).mkdir()
            (tmp_path / one / "to").symlink_to(f"../{other}")
        directory = LocalDirectory(tmp_path)
        seen: list[str] = []
        waiting = [""]
        while waiting:
            path = waiting.pop()
            seen.append(path)
            assert len(seen) < 100
            below = [entry.name for entry in directory.listdir(path) if entry.is_directory]
            waiting += [f"{path}/{name}" if path else name for name in below]
        assert sorted(seen) == ["", "a", "a/to", "b", "b/to"]

    def test_a_link_turned_while_it_is_opened_leads_nowhere(
        self, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "key").write_text("key")
        link = tree / "link"
        link.symlink_to("daf.json")
        open_file = os.open

        def turn_first(path: str, flags: int) -> int:
            link.unlink()
            link.symlink_to("../key")
            return open_file(path, flags)

        directory = LocalDirectory(tree)
        monkeypatch.setattr(os, "open", turn_first)
        with pytest.raises(NotFound, match="leads outside"):
            directory.open("link")

    def test_pipes_and_sockets_are_left_out(self, tree: Path) -> None:
        os.mkfifo(tree / "pipe")
        directory = LocalDirectory(tree)
        assert "pipe" not in [entry.name for entry in directory.listdir("")]
        with pytest.raises(NotFound, match="not a regular file"):
            directory.open("pipe")

    def test_names_that_are_not_utf8(self, tree: Path) -> None:
        (Path(os.fsdecode(os.fsencode(tree) + b"/\xff\xfe"))).write_bytes(b"x")
        directory = LocalDirectory(tree)
        name = os.fsdecode(b"\xff\xfe")
        assert name in [entry.name for entry in directory.listdir("")]
        assert directory.read_small(name, 1000) == b"x"
        with pytest.raises(NotFound) as caught:
            directory.open(name + "\n")
        str(caught.value).encode("ascii")

    def test_the_root_may_be_a_link_and_its_stamp_follows_it(self, tree: Path, tmp_path: Path) -> None:
        current = tmp_path / "current"
        current.symlink_to("tree")
        directory = LocalDirectory(current)
        before = directory.stamp()
        assert directory.read_small("daf.json", 1000)
        (tmp_path / "new").mkdir()
        current.unlink()
        current.symlink_to("new")
        assert directory.stamp() != before

    def test_a_stamp_tells_a_new_file_in_a_directory(self, tree: Path) -> None:
        directory = LocalDirectory(tree)
        set_mtime(tree / "deep", 1_600_000_000)
        before = directory.stamp("deep")
        (tree / "deep" / "new").write_bytes(b"")
        assert directory.stamp("deep") != before

    def test_a_directory_that_may_not_be_read_says_so(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(path: str) -> object:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(PermissionError):
            LocalDirectory(tree).listdir("deep")
