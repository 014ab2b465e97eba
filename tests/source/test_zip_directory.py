from __future__ import annotations

import io
import logging
import os
import random
import struct
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from dafmount.errors import CorruptArchive, EmptyFile, NotADaf, NotFound, UnsupportedFormat
from dafmount.source import zip_directory
from dafmount.source.base import ByteSource, Entry, Range
from dafmount.source.zip_directory import ZipDirectory, read_directory
from dafmount.source.zip_entries import MemorySource

OWN_TIME = 1_700_000_000 * 10**9


class CountedSource(MemorySource):
    """Remembers what was read."""

    def __init__(self, data: bytes) -> None:
        super().__init__("x.zip", data)
        self.reads: list[Range] = []

    def read(self, offset: int, length: int) -> bytes:
        self.reads.append(Range(offset, offset + length))
        return super().read(offset, length)


def directory_of(data: bytes | ByteSource) -> ZipDirectory:
    source = MemorySource("x.zip", data) if isinstance(data, bytes) else data
    directory = read_directory(source, name="x.zip", mtime_ns=OWN_TIME)
    directory.log_left_out()
    return directory


def zipped(*members: str | zipfile.ZipInfo, comment: bytes = b"", data: bytes = b"12345") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member in members:
            archive.writestr(member, data)
        archive.comment = comment
    return stream.getvalue()


def member(
    name: str, *, time: tuple[int, int, int, int, int, int] = (1980, 1, 1, 0, 0, 0), **fields: object
) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, time)
    info.create_system = 3
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def with_raw_name(placeholder: str, raw_name: bytes) -> bytes:
    """An archive whose one entry has these bytes for a name, which zipfile would not write."""
    assert len(placeholder) == len(raw_name)
    return zipped(member(placeholder)).replace(placeholder.encode(), raw_name)


def walk(directory: ZipDirectory, path: str = "") -> dict[str, Entry]:
    found = {}
    for entry in directory.listdir(path):
        full = f"{path}/{entry.name}" if path else entry.name
        assert full not in found
        found[full] = entry
        if entry.is_directory:
            assert directory.is_directory(full)
            assert directory.find(full) is None
            found.update(walk(directory, full))
        else:
            assert directory.find(full) is not None
            assert not directory.is_directory(full)
    return found


def files(directory: ZipDirectory) -> list[str]:
    return [path for path, entry in walk(directory).items() if not entry.is_directory]


# ---------------------------------------------------------------------------------------------------------------------
# Finding the directory


def test_an_archive_is_listed_as_zipfile_lists_it(corpus: Path) -> None:
    for path in sorted(corpus.glob("dafr/*.zip")):
        directory = directory_of(path.read_bytes())
        found = walk(directory)
        with zipfile.ZipFile(path) as archive:
            expected = {info.filename: info.file_size for info in archive.infolist() if not info.is_dir()}
            assert {name: entry.size for name, entry in found.items() if not entry.is_directory} == expected
            for info in [info for info in archive.infolist() if not info.is_dir()]:
                index = directory.find(info.filename)
                assert index is not None
                record = directory.record(index)
                assert (record.crc, record.compressed_size, record.size, record.header_offset, record.method) == (
                    info.CRC, info.compress_size, info.file_size, info.header_offset, info.compress_type,
                )  # fmt: skip


def test_one_read_finds_a_small_archive_and_two_a_large_one() -> None:
    small = CountedSource(zipped("a", "b/c"))
    assert files(directory_of(small)) == ["b/c", "a"]
    assert len(small.reads) == 1
    large = CountedSource(zipped(*(f"{'n' * 60}{i:05}" for i in range(2000)), data=b"d" * 100))
    assert len(files(directory_of(large))) == 2000
    assert len(large.reads) == 2
    assert sum(stop - start for start, stop in large.reads) < 0.8 * large.size


@pytest.mark.parametrize("comment", [b"", b"a comment", b"c" * 65535, b"PK\5\6" * 100, b"PK\5\6" + b"\0" * 18])
def test_comments_hide_nothing(comment: bytes) -> None:
    assert files(directory_of(zipped("a", comment=comment))) == ["a"]


@pytest.mark.parametrize("prefix", [b"#!/bin/sh\nexit\n" * 10, b"MZ" + b"\0" * 100_000])
@pytest.mark.parametrize("zip64", [False, True])
def test_data_put_before_the_archive_moves_every_offset(prefix: bytes, zip64: bool, corpus: Path) -> None:
    data = (corpus / "dafr/zstd.dafs.zip").read_bytes() if zip64 else zipped("a", "b")
    plain, shifted = directory_of(data), directory_of(prefix + data)
    assert files(plain) == files(shifted)
    for index in range(len(plain)):
        assert shifted.record(index).header_offset == plain.record(index).header_offset + len(prefix)


def test_bytes_after_the_archive_are_ignored() -> None:
    assert files(directory_of(zipped("a", "b") + b"\0" * 1000)) == ["a", "b"]


def test_zip64_as_zipfile_writes_it() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in ("a", "b/c"):
            with archive.open(name, "w", force_zip64=True) as entry:
                entry.write(b"data")
    found = walk(directory_of(stream.getvalue()))
    assert [(path, entry.size) for path, entry in found.items()] == [("b", 0), ("b/c", 4), ("a", 4)]


@pytest.fixture(scope="module")
def seventy_thousand() -> tuple[list[str], bytes]:
    """An archive of many entries, and their names."""
    names = [f"d{i % 7}/{i}" for i in range(70_000)]
    return names, zipped(*names, data=b"")


def test_zip64_by_number_of_entries(seventy_thousand: tuple[list[str], bytes]) -> None:
    names, data = seventy_thousand
    directory = directory_of(data)
    assert len(directory) == 70_000
    assert sorted(files(directory)) == sorted(names)


def test_a_count_that_wrapped_is_taken_from_writers_without_zip64(seventy_thousand: tuple[list[str], bytes]) -> None:
    _, data = seventy_thousand
    end, n = data[-98:], 70_000 % 65536
    assert end[:4] == b"PK\6\6"
    size, start = struct.unpack_from("<2Q", end, 40)
    plain_end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, n, n, size, start, 0)
    assert len(directory_of(data[:-98] + plain_end)) == 70_000


def test_sizes_beyond_four_gigabytes() -> None:
    info = member("large")
    data = bytearray(zipped(info))
    at = data.index(b"PK\1\2")
    extra = struct.pack("<2H3Q", 1, 24, 5 << 32, 6 << 32, 0)
    struct.pack_into("<2L", data, at + 20, 0xFFFFFFFF, 0xFFFFFFFF)
    struct.pack_into("<H", data, at + 30, len(extra))
    struct.pack_into("<L", data, at + 42, 0xFFFFFFFF)
    end = data.index(b"PK\5\6")
    struct.pack_into("<L", data, end + 12, end - at + len(extra))
    data[end:end] = extra
    directory = directory_of(bytes(data))
    assert walk(directory)["large"].size == 5 << 32
    record = directory.record(0)
    assert (record.size, record.compressed_size, record.header_offset) == (5 << 32, 6 << 32, 0)
    cut = bytes(data).replace(extra, struct.pack("<2HQ", 1, 8, 5) + b"\0" * 16)
    with pytest.raises(CorruptArchive, match=r"^x.zip: large: its ZIP64 field of 8 bytes lacks"):
        directory_of(cut).record(0)


def test_signatures_inside_names_and_extra_fields_do_not_mislead(caplog: pytest.LogCaptureFixture) -> None:
    names = ["PK\1\2" * 20, "a", "PK\1\2PK\1\2" + "x" * 60]
    info = member("with extra")
    info.extra = struct.pack("<2H", 0x9999, 80) + b"PK\1\2" * 20
    assert files(directory_of(zipped(*names, info, "last"))) == [*names, "with extra", "last"]
    assert not caplog.records


# ---------------------------------------------------------------------------------------------------------------------
# Damage


def test_an_empty_file() -> None:
    with pytest.raises(EmptyFile, match=r"^x\.zip: an empty file, expected a ZIP archive$"):
        directory_of(b"")


@pytest.mark.parametrize("data", [b"x", b"hello" * 100, b"\0" * 100_000, b"GIF89a PK\5\6 and more", b"PKzip" * 9])
def test_what_is_no_zip_archive(data: bytes) -> None:
    with pytest.raises(NotADaf, match=r"^x\.zip: not a ZIP archive: "):
        directory_of(data)


def test_an_archive_without_entries_is_an_empty_tree() -> None:
    assert directory_of(zipped()).listdir("") == []


def test_cut_short_at_any_byte() -> None:
    data = zipped("a", "b/c", comment=b"end")
    for length in range(1, len(data) - 3):
        with pytest.raises(CorruptArchive, match=r"^x\.zip: .*cut short or still being written"):
            directory_of(data[:length])


def test_cut_short_where_an_archive_lies_inside() -> None:
    inner = zipped("c/0", "c/1")
    outer = zipped("shard.zip", "other", data=inner)
    whole = outer.index(b"PK\5\6") + 22
    for length in range(whole, len(outer) - 22):
        with pytest.raises(CorruptArchive, match="cut short or still being written"):
            directory_of(outer[:length])


def test_the_corpus_cut_short(corpus: Path) -> None:
    data = (corpus / "dafr/zstd.dafs.zip").read_bytes()
    for length in random.Random(1).sample(range(4, len(data)), 60):
        with pytest.raises(CorruptArchive, match="cut short or still being written"):
            directory_of(data[:length])


@pytest.mark.parametrize(
    ("position", "value", "says"),
    [
        (10, b"\xfe\xff", "claims a directory of 65534 entries"),
        (12, b"\xff\xff\xff\x7f", "which does not fit"),
        (16, b"\xff\xff\xff\x7f", "which does not fit"),
        (10, b"\1\0", "holds 2 entries, its end record says 1"),
    ],
)
def test_claims_of_the_end_record_are_checked(position: int, value: bytes, says: str) -> None:
    data = bytearray(zipped("a", "b"))
    at = data.index(b"PK\5\6") + position
    data[at : at + len(value)] = value
    with pytest.raises(CorruptArchive, match=says):
        directory_of(bytes(data))


def test_a_damaged_directory_names_the_entry() -> None:
    data = bytearray(zipped("a", "b", "c"))
    data[data.index(b"PK\1\2", data.index(b"PK\1\2") + 1)] = 0
    with pytest.raises(CorruptArchive, match="entry 1 of the ZIP directory, 47 bytes into it, is damaged"):
        directory_of(bytes(data))


def test_one_part_of_several_is_refused() -> None:
    data = bytearray(zipped("a"))
    struct.pack_into("<2H", data, data.index(b"PK\5\6") + 4, 1, 1)
    with pytest.raises(UnsupportedFormat, match="split into several"):
        directory_of(bytes(data))


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_the_last_of_several_entries_with_one_name_counts() -> None:
    with pytest.warns(UserWarning, match="Duplicate name"):
        data = zipped("a", "d/b", "a", "c", "a")
    directory = directory_of(data)
    assert files(directory) == ["d/b", "c", "a"]
    assert directory.find("a") == 4


def test_directories_said_and_implied() -> None:
    dated = member("said/", time=(2020, 5, 17, 10, 30, 2))
    found = walk(directory_of(zipped(dated, "implied/deep/er/file", member("said/in/"), "said/file")))
    assert sorted(found) == [
        "implied", "implied/deep", "implied/deep/er", "implied/deep/er/file", "said", "said/file", "said/in",
    ]  # fmt: skip
    assert found["said"].mtime_ns == int(datetime(2020, 5, 17, 10, 30, 2).timestamp()) * 10**9
    assert found["implied"].mtime_ns == OWN_TIME


def test_untidy_names_are_tidied() -> None:
    names = ["./daf.json", "a//b", "c/./d", ".//e/./", "f/.g", "..h", "i..", "j/..k"]
    found = walk(directory_of(zipped(*names)))
    assert sorted(found) == ["..h", "a", "a/b", "c", "c/d", "daf.json", "e", "f", "f/.g", "i..", "j", "j/..k"]


def test_tidied_names_meet_those_that_are_tidy() -> None:
    assert files(directory_of(zipped("x/a", "x//a", "./b", "b"))) == ["x/a", "b"]


def test_names_that_lead_outside_are_left_out_and_counted_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    names = ["../x", "a/../../x", "/abs", "good", "a/..", "n" * 256, "/".join("d" * 200)]
    data = zipped(*names, "nul?name").replace(b"nul?name", b"nul\0name")
    with caplog.at_level(logging.WARNING):
        directory = directory_of(data)
    assert files(directory) == ["good"]
    assert [record.getMessage() for record in caplog.records] == [
        "x.zip: left out 7 of 8 entries, such as ../x (3: a name that leads outside its directory; 2: a name longer or "
        "deeper than Linux and this program allow; 1: an absolute name; 1: a name that holds a NUL)"
    ]


def test_an_odd_name_in_one_batch_spoils_no_other() -> None:
    names = [f"d/{i}" for i in range(40_000)]
    names[100], names[20_000] = "../out", "d//20000"
    assert sorted(files(directory_of(zipped(*names, data=b"")))) == sorted(f"d/{i}" for i in range(40_000) if i != 100)


def test_a_directory_wins_over_a_file_of_its_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        directory = directory_of(zipped("a", "a/b", "c/d", "c", "e/", "e"))
    assert sorted(walk(directory)) == ["a", "a/b", "c", "c/d", "e"]
    assert all(directory.find(name) is None for name in "ace")
    assert "left out 3 of 6 entries, such as a (3: a file with the name of a directory)" in caplog.text


def test_names_in_utf8_with_and_without_the_flag() -> None:
    name = "größe/日本"
    assert files(directory_of(zipped(name))) == [name]
    raw = name.encode()
    assert files(directory_of(with_raw_name("?" * len(raw), raw))) == [name]


def test_names_in_the_old_code_page() -> None:
    assert files(directory_of(with_raw_name("gr??e", b"gr\x94\xe1e"))) == ["größe"]


def test_names_that_claim_utf8_and_are_not_keep_their_bytes() -> None:
    data = zipped(member("é_bad")).replace("é".encode(), b"\xff\xfe")
    directory = directory_of(data)
    assert files(directory) == [os.fsdecode(b"\xff\xfe_bad")]


def test_a_path_that_stands_for_no_bytes_is_not_found() -> None:
    with pytest.raises(NotFound, match="cannot be encoded"):
        directory_of(zipped("a")).find("\ud800")


def test_the_unicode_path_field_counts_when_it_is_about_this_name() -> None:
    def field(raw_name: bytes, name: str) -> bytes:
        body = struct.pack("<BL", 1, zlib.crc32(raw_name)) + name.encode()
        return struct.pack("<2H", 0x7075, len(body)) + body

    right = zipped(member("gr__e", extra=field(b"gr__e", "größe")))
    stale = zipped(member("gr__e", extra=field(b"older", "größe")))
    climbing = zipped(member("gr__e", extra=field(b"gr__e", "../größe")), "group")
    assert files(directory_of(right)) == ["größe"]
    assert files(directory_of(stale)) == ["gr__e"]
    assert files(directory_of(climbing)) == ["group"]


def test_backslashes_are_separators_only_in_names_that_dos_made_without_slashes() -> None:
    assert files(directory_of(zipped(member("a\\b\\c", create_system=0)))) == ["a/b/c"]
    assert files(directory_of(zipped(member("a\\b/c", create_system=0)))) == ["a\\b/c"]
    assert files(directory_of(zipped(member("a\\b", create_system=3)))) == ["a\\b"]
    assert files(directory_of(zipped(member("..\\b", create_system=0)))) == []
    assert list(walk(directory_of(zipped(member("d\\", create_system=0))))) == ["d"]


def test_the_depth_and_number_of_directories_one_name_costs_is_bounded() -> None:
    names = ["/".join("d" * 30_000) + str(i) for i in range(3)]
    assert files(directory_of(zipped(*names, "a"))) == ["a"]


def test_the_names_of_directories_take_no_more_than_their_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped(*(f"{n}/{'d' * 200}/f" for n in range(50)))
    assert len(files(directory_of(data))) == 50
    monkeypatch.setattr(zip_directory, "_MAX_PATH_BYTES", 5_000)
    with pytest.raises(UnsupportedFormat, match="paths of its directories take more than 5000 bytes"):
        files(directory_of(data))


def test_a_directory_of_more_than_its_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = zipped(*(f"name-{n}" for n in range(100)))
    monkeypatch.setattr(zip_directory, "_MAX_DIRECTORY_BYTES", 4_000)
    with pytest.raises(UnsupportedFormat, match="supported are 4000"):
        directory_of(data)


@pytest.mark.parametrize("path", ["gone", "a", "d/gone", "d/b/", "/d", ".", "d/../d"])
def test_what_is_no_directory_is_not_found(path: str) -> None:
    with pytest.raises(NotFound, match=r"^x\.zip: .*no such directory"):
        directory_of(zipped("a", "d/b")).listdir(path)


def test_directories_that_hold_a_name() -> None:
    names = ["one/daf.json", "two/nested/daf.json", "two/daf.json/x", "daf.jsonx", "x/ydaf.json"]
    directory = directory_of(zipped(*names))
    assert directory.directories_holding("daf.json") == ["one", "two/nested"]
    assert directory_of(zipped("daf.json")).directories_holding("daf.json") == [""]


# ---------------------------------------------------------------------------------------------------------------------
# Times


@pytest.fixture
def in_new_york(monkeypatch: pytest.MonkeyPatch) -> object:
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "America/New_York")
        time.tzset()
        yield
    time.tzset()


def mtime_s(info: zipfile.ZipInfo) -> float:
    return walk(directory_of(zipped(info)))[info.filename].mtime_ns / 10**9


@pytest.mark.usefixtures("in_new_york")
def test_dos_times_are_local() -> None:
    # 2021-07-01 12:00:04 in New York is 16:00:04 UTC.
    assert mtime_s(member("a", time=(2021, 7, 1, 12, 0, 4))) == 1_625_155_204
    assert mtime_s(member("b", time=(2021, 1, 1, 12, 0, 4))) == 1_609_520_404


def test_the_epoch_and_impossible_dates_are_the_archives_own_time() -> None:
    assert mtime_s(member("a")) * 10**9 == OWN_TIME
    data = bytearray(zipped(member("a")))
    for stamp in (0, 0xFFFFFFFF, 13 << 21 | 1 << 16):
        struct.pack_into("<L", data, data.index(b"PK\1\2") + 12, stamp)
        assert walk(directory_of(bytes(data)))["a"].mtime_ns == OWN_TIME


def test_extended_times_are_utc_and_win() -> None:
    unix = struct.pack("<2HBl", 0x5455, 5, 1, 1_500_000_000)
    early = struct.pack("<2HBl", 0x5455, 5, 1, -86_400)
    none = struct.pack("<2HBl", 0x5455, 5, 2, 1_500_000_000)
    ntfs = struct.pack("<2HL2H3Q", 0x000A, 32, 0, 1, 24, 116444736000000000 + 1_400_000_000 * 10**7 + 25, 0, 0)
    other = struct.pack("<2H4s", 0x9999, 4, b"abcd")
    assert mtime_s(member("a", extra=unix)) == 1_500_000_000
    assert mtime_s(member("a", extra=other + early)) == -86_400
    assert mtime_s(member("a", extra=none)) * 10**9 == OWN_TIME
    assert walk(directory_of(zipped(member("a", extra=ntfs))))["a"].mtime_ns == 1_400_000_000 * 10**9 + 2500
    assert mtime_s(member("a", extra=ntfs + unix)) == 1_500_000_000


def test_times_of_the_files_that_zip_packed(tree: Path) -> None:
    os.utime(tree / "daf.json", (1_234_567_891, 1_234_567_891))
    subprocess.run(["zip", "-qr", "../t.zip", "."], cwd=tree, check=True)
    found = walk(directory_of((tree.parent / "t.zip").read_bytes()))
    assert found["daf.json"].mtime_ns == 1_234_567_891 * 10**9
    assert found["deep"].mtime_ns == int((tree / "deep").stat().st_mtime) * 10**9


# ---------------------------------------------------------------------------------------------------------------------
# Links


def link(name: str) -> zipfile.ZipInfo:
    return member(name, external_attr=0o120777 << 16)


@pytest.fixture
def linked() -> Callable[..., ZipDirectory]:
    def make(links: dict[str, bytes | None], *names: str) -> ZipDirectory:
        source = MemorySource("x.zip", zipped(*map(link, links), *names))
        directory = read_directory(source, name="x.zip", mtime_ns=OWN_TIME)
        texts = list(links.values())
        directory.add_links((index, texts[index]) for index in directory.pending_links)
        directory.log_left_out()
        return directory

    return make


def test_links_stand_for_what_they_lead_to(linked: Callable[..., ZipDirectory]) -> None:
    links = {"to-file": b"d/f", "d/up": b"../top", "to-dir": b"e", "twice": b"to-file", "through": b"to-dir/g/h"}
    directory = linked(links, "d/f", "top", "e/g/h")
    found = walk(directory)
    assert sorted(found) == [
        "d", "d/f", "d/up", "e", "e/g", "e/g/h", "through", "to-dir", "to-dir/g", "to-dir/g/h", "to-file",
        "top", "twice",
    ]  # fmt: skip
    assert directory.find("twice") == directory.find("to-file") == directory.find("d/f")
    assert directory.find("to-dir/g/h") == directory.find("through") == directory.find("e/g/h")
    assert found["to-file"].size == 5


def test_links_that_lead_nowhere_good_are_left_out(
    linked: Callable[..., ZipDirectory], caplog: pytest.LogCaptureFixture
) -> None:
    links = {
        "out": b"../x", "d/out": b"../../x", "abs": b"/etc/passwd", "gone": b"nothing", "self": b"self",
        "ping": b"pong", "pong": b"ping", "unread": None, "d/root": b"..", "here": b"d", "empty": b"", "nul": b"f\0",
    }  # fmt: skip
    with caplog.at_level(logging.WARNING):
        directory = linked(links, "f", "d/f")
    assert sorted(walk(directory)) == ["d", "d/f", "f"]
    assert all(directory.find(name) is None for name in links)
    assert len(caplog.records) == 1
    assert "left out 12 of 14 entries" in caplog.text


def test_a_link_loses_to_a_directory_of_its_name(linked: Callable[..., ZipDirectory]) -> None:
    assert sorted(walk(linked({"d": b"f"}, "f", "d/g"))) == ["d", "d/g", "f"]


# ---------------------------------------------------------------------------------------------------------------------
# Size


def test_many_names_cost_about_twenty_bytes_each_beside_the_directory() -> None:
    names = [f"vectors/cell/property_{i:06}.json" for i in range(20_000)]
    data = zipped(*names, data=b"")
    directory = directory_of(data)
    assert [entry.name for entry in directory.listdir("vectors/cell")] == [name[13:] for name in names]
    assert [directory.find(name) for name in names[::997]] == list(range(0, 20_000, 997))
    arrays = (directory._offsets, directory._files_by_key, directory._sorted_keys, directory._by_directory)
    assert sum(array.nbytes for array in arrays) <= 20 * len(names)
