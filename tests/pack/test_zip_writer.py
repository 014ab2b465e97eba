"""Outer archives, as other programs read and as dafr wrote them."""

from __future__ import annotations

import io
import random
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.errors import UsageError
from dafmount.pack.zip_writer import ZipWriter, combine_crcs, end_records, join_crcs
from packing import run_pack


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=300), st.binary(max_size=300))
def test_joined_checksums_are_those_of_the_joined_bytes(first: bytes, second: bytes) -> None:
    assert combine_crcs(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_byte_that_was_forgotten_or_written_twice_is_noticed() -> None:
    with pytest.raises(ValueError, match="never written"):
        join_crcs([(0, 3, 1), (4, 1, 1)])
    with pytest.raises(ValueError, match="written twice"):
        join_crcs([(0, 3, 1), (2, 1, 1)])


def make_archive(base: int) -> tuple[bytes, dict[str, bytes]]:
    numbers = random.Random(base)
    contents = {
        f"folder/{'n' * n}é.bin": numbers.randbytes(numbers.choice([0, 1, 7, 8, 5000])) for n in range(1, 20)
    }
    out = io.BytesIO()
    writer = ZipWriter(out, base)
    for name, data in contents.items():
        entry = writer.create(name)
        cut = len(data) // 3
        entry.seek(cut)
        entry.write(data[cut:])
        entry.seek(0)
        entry.write(data[:cut])
        assert entry.tell() == cut
        entry.close()
    end = writer.size + len(writer.directory)
    records = end_records(base + end, base + writer.size, len(writer.directory), writer.n_entries)
    return bytes(base) + out.getvalue()[: writer.size] + writer.directory + records, contents


@pytest.mark.parametrize("base", [0, 8, 1000])
def test_other_programs_read_the_entries(tmp_path: Path, base: int) -> None:
    data, contents = make_archive(base)
    path = tmp_path / "x.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == contents
    if base == 0:
        assert subprocess.run(["unzip", "-tq", path], check=False, capture_output=True).returncode == 0
        assert subprocess.run(["7z", "t", path], check=False, capture_output=True).returncode == 0


def data_offsets(data: bytes) -> list[int]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        headers = [entry.header_offset for entry in archive.infolist()]
    return [at + 30 + sum(struct.unpack_from("<HH", data, at + 26)) for at in headers]


@pytest.mark.parametrize("base", [0, 8, 1000, 1001])
def test_data_lies_at_multiples_of_eight(base: int) -> None:
    offsets = data_offsets(make_archive(base)[0])
    assert len(offsets) == 19
    assert all(offset % 8 == 0 for offset in offsets)


def test_a_name_too_long_for_zip_is_refused() -> None:
    with pytest.raises(UsageError, match="65535"):
        ZipWriter(io.BytesIO()).create("x" * 70000)


def headers(path: Path) -> dict[str, tuple[object, ...]]:
    """What each entry's two headers say apart from its content."""
    data = path.read_bytes()
    found: dict[str, tuple[object, ...]] = {}
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            at = entry.header_offset
            local = struct.unpack_from("<IHHHHHIIIHH", data, at)
            extra = data[at + 30 + local[9] : at + 30 + local[9] + local[10]]
            padding = extra[20:]
            expected = struct.pack("<HH", 0xDAF1, len(padding) - 4) + bytes(len(padding) - 4) if padding else b""
            found[entry.filename] = (
                local[:6],
                local[7:9],
                extra[:4],
                padding == expected,
                entry.create_system,
                entry.create_version,
                entry.extract_version,
                entry.flag_bits,
                entry.compress_type,
                entry.date_time,
                entry.external_attr,
                entry.internal_attr,
                len(entry.extra),
                entry.extra[:4],
            )
    return found


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "zstd"])
def test_entries_look_like_those_that_dafr_wrote(tmp_path: Path, corpus: Path, compression: str) -> None:
    theirs = headers(corpus / "dafr" / f"{compression}.daf.zip")
    run_pack(corpus / "dafr" / "flat.daf", tmp_path / "x.daf.zip", compression)
    ours = headers(tmp_path / "x.daf.zip")
    common = ours.keys() & theirs.keys()
    assert len(common) > 70
    assert {name: ours[name] for name in common} == {name: theirs[name] for name in common}
    order = [name for name in theirs if name.endswith((".json", "axes/cell.txt"))]
    assert [name for name in ours if name in order] == order


def test_the_end_records_are_those_that_dafr_wrote(corpus: Path) -> None:
    data = (corpus / "dafr" / "zstd.daf.zip").read_bytes()
    n_entries, _, size, offset = struct.unpack_from("<QQQQ", data, len(data) - 98 + 24)
    assert data[-98:] == end_records(len(data) - 98, offset, size, n_entries)
