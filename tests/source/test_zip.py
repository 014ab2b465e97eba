from __future__ import annotations

import io
import os
import struct
import subprocess
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dafmount.errors import (
    Corrupt,
    CorruptArchive,
    DafmountError,
    NotFound,
    ShortRead,
    SourceChanged,
    SpoolFull,
    UnsupportedFormat,
    UsageError,
)
from dafmount.source.base import ByteSource, Range, Stamp
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from dafmount.source.zip_entries import MemorySource

OpenZip = Callable[..., ZipArchive]
WriteZip = Callable[..., Path]

LINES = b"".join(b"line %d\n" % i for i in range(60_000))
"""Compressible, and larger than what is kept in memory."""


class WatchedSource(MemorySource):
    """A source that counts its reads, and may be made to fail or wait."""

    def __init__(self, data: bytes) -> None:
        super().__init__("x.zip", data)
        self.reads: list[Range] = []
        self.before_read: Callable[[], None] = lambda: None
        self.closed = False
        self.is_far = False

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return None if self.is_far else super().read(offset, length)

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append(Range(offset, offset + length))
        self.before_read()
        return super().read(offset, length)

    def stamp(self) -> Stamp:
        return Stamp((), self.size, 0)

    def close(self) -> None:
        self.closed = True


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return stream.getvalue()


def files_of(archive: ZipArchive, path: str = "") -> Iterator[str]:
    for entry in archive.listdir(path):
        full = f"{path}/{entry.name}" if path else entry.name
        if entry.is_directory:
            yield from files_of(archive, full)
        else:
            yield full


def content(source: ByteSource) -> bytes:
    try:
        return source.read(0, source.size)
    finally:
        source.close()


def contents(archive: ZipArchive) -> dict[str, bytes]:
    return {path: content(archive.open(path)) for path in files_of(archive)}


def contents_of_tree(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def headers(data: bytes) -> list[int]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [info.header_offset for info in archive.infolist()]


# ---------------------------------------------------------------------------------------------------------------------
# What other programs wrote


@pytest.mark.parametrize(
    "command",
    [
        ["zip", "-qr", "../t.zip", "."],
        ["zip", "-qr", "-0", "../t.zip", "."],
        ["zip", "-qr", "-fd", "../t.zip", "."],
        ["zip", "-qr", "-fz", "../t.zip", "."],
        ["zip", "-qr", "-Z", "bzip2", "../t.zip", "."],
        ["sh", "-c", "zip -qr - . | cat > ../t.zip"],
        ["sh", "-c", "zip -qr -0 - . | cat > ../t.zip"],
        ["7z", "a", "-tzip", "../t.zip", "."],
        ["7z", "a", "-tzip", "-mm=Deflate64", "../t.zip", "."],
        ["7z", "a", "-tzip", "-mm=BZip2", "../t.zip", "."],
        ["7z", "a", "-tzip", "-mm=Copy", "../t.zip", "."],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("verify", ["off", "auto", "all"])
def test_reads_what_archivers_packed(tree: Path, open_zip: OpenZip, command: list[str], verify: str) -> None:
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    archive = open_zip(tree.parent / "t.zip", verify)
    assert contents(archive) == contents_of_tree(tree)
    small = {path: data for path, data in contents_of_tree(tree).items() if len(data) < 100}
    assert {path: archive.read_small(path, 100) for path in small} == small


def test_reads_zstandard_in_one_frame_and_in_several(spool: Spool) -> None:
    import zstandard

    one = zstandard.compress(LINES)
    several = zstandard.compress(LINES[:1000]) + zstandard.compress(LINES[1000:])
    for compressed in (one, several):
        archive = ZipArchive(WatchedSource(stored_as(93, compressed, LINES)), "x.zip", 0, spool)
        assert content(archive.open("a")) == LINES


def stored_as(method: int, compressed: bytes, data: bytes, *, size: int | None = None) -> bytes:
    """An archive with one entry `a` that claims to be `data` compressed by `method`."""
    archive = bytearray(zipped({"a": compressed}))
    central = archive.rindex(b"PK\1\2")
    struct.pack_into("<H", archive, 8, method)
    struct.pack_into("<H", archive, central + 10, method)
    struct.pack_into("<L", archive, central + 16, zlib.crc32(data))
    struct.pack_into("<L", archive, central + 24, len(data) if size is None else size)
    return bytes(archive)


def test_reads_the_corpus(corpus: Path, open_zip: OpenZip) -> None:
    for path in sorted(corpus.glob("dafr/*.zip")):
        with zipfile.ZipFile(path) as theirs:
            expected = {info.filename: theirs.read(info) for info in theirs.infolist() if not info.is_dir()}
        assert contents(open_zip(path, "all")) == expected


def test_a_hundred_thousand_entries(spool: Spool) -> None:
    members = {f"d{i % 3}/{i:06}": b"%d" % i for i in range(100_000)}
    archive = ZipArchive(WatchedSource(zipped(members)), "x.zip", 0, spool)
    for directory in ("d0", "d1", "d2"):
        listed = [f"{directory}/{entry.name}" for entry in archive.listdir(directory)]
        assert listed == [name for name in members if name.startswith(directory)]
    for name in list(members)[::501]:
        assert archive.read_small(name, 10) == members[name]


def test_links_in_archives_that_zip_made(tree: Path, open_zip: OpenZip) -> None:
    (tree / "to-file").symlink_to("deep/numbers.txt")
    (tree / "deep" / "to-dir").symlink_to("er")
    subprocess.run(["zip", "-qry", "../t.zip", "."], cwd=tree, check=True)
    archive = open_zip(tree.parent / "t.zip")
    assert content(archive.open("to-file")) == (tree / "deep/numbers.txt").read_bytes()
    assert content(archive.open("deep/to-dir/random.data")) == (tree / "deep/er/random.data").read_bytes()
    assert [entry.name for entry in archive.listdir("deep")] == ["er", "numbers.txt", "to-dir"]


def test_no_more_links_are_followed_than_the_limit(
    tree: Path, open_zip: OpenZip, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(5):
        (tree / f"link-{n}").symlink_to("deep/numbers.txt")
    subprocess.run(["zip", "-qry", "../t.zip", "."], cwd=tree, check=True)
    monkeypatch.setattr("dafmount.source.zip._MAX_LINKS", 3)
    archive = open_zip(tree.parent / "t.zip")
    assert len([entry for entry in archive.listdir("") if entry.name.startswith("link-")]) == 3
    assert "left out" in caplog.text


# ---------------------------------------------------------------------------------------------------------------------
# How entries are read


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 65_536, 65_537, 262_144, 262_145])
def test_any_part_of_an_entry(spool: Spool, method: int, size: int) -> None:
    data = (LINES * 2)[:size]
    archive = ZipArchive(WatchedSource(zipped({"d/a": data, "b": b""}, method)), "x.zip", 0, spool)
    entry = archive.open("d/a")
    assert entry.size == size
    assert entry.name == "x.zip: d/a"
    ranges = [Range(size // 3, size // 2), Range(0, size), Range(size, size)]
    assert entry.read_nowait(0, size) in (data, None)
    assert entry.read_ranges(ranges) == [data[start:stop] for start, stop in ranges]
    assert [entry.read(start, stop - start) for start, stop in ranges] == entry.read_ranges(ranges)
    assert entry.read_nowait(size // 3, 1 if size else 0) in (data[size // 3 :][:1], None)
    for offset, length in ((0, size + 1), (size, 1), (-1, 1), (0, -1)):
        with pytest.raises(ShortRead, match=r"^x\.zip: d/a: asked for"):
            entry.read(offset, length)
        with pytest.raises(ShortRead):
            entry.read_nowait(offset, length)


def test_a_stored_entry_is_a_range_of_the_archive(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES}))
    entry = ZipArchive(source, "x.zip", 0, spool).open("a")
    source.reads.clear()
    assert entry.read(1000, 10) == LINES[1000:1010]
    assert source.reads == [Range(31 + 1000, 31 + 1010)]
    assert entry.read_nowait(1000, 10) == LINES[1000:1010]
    assert entry.gap_bytes == source.gap_bytes


def test_a_tiny_entry_takes_one_read(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES, "tiny": b"tiny", "b": LINES}))
    archive = ZipArchive(source, "x.zip", 0, spool)
    source.reads.clear()
    assert archive.read_small("tiny", 100) == b"tiny"
    assert len(source.reads) == 1


@pytest.mark.parametrize("size", [0, 100, 5000, 200_000])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_an_entry_is_opened_at_once_where_its_bytes_are_at_hand(spool: Spool, method: int, size: int) -> None:
    source = WatchedSource(zipped({"a": LINES[:size]}, method))
    archive = ZipArchive(source, "x.zip", 0, spool)
    source.reads.clear()
    entry = archive.open_nowait("a")
    assert entry is not None
    assert source.reads == []
    assert entry.read(0, entry.size) == LINES[:size]


@pytest.mark.parametrize("size", [100, 200_000])
def test_an_entry_is_not_opened_at_once_where_its_bytes_would_be_waited_for(spool: Spool, size: int) -> None:
    source = WatchedSource(zipped({"a": LINES[:size]}))
    archive = ZipArchive(source, "x.zip", 0, spool)
    source.is_far = True
    assert archive.open_nowait("a") is None
    with pytest.raises(NotFound):
        archive.open_nowait("b")


def test_a_tiny_entry_behind_a_long_extra_field(spool: Spool) -> None:
    info = zipfile.ZipInfo("tiny")
    info.extra = struct.pack("<2H", 0x9999, 9000) + b"e" * 9000
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(info, b"tiny")
    assert ZipArchive(WatchedSource(stream.getvalue()), "x.zip", 0, spool).read_small("tiny", 4) == b"tiny"


def test_read_small_refuses_what_is_not_small(spool: Spool) -> None:
    archive = ZipArchive(WatchedSource(zipped({"a": b"12345"})), "x.zip", 0, spool)
    with pytest.raises(Corrupt, match=r"^x\.zip: a: 5 bytes, expected at most 4$"):
        archive.read_small("a", 4)


@pytest.mark.parametrize("size", [1000, len(LINES)])
def test_a_compressed_entry_is_decoded_once_however_many_ask(spool: Spool, size: int) -> None:
    source = WatchedSource(zipped({"a": LINES[:size]}, zipfile.ZIP_DEFLATED))
    archive = ZipArchive(source, "x.zip", 0, spool)
    entries = [archive.open("a") for _ in range(6)]
    assert [entry.read_nowait(0, 1) for entry in entries] == [None] * 6
    started, go_on = threading.Semaphore(0), threading.Event()
    source.reads.clear()

    def wait() -> None:
        started.release()
        assert go_on.wait(30)

    source.before_read = wait
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda e=entry: found.append(e.read(0, size))) for entry in entries]
    for thread in threads:
        thread.start()
    assert started.acquire(timeout=30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert found == [LINES[:size]] * 6
    assert len(source.reads) == 1
    assert entries[0].read_nowait(5, 5) in (LINES[5:10], None)
    again = archive.open("a")
    source.reads.clear()
    assert again.read(0, size) == LINES[:size]
    assert source.reads == []


def test_those_who_wait_for_a_decoder_that_fails_get_its_error_and_may_try_again(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES}, zipfile.ZIP_DEFLATED))
    entry = ZipArchive(source, "x.zip", 0, spool).open("a")

    def fail() -> None:
        raise SourceChanged("the source changed")

    source.before_read = fail
    for _ in range(2):
        with pytest.raises(SourceChanged):
            entry.read(0, 1)
    assert spool.used_bytes == 0
    source.before_read = lambda: None
    assert entry.read(0, 4) == b"line"


def test_an_entry_given_up_by_the_spool_is_decoded_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=len(LINES) + 10)
    archive = ZipArchive(WatchedSource(zipped({"a": LINES, "b": LINES[::-1]}, zipfile.ZIP_DEFLATED)), "x.zip", 0, spool)
    for _ in range(2):
        assert content(archive.open("a")) == LINES
        assert content(archive.open("b")) == LINES[::-1]
    first = archive.open("a")
    first.read(0, 1)
    with pytest.raises(SpoolFull, match=r"^x\.zip: b: no room"):
        archive.open("b").read(0, 1)
    archive.close()
    first.close()
    assert spool.used_bytes == 0


def test_closing_an_entry_leaves_the_archive_open(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES}))
    archive = ZipArchive(source, "x.zip", 0, spool)
    archive.open("a").close()
    assert content(archive.open("a")) == LINES
    assert not source.closed
    archive.close()
    assert source.closed


def test_the_stamp_is_asked_anew_from_the_file(write_zip: WriteZip, open_zip: OpenZip) -> None:
    path = write_zip(("a", b"1"))
    archive = open_zip(path)
    before = archive.stamp("a")
    with zipfile.ZipFile(path, "a") as appended:
        appended.writestr("b", b"2")
    after = archive.stamp()
    assert after.identity == before.identity
    assert after.size > before.size
    assert archive.mtime_ns == before.mtime_ns


@pytest.mark.parametrize(("path", "says"), [("gone", "no such entry"), ("d", "is a directory"), ("", "is a directory")])
def test_what_is_no_file_is_not_found(spool: Spool, path: str, says: str) -> None:
    archive = ZipArchive(WatchedSource(zipped({"d/a": b""})), "x.zip", 0, spool)
    with pytest.raises(NotFound, match=says):
        archive.open(path)


def test_an_unknown_way_to_verify_is_refused(spool: Spool) -> None:
    with pytest.raises(UsageError, match="verify=some: expected one of off, auto, all"):
        ZipArchive(WatchedSource(zipped({})), "x.zip", 0, spool, verify="some")


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def spoilt(data: bytes, position: int, value: bytes) -> bytes:
    return data[:position] + value + data[position + len(value) :]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("size", [100, 60_000, 300_000])
@pytest.mark.parametrize("verify", ["auto", "all"])
def test_a_wrong_checksum_costs_that_entry_alone(spool: Spool, method: int, size: int, verify: str) -> None:
    data = bytearray(zipped({"bad": LINES[:size], "good": LINES[:size]}, method))
    at = data.index(b"PK\1\2") + 16
    data[at] ^= 1
    archive = ZipArchive(WatchedSource(bytes(data)), "x.zip", 0, spool, verify=verify)
    assert content(archive.open("good")) == LINES[:size]
    if (method, size, verify) == (zipfile.ZIP_STORED, 300_000, "auto"):
        assert content(archive.open("bad")) == LINES[:size]
        return
    for _ in range(2):
        with pytest.raises(CorruptArchive, match=r"^x\.zip: bad: CRC-32 [0-9a-f]{8}, its directory entry declares"):
            content(archive.open("bad"))
    assert content(archive.open("good")) == LINES[:size]


@pytest.mark.parametrize("size", [100, 60_000])
def test_checksums_of_stored_entries_may_be_left_unchecked(spool: Spool, size: int) -> None:
    data = bytearray(zipped({"bad": LINES[:size]}))
    data[data.index(b"PK\1\2") + 16] ^= 1
    archive = ZipArchive(WatchedSource(bytes(data)), "x.zip", 0, spool, verify="off")
    assert content(archive.open("bad")) == LINES[:size]


def test_a_small_stored_entry_is_checked_whatever_part_is_read(spool: Spool) -> None:
    data = zipped({"a": LINES[:60_000]})
    damaged = spoilt(data, data.index(b"PK\1\2") - 1, b"\0")
    for read in ("read", "read_nowait"):
        entry = ZipArchive(WatchedSource(damaged), "x.zip", 0, spool).open("a")
        with pytest.raises(CorruptArchive, match="CRC-32"):
            getattr(entry, read)(0, 1)


def test_an_entry_is_checked_in_full_only_once(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES}))
    archive = ZipArchive(source, "x.zip", 0, spool, verify="all")
    archive.open("a")
    source.reads.clear()
    archive.open("a").read(0, 10)
    assert sum(stop - start for start, stop in source.reads) < 100


def test_an_entry_whose_checksum_was_never_filled_in_is_checked_in_full(spool: Spool) -> None:
    data = bytearray(zipped({"unfinished": LINES, "good": b"good"}))
    struct.pack_into("<L", data, data.index(b"PK\1\2") + 16, 0)
    archive = ZipArchive(WatchedSource(bytes(data)), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match="declares 00000000"):
        archive.open("unfinished")
    assert content(archive.open("good")) == b"good"


def test_an_entry_that_was_never_completed_says_so_and_costs_nothing_else(spool: Spool) -> None:
    data = zipped({"a": b"first", "unfinished": b"x" * 5000, "b": b"last"})
    start, stop = headers(data)[1:]
    archive = ZipArchive(WatchedSource(spoilt(data, start, bytes(stop - start))), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=r"^x\.zip: unfinished: at byte 36 there are zeros .* never completed$"):
        archive.open("unfinished")
    assert [content(archive.open(name)) for name in "ab"] == [b"first", b"last"]


def test_two_entries_over_one_local_header(spool: Spool) -> None:
    data = zipped({"one": b"data", "two": b"data"})
    second = data.rindex(b"PK\1\2")
    archive = ZipArchive(WatchedSource(spoilt(data, second + 42, struct.pack("<L", 0))), "x.zip", 0, spool)
    assert content(archive.open("one")) == b"data"
    with pytest.raises(
        CorruptArchive, match=r"^x\.zip: two: at byte 0 there is the local header of another entry, 'one'"
    ):
        archive.open("two")


@pytest.mark.parametrize("offset", [7, 0x7FFFFFFF, 10**6])
def test_a_local_header_that_is_none_or_outside(spool: Spool, offset: int) -> None:
    data = zipped({"one": b"data", "two": b"data"})
    second = data.rindex(b"PK\1\2")
    archive = ZipArchive(WatchedSource(spoilt(data, second + 42, struct.pack("<L", offset))), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=r"expected a local header|is outside the archive"):
        archive.open("two")


def test_data_that_would_reach_past_the_file(spool: Spool) -> None:
    data = bytearray(zipped({"one": b"data"}))
    struct.pack_into("<2L", data, data.index(b"PK\1\2") + 20, 10**9, 10**9)
    archive = ZipArchive(WatchedSource(bytes(data)), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=r"^x\.zip: one: 1000000000 bytes at byte 33, the archive has"):
        archive.open("one")


def test_a_stored_entry_with_two_sizes(spool: Spool) -> None:
    data = bytearray(zipped({"one": b"data"}))
    struct.pack_into("<L", data, data.index(b"PK\1\2") + 24, 3)
    with pytest.raises(CorruptArchive, match="stored, yet of 4 bytes for 3"):
        ZipArchive(WatchedSource(bytes(data)), "x.zip", 0, spool).open("one")


@pytest.mark.parametrize(
    ("method", "says"), [(14, "14 (LZMA)"), (95, "95 (xz)"), (98, "98 (PPMd)"), (1234, "1234"), (1, "1 (shrink)")]
)
def test_unknown_methods_are_listed_and_named_when_opened(spool: Spool, method: int, says: str) -> None:
    archive = ZipArchive(WatchedSource(stored_as(method, b"data", b"data")), "x.zip", 0, spool)
    assert [entry.name for entry in archive.listdir("")] == ["a"]
    with pytest.raises(UnsupportedFormat) as caught:
        archive.open("a")
    assert f"x.zip: a: ZIP compression method {says} is not supported" in str(caught.value)


@pytest.mark.parametrize("options", [["-pSECRET"], ["-pSECRET", "-mem=AES256"]])
def test_encrypted_entries_are_listed_and_refused_when_opened(
    tree: Path, open_zip: OpenZip, options: list[str]
) -> None:
    command = ["7z", "a", "-tzip", *options, "../t.zip", "daf.json"]
    subprocess.run(command, cwd=tree, check=True, stdout=subprocess.DEVNULL)
    archive = open_zip(tree.parent / "t.zip")
    assert [(entry.name, entry.size) for entry in archive.listdir("")] == [("daf.json", 18)]
    with pytest.raises(UnsupportedFormat, match="encrypted"):
        archive.open("daf.json")


def compressed_zeros(method: int, size: int, tmp_path: Path) -> bytes:
    """The stream that stands for `size` zeros."""
    if method == 93:
        import zstandard

        return zstandard.compress(bytes(size))
    if method == 9:
        (tmp_path / "zeros").write_bytes(bytes(size))
        subprocess.run(
            ["7z", "a", "-tzip", "-mm=Deflate64", "zeros.zip", "zeros"],
            cwd=tmp_path, check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        data = (tmp_path / "zeros.zip").read_bytes()
        return data[35 : data.index(b"PK\1\2")]
    data = zipped({"a": bytes(size)}, {8: zipfile.ZIP_DEFLATED, 12: zipfile.ZIP_BZIP2}[method])
    return data[31 : data.index(b"PK\1\2")]


@pytest.mark.parametrize("method", [8, 9, 12, 93])
@pytest.mark.parametrize("declared", [1000, 300_000])
def test_bombs_are_stopped_at_the_size_they_declare(tmp_path: Path, spool: Spool, method: int, declared: int) -> None:
    compressed = compressed_zeros(method, 20_000_000, tmp_path)
    data = stored_as(method, compressed, bytes(declared))
    archive = ZipArchive(WatchedSource(data), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=rf"^x\.zip: a: decompresses to more than the {declared} bytes"):
        content(archive.open("a"))
    assert spool.used_bytes == 0


@pytest.mark.parametrize("method", [8, 9, 12, 93])
@pytest.mark.parametrize("declared", [1001, 300_001])
def test_streams_that_end_too_early(tmp_path: Path, spool: Spool, method: int, declared: int) -> None:
    compressed = compressed_zeros(method, declared - 1, tmp_path)
    archive = ZipArchive(WatchedSource(stored_as(method, compressed, bytes(declared))), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=f"decompresses to {declared - 1} bytes"):
        content(archive.open("a"))
    cut = stored_as(method, compressed[: len(compressed) // 2], bytes(declared - 1))
    with pytest.raises(CorruptArchive, match=r"^x\.zip: a: (decompresses to|its compressed data is damaged)"):
        content(ZipArchive(WatchedSource(cut), "x.zip", 0, spool).open("a"))


@pytest.mark.parametrize("method", [8, 9, 12, 93])
def test_a_size_that_claims_terabytes_takes_neither_memory_nor_spool(spool: Spool, method: int) -> None:
    data = stored_as(method, b"x" * 100, b"", size=0xFFFFFFFE)
    archive = ZipArchive(WatchedSource(data), "x.zip", 0, Spool(limit_bytes=1000))
    with pytest.raises(SpoolFull, match="4294967294 bytes when decompressed, the spool holds 1000"):
        archive.open("a").read(0, 1)
    with pytest.raises(CorruptArchive):
        ZipArchive(WatchedSource(data), "x.zip", 0, spool).open("a").read(0, 1)


@pytest.mark.parametrize("method", [8, 9, 12, 93])
def test_compressed_data_that_is_none(spool: Spool, method: int) -> None:
    archive = ZipArchive(WatchedSource(stored_as(method, b"\xff\x07" * 50, b"x" * 5000)), "x.zip", 0, spool)
    with pytest.raises(CorruptArchive, match=r"^x\.zip: a: its compressed data is damaged: "):
        archive.open("a").read(0, 1)


def test_a_source_that_fails_while_decoding_raises_its_own_error(spool: Spool) -> None:
    source = WatchedSource(zipped({"a": LINES}, zipfile.ZIP_BZIP2))
    entry = ZipArchive(source, "x.zip", 0, spool).open("a")

    def fail() -> None:
        raise OSError(5, "disk broken")

    source.before_read = fail
    with pytest.raises(OSError, match="disk broken"):
        entry.read(0, 1)


def test_the_source_is_closed_when_the_archive_is_none(spool: Spool) -> None:
    source = WatchedSource(b"no archive at all")
    with pytest.raises(DafmountError):
        ZipArchive(source, "x.zip", 0, spool)
    assert source.closed


def test_an_archive_appended_to_while_open_is_read_on(write_zip: WriteZip, open_zip: OpenZip) -> None:
    path = write_zip(("a", LINES), ("b", b"tiny"))
    archive = open_zip(path)
    entry = archive.open("a")
    with zipfile.ZipFile(path, "a") as appended:
        appended.writestr("c", LINES[::-1])
    assert entry.read(0, 100) == LINES[:100]
    assert contents(archive) == {"a": LINES, "b": b"tiny"}
    assert contents(open_zip(path))["c"] == LINES[::-1]


def test_an_archive_cut_while_open_is_a_change(write_zip: WriteZip, open_zip: OpenZip) -> None:
    path = write_zip(("a", LINES), ("b", b"tiny"))
    archive = open_zip(path)
    entry = archive.open("a")
    os.truncate(path, 1000)
    with pytest.raises(SourceChanged):
        entry.read(0, 100)
    with pytest.raises(SourceChanged):
        archive.open("b")


SEEDS = {
    "stored": zipped({"daf.json": b'{"version":[1,1]}\n', "d/a": os.urandom(500), "d/b": b""}),
    "deflated": zipped({"daf.json": b'{"version":[1,1]}\n', "d/a": LINES[:9000]}, zipfile.ZIP_DEFLATED),
    "bzip2": zipped({"a": LINES[:9000]}, zipfile.ZIP_BZIP2),
}

mutations = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from([b"\0", b"\1", b"\xff", b"\xff" * 4, b"PK\5\6", b"PK\1\2", b"/../"])),
    min_size=1, max_size=4,
)  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(SEEDS)), mutations, st.floats(0, 1), st.sampled_from(["off", "auto", "all"]))
def test_damaged_archives_raise_only_our_errors_and_never_give_wrong_bytes(
    spool: Spool, seed: str, changes: list[tuple[float, bytes]], cut: float, verify: str
) -> None:
    data = bytearray(SEEDS[seed])
    with zipfile.ZipFile(io.BytesIO(data)) as original:
        truth = {original.read(info) for info in original.infolist()} | {b""}
    for place, value in changes:
        at = int(place * (len(data) - len(value)))
        data[at : at + len(value)] = value
    if cut > 0.9:
        del data[int(len(data) * (cut - 0.9) * 10) :]
    read_everything(bytes(data), spool, verify, None if verify == "off" else truth)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.binary(max_size=60))
def test_arbitrary_bytes_raise_only_our_errors(spool: Spool, head: bytes, tail: bytes) -> None:
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 1, 1, len(tail), len(head), 0)
    for data in (head, head + tail + end, b"PK\3\4" + head + b"PK\1\2" + tail + end):
        read_everything(data, spool, "auto", None)


def read_everything(data: bytes, spool: Spool, verify: str, truth: set[bytes] | None) -> None:
    """Reads all entries; each must be one of `truth`, where that is given, or raise an error of ours, in one line."""
    errors: list[DafmountError] = []
    try:
        archive = ZipArchive(WatchedSource(data), "x.zip", 0, spool, verify=verify)
    except DafmountError as error:
        errors.append(error)
    else:
        for path in list(files_of(archive)):
            try:
                found = content(archive.open(path))
            except DafmountError as error:
                errors.append(error)
            else:
                assert truth is None or found in truth
        archive.close()
    assert not any("\n" in str(error) for error in errors)
    assert spool.used_bytes == 0
