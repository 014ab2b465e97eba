from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dafmount.errors import CorruptArchive, ShortRead, SourceUnavailable, SpoolFull
from dafmount.source.base import Range
from dafmount.source.spool import Spool, SpooledFile
from mounts import LIMIT_S


def put(spool: Spool, number: int, data: bytes, owner: str = "a") -> SpooledFile:
    return spool.put((owner, number), len(data), iter([data[:3], data[3:]]), name=f"x: {number}")


def content(file: SpooledFile | None) -> bytes:
    assert file is not None
    return file.read(0, file.size)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def test_gives_back_what_was_put(place: Path) -> None:
    spool = Spool(place)
    data = os.urandom(100_000)
    file = put(spool, 1, data)
    assert content(file) == data
    assert file.read_ranges([Range(7, 9), Range(0, 1)]) == [data[7:9], data[:1]]
    assert file.read_nowait(5, 10) in (data[5:15], None)
    assert file.name == "x: 1"
    assert content(spool.get(("a", 1), name="x: 1")) == data
    assert spool.get(("a", 2), name="x: 2") is None
    assert spool.get(("b", 1), name="x: 1") is None
    with pytest.raises(ShortRead, match=r"^x: 1: asked for"):
        file.read(99_999, 2)


@pytest.mark.parametrize("tmpfile", [True, False])
def test_leaves_no_name_and_lets_nobody_else_read(place: Path, monkeypatch: pytest.MonkeyPatch, tmpfile: bool) -> None:
    if not tmpfile:
        open_file = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no O_TMPFILE")
            return open_file(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)
    spool = Spool(place)
    modes = []

    def chunks() -> Iterator[bytes]:
        for fd in os.listdir("/proc/self/fd"):
            target = os.readlink(f"/proc/self/fd/{fd}") if os.path.lexists(f"/proc/self/fd/{fd}") else ""
            if target.startswith(str(place)):
                modes.append(stat.S_IMODE(os.stat(f"/proc/self/fd/{fd}").st_mode))
        assert os.listdir(place) == []
        yield b"data"

    assert content(spool.put(("a", 1), 4, chunks(), name="x")) == b"data"
    assert modes == [0o600]
    assert os.listdir(place) == []


def test_the_least_recently_used_goes_first_and_open_ones_stay(place: Path) -> None:
    spool = Spool(place, limit_bytes=30)
    first, second, third = (put(spool, number, b"0123456789") for number in range(3))
    first.close()
    second.close()
    again = spool.get(("a", 0), name="x")
    assert again is not None
    again.close()
    put(spool, 3, b"abcde").close()
    assert spool.get(("a", 1), name="x") is None
    assert content(spool.get(("a", 0), name="x")) == b"0123456789"
    assert content(third) == b"0123456789"
    assert spool.used_bytes == 25


def test_an_entry_larger_than_the_spool_is_refused_before_it_is_decoded(place: Path) -> None:
    def chunks() -> Iterator[bytes]:
        pytest.fail("was decoded")
        yield b""

    with pytest.raises(SpoolFull, match=r"^x: 11 bytes when decompressed, the spool holds 10; .* -o spool-size="):
        Spool(place, limit_bytes=10).put(("a", 1), 11, chunks(), name="x")


def test_a_spool_full_of_open_files_says_so(place: Path) -> None:
    spool = Spool(place, limit_bytes=10)
    file = put(spool, 1, b"12345678")
    with pytest.raises(SpoolFull, match="no room for 3 decompressed bytes"):
        put(spool, 2, b"abc")
    file.close()
    assert content(put(spool, 2, b"abc")) == b"abc"


def test_the_number_of_files_is_bounded(place: Path) -> None:
    spool = Spool(place, max_files=3)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        put(spool, number, b"abcdef").close()
    assert len(os.listdir("/proc/self/fd")) == before + 3
    kept = [put(spool, number, b"abcdef") for number in range(20, 23)]
    with pytest.raises(SpoolFull, match="at most 3 files"):
        put(spool, 30, b"abcdef")
    assert [content(file) for file in kept] == [b"abcdef"] * 3


@pytest.mark.parametrize(
    ("size", "data", "says"), [(5, b"abcdef", "more than 5 bytes"), (7, b"abcdef", "6 bytes, expected 7")]
)
def test_nothing_is_kept_of_an_entry_of_another_size(place: Path, size: int, data: bytes, says: str) -> None:
    spool = Spool(place)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptArchive, match=says):
        spool.put(("a", 1), size, iter([data]), name="x")
    assert (spool.used_bytes, spool.get(("a", 1), name="x")) == (0, None)
    assert len(os.listdir("/proc/self/fd")) == before


def test_nothing_is_kept_when_decoding_fails(place: Path) -> None:
    def chunks() -> Iterator[bytes]:
        yield b"abc"
        raise CorruptArchive("damaged")

    spool = Spool(place)
    with pytest.raises(CorruptArchive, match=r"^damaged$"):
        spool.put(("a", 1), 6, chunks(), name="x")
    assert (spool.used_bytes, spool.get(("a", 1), name="x")) == (0, None)
    assert content(put(spool, 1, b"abcdef")) == b"abcdef"


def test_a_full_disk_says_so_and_keeps_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    spool = Spool(place)
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(SpoolFull, match=r"x: 1: cannot be .* No space left on device; .* -o spool="):
            put(spool, 1, b"abcdef")
    assert spool.used_bytes == 0
    assert content(put(spool, 1, b"abcdef")) == b"abcdef"


def test_a_missing_directory_says_so(place: Path) -> None:
    with pytest.raises(SpoolFull, match="gone: No such file or directory; another directory is given by -o spool="):
        put(Spool(place / "gone"), 1, b"abcdef")


def test_the_default_directory_follows_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(place / "gone"))
    with pytest.raises(SpoolFull, match="gone"):
        put(Spool(), 1, b"abcdef")


def test_forgetting_an_owner_frees_what_is_closed_now_and_what_is_open_later(place: Path) -> None:
    spool = Spool(place)
    put(spool, 1, b"abcdef").close()
    kept = put(spool, 2, b"ABCDEF")
    put(spool, 1, b"other", owner="b").close()
    spool.forget("a")
    assert spool.used_bytes == 11
    assert content(kept) == b"ABCDEF"
    assert spool.get(("a", 2), name="x") is None
    kept.close()
    kept.close()
    assert spool.used_bytes == 5
    with pytest.raises(SourceUnavailable, match="closed"):
        kept.read(0, 1)


def test_an_owner_that_goes_while_the_lock_is_held_is_forgotten_then(place: Path) -> None:
    """Garbage is collected at any time, also in a thread that holds the lock."""

    class Key(int):
        def __hash__(self) -> int:
            if is_collecting:
                spool.forget("a")
            return int(self)

    is_collecting = False
    spool = Spool(place)
    put(spool, 1, bytes(10)).close()
    is_collecting = True
    getting = threading.Thread(target=lambda: spool.get(("b", Key(1)), name="x"), daemon=True)
    getting.start()
    getting.join(LIMIT_S)
    assert not getting.is_alive()
    assert spool.used_bytes == 0
    assert spool.get(("a", 1), name="x") is None


def test_the_same_key_put_twice_at_once_is_kept_once(place: Path) -> None:
    spool = Spool(place)
    both = threading.Barrier(2)
    found: list[bytes] = []

    def chunks() -> Iterator[bytes]:
        both.wait(30)
        yield b"abcdef"

    def work() -> None:
        found.append(content(spool.put(("a", 1), 6, chunks(), name="x")))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == [b"abcdef"] * 2
    assert spool.used_bytes == 6


def test_copies_kept_open_for_later_are_let_go_before_the_spool_is_full(place: Path) -> None:
    spool = Spool(place, 100)
    kept = put(spool, 1, bytes(60))
    spool.relieve = kept.close
    file = put(spool, 2, b"x" * 60)
    assert content(file) == b"x" * 60
    assert spool.get(("a", 1), name="x: 1") is None
    with pytest.raises(SpoolFull, match=r"^x: 3: no room for 60 decompressed bytes, 1 files with 60 bytes are in use"):
        put(spool, 3, bytes(60))
    assert spool.used_bytes == 60
