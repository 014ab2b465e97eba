from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dafmount.source.base import Range
from dafmount.source.http_cache import DiskCache

DATA = os.urandom(3_000_000)
KEY = "0123456789abcdef"


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    return DiskCache(tmp_path / "cache", 10_000_000)


def on_disk(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def test_what_was_put_is_there(cache: DiskCache) -> None:
    assert cache.get(KEY, Range(0, 10)) is None
    cache.put(KEY, 1000, DATA[1000:2_500_000])
    for start, stop in ((1000, 2_500_000), (1000, 1001), (1_048_000, 1_050_000), (2_499_999, 2_500_000)):
        assert cache.get(KEY, Range(start, stop)) == DATA[start:stop]
    for start, stop in ((0, 10), (999, 1001), (2_499_999, 2_500_001), (2_600_000, 2_600_001)):
        assert cache.get(KEY, Range(start, stop)) is None
    assert cache.get("another", Range(1000, 1010)) is None


def test_neighbours_and_overlaps_are_joined(cache: DiskCache) -> None:
    for start, stop in ((0, 100), (100, 300), (250, 400), (50, 60)):
        cache.put(KEY, start, DATA[start:stop])
    assert cache.get(KEY, Range(10, 390)) == DATA[10:390]
    assert cache.get(KEY, Range(10, 401)) is None


def test_another_mount_sees_it(cache: DiskCache, tmp_path: Path) -> None:
    cache.put(KEY, 0, DATA[:100])
    other = DiskCache(tmp_path / "cache", 10_000_000)
    assert other.get(KEY, Range(20, 30)) == DATA[20:30]


def test_the_directory_is_private_whatever_the_umask(cache: DiskCache, tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        cache.put(KEY, 0, DATA[:100])
    finally:
        os.umask(umask)
    (file,) = (tmp_path / "cache" / KEY).iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700


def test_it_stays_within_its_limit_and_gives_up_what_was_used_longest_ago(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 500_000)
    for at in range(10):
        cache.put(f"{KEY}{at}", 0, DATA[:100_000])
        (file,) = (tmp_path / f"{KEY}{at}").iterdir()
        os.utime(file, (1_000_000 + at, 1_000_000 + at))
        assert cache.get(f"{KEY}0", Range(0, 5)) == DATA[:5]  # which is a use
        assert on_disk(tmp_path) <= 500_000
    assert cache.get(f"{KEY}9", Range(0, 5)) == DATA[:5]
    assert cache.get(f"{KEY}1", Range(0, 5)) is None


def test_what_does_not_fit_at_all_is_not_kept(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path, 50_000)
    cache.put(KEY, 0, DATA[:100_000])
    assert cache.get(KEY, Range(0, 5)) is None
    assert on_disk(tmp_path) == 0


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "directory"])
def test_damage_is_a_miss_and_is_taken_out(
    cache: DiskCache, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put(KEY, 0, DATA[:100])
    (file,) = (tmp_path / "cache" / KEY).iterdir()
    raw = bytearray(file.read_bytes())
    raw[50] ^= 1
    if damage == "directory":
        file.unlink()
        file.mkdir()
    else:
        file.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:60]), "empty": b""}[damage])
    assert cache.get(KEY, Range(40, 60)) is None
    assert "damaged" in caplog.text or "done without" in caplog.text
    if damage != "directory":
        assert not file.exists()
        cache.put(KEY, 0, DATA[:100])
        assert cache.get(KEY, Range(40, 60)) == DATA[40:60]


def test_files_that_vanish_are_a_miss(cache: DiskCache, tmp_path: Path) -> None:
    cache.put(KEY, 0, DATA[:100])
    (file,) = (tmp_path / "cache" / KEY).iterdir()
    file.unlink()
    assert cache.get(KEY, Range(0, 10)) is None


def test_names_of_others_are_left_alone(cache: DiskCache, tmp_path: Path) -> None:
    place = tmp_path / "cache" / KEY
    place.mkdir(parents=True)
    for name in ("notes.txt", "5-2", "-1-5", "0x5-6", "5-06"):
        (place / name).write_bytes(b"mine")
    cache.put(KEY, 0, DATA[:100])
    assert cache.get(KEY, Range(0, 100)) == DATA[:100]
    assert cache.get(KEY, Range(5, 101)) is None
    assert len(list(place.iterdir())) == 6


def test_a_place_that_is_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    cache = DiskCache(tmp_path / "file", 1_000_000)
    for at in range(3):
        cache.put(KEY, at, b"x")
        assert cache.get(KEY, Range(0, 1)) is None
    assert caplog.text.count("done without") == 1


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may be longer than 60 kB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk(cache: DiskCache, tmp_path: Path, full_disk: None, caplog: pytest.LogCaptureFixture) -> None:
    cache.put(KEY, 0, DATA[:1000])
    cache.put(KEY, 5000, DATA[5000:200_000])
    cache.put(KEY, 300_000, DATA[300_000:300_010])  # not even tried for a while
    assert cache.get(KEY, Range(0, 1000)) == DATA[:1000]
    assert cache.get(KEY, Range(5000, 5010)) is None
    assert cache.get(KEY, Range(300_000, 300_010)) is None
    assert [path.name for path in (tmp_path / "cache" / KEY).iterdir()] == ["0-3e8"]
    assert caplog.text.count("done without") == 1


def test_what_a_killed_mount_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / KEY).mkdir()
    old, new = tmp_path / KEY / ".new-1-1", tmp_path / KEY / ".new-2-1"
    for path in (old, new):
        path.write_bytes(b"half of it")
    os.utime(old, (1_000_000, 1_000_000))
    DiskCache(tmp_path, 1_000_000).put(KEY, 0, b"data")
    assert not old.exists()
    assert new.exists()


def test_many_threads_and_another_process(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from dafmount.source.http_cache import DiskCache\n"
        "data = sys.stdin.buffer.read(); cache = DiskCache(Path(sys.argv[1]), 400_000)\n"
        "for at in range(0, len(data) - 7000, 5000): cache.put('key', at, data[at : at + 7000])"
    )
    other = subprocess.Popen([sys.executable, "-c", program, tmp_path], stdin=subprocess.PIPE)
    assert other.stdin is not None
    other.stdin.write(DATA[:1_000_000])
    other.stdin.close()
    cache = DiskCache(tmp_path, 400_000)
    wrong: list[int] = []

    def use(first: int) -> None:
        for at in range(first, 900_000, 20_000):
            cache.put("key", at, DATA[at : at + 9000])
            found = cache.get("key", Range(at + 10, at + 4000))
            if found is not None and found != DATA[at + 10 : at + 4000]:
                wrong.append(at)

    threads = [threading.Thread(target=use, args=(first,)) for first in (0, 5000, 10_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert other.wait(60) == 0
    assert wrong == []
    assert on_disk(tmp_path) <= 2 * 400_000


