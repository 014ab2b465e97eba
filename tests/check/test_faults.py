"""Each kind of fault is found where it is, and said in words that tell what was found and what was expected."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import struct
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from check_archives import (
    N_CELLS,
    Files,
    compact,
    findings,
    metadata,
    packed_keys,
    sample,
    shard,
    write_directory,
    zip_bytes,
)
from dafmount.check.findings import MAX_PER_FILE, Finding
from dafmount.check.run import check
from dafmount.errors import EmptyFile, GroupNotFound, NotADaf, NotFound, UnsupportedFormat
from dafmount.shard.writer import write_shard

ZSTD = "zstd"
BLOSC = "blosc_zstd_bitshuffle"


@pytest.fixture
def files() -> Files:
    return sample(ZSTD)


def found_in(files: Files, place: Path) -> list[Finding]:
    """What is found in a directory with these files; metadata.json is made to suit them."""
    files["metadata.json"] = metadata(files)
    return findings(write_directory(files, place / "x.daf"))


def edit_json(files: Files, path: str, change: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads(files[path])
    change(fields)
    files[path] = compact(fields)


def expect(found: list[Finding], path: str, pattern: str, chunk: int | None = None) -> None:
    """There is just this fault."""
    assert [(one.path, one.chunk) for one in found] == [(path, chunk)], [one.line for one in found]
    assert re.search(pattern, found[0].message), found[0].message


# Axes and scalars


def test_an_axis_with_an_entry_twice(files: Files, tmp_path: Path) -> None:
    files["axes/cell.txt"] = files["axes/cell.txt"].replace(b"cell-3\n", b"cell-4\n")
    expect(found_in(files, tmp_path), "axes/cell.txt", "entry 'cell-4' occurs more than once, expected unique")


def test_an_axis_whose_last_line_does_not_end(files: Files, tmp_path: Path) -> None:
    files["axes/cell.txt"] = files["axes/cell.txt"].rstrip(b"\n")
    del files["metadata.json"]
    expect(findings(write_directory(files, tmp_path)), "axes/cell.txt", "last line has no newline")


def test_an_axis_that_is_no_text(files: Files, tmp_path: Path) -> None:
    files["axes/cell.txt"] = files["axes/cell.txt"].replace(b"cell-3\n", b"cell-\xff\n")
    expect(found_in(files, tmp_path), "axes/cell.txt", "line 4 is no valid UTF-8")


def test_text_cut_within_a_letter(files: Files, tmp_path: Path) -> None:
    files["axes/cell.txt"] = files["axes/cell.txt"][:-1] + "é".encode()[:1]
    del files["metadata.json"]
    lines = [one.message for one in findings(write_directory(files, tmp_path))]
    assert any("no valid UTF-8" in line for line in lines)


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        ({"type": "Int8", "value": 128}, '"value" is 128, expected a Int8'),
        ({"type": "Int8", "value": 1.5}, "expected a Int8"),
        ({"type": "Bool", "value": 2}, "expected a Bool"),
        ({"type": "String", "value": 1}, "expected a String"),
        ({"type": "Int9", "value": 1}, '"type" is "Int9"'),
        ({"type": "Int8"}, 'no "value"'),
        ({"type": "Int8", "value": 1, "valeu": 1}, 'unknown key "valeu"'),
    ],
)
def test_a_scalar_that_contradicts_itself(files: Files, tmp_path: Path, value: object, pattern: str) -> None:
    files["scalars/n.json"] = compact(value)
    expect(found_in(files, tmp_path), "scalars/n.json", pattern)


def test_a_scalar_that_is_no_json(files: Files, tmp_path: Path) -> None:
    files["scalars/n.json"] = b'{"type":'
    del files["metadata.json"]
    expect(findings(write_directory(files, tmp_path)), "scalars/n.json", "not valid JSON")


# Descriptors and sizes


def test_a_flat_payload_of_the_wrong_size(files: Files, tmp_path: Path) -> None:
    files["vectors/gene/mean.data"] += b"\0"
    expect(found_in(files, tmp_path), "vectors/gene/mean.data", "57 bytes, expected 56: 7 values of 8")


def test_a_flat_text_of_the_wrong_number_of_lines(files: Files, tmp_path: Path) -> None:
    files["vectors/gene/name.json"] = compact({"format": "dense", "eltype": "String"})
    files["vectors/gene/name.txt"] = b"a\n" * 6
    expect(found_in(files, tmp_path), "vectors/gene/name.txt", "6 lines, expected 7")


def test_a_payload_that_is_missing(files: Files, tmp_path: Path) -> None:
    del files["vectors/gene/mean.data"]
    expect(found_in(files, tmp_path), "vectors/gene/mean.data", "no such file, which mean.json speaks of")


def test_an_unknown_key(files: Files, tmp_path: Path) -> None:
    edit_json(files, "vectors/gene/mean.json", lambda fields: fields.update(elytpe="Int8"))
    expect(found_in(files, tmp_path), "vectors/gene/mean.json", 'unknown key "elytpe", expected eltype, format')


def test_an_unknown_compression(files: Files, tmp_path: Path) -> None:
    edit_json(files, "vectors/cell/age.json", lambda fields: fields.update(compression="lzma"))
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "unknown compression 'lzma'")


def test_a_level_that_its_compression_does_not_have(files: Files, tmp_path: Path) -> None:
    edit_json(files, "vectors/cell/age.json", lambda fields: fields.update(compression_level=23))
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "level 23, expected 1 to 22")


def test_a_property_of_an_axis_that_does_not_exist(files: Files, tmp_path: Path) -> None:
    files["vectors/donor/age.json"] = compact({"format": "dense", "eltype": "Int8"})
    del files["metadata.json"]
    expect(findings(write_directory(files, tmp_path)), "vectors/donor", "no axis 'donor', the axes are cell, gene")


def test_packed_properties_in_version_1_0(files: Files, tmp_path: Path) -> None:
    files = {path: data for path, data in files.items() if "matrices" not in path and "doublet" not in path}
    files["daf.json"] = compact({"version": [1, 0]})
    found = found_in(files, tmp_path)
    assert {one.path for one in found} == {f"vectors/cell/{name}.json" for name in ("age", "is_ok", "label")}


def test_a_file_that_no_descriptor_speaks_of_is_a_warning(files: Files, tmp_path: Path) -> None:
    files["vectors/cell/lost.data"] = b""
    (found,) = found_in(files, tmp_path)
    assert (found.path, found.severity) == ("vectors/cell/lost.data", "warning")
    assert ": warning: " in found.line


def test_a_component_that_its_descriptor_does_not_speak_of(files: Files, tmp_path: Path) -> None:
    edit_json(files, "matrices/cell/gene/spliced.json", lambda fields: fields.pop("nzval"))
    expect(found_in(files, tmp_path), "matrices/cell/gene/spliced.nzval.zip", "spliced.json does not speak of it")


# metadata.json


def test_metadata_that_is_stale(files: Files, tmp_path: Path) -> None:
    listed = json.loads(files["metadata.json"])
    listed["vectors/gene/mean"]["eltype"] = "Float32"
    listed["vectors/gene/gone"] = listed["vectors/gene/mean"]
    del listed["axes/gene"]
    files["metadata.json"] = json.dumps(listed).encode()
    found = findings(write_directory(files, tmp_path))
    assert {one.path for one in found} == {"metadata.json"}
    text = "\n".join(one.message for one in found)
    assert 'says {"format": "dense", "eltype": "Float32"} of vectors/gene/mean, its own file' in text
    assert "lists vectors/gene/gone, which is not there" in text
    assert "does not list axes/gene" in text


def test_metadata_in_a_zip_archive_is_ignored(files: Files, tmp_path: Path) -> None:
    files["metadata.json"] = b"{}"
    (tmp_path / "x.daf.zip").write_bytes(zip_bytes(files))
    assert findings(tmp_path / "x.daf.zip") == []


# Sparse


def sparse(files: Files, name: str, values: list[int], eltype: str = "<u4") -> None:
    """Replace a flat or packed component of matrices/cell/gene/spliced by a packed one."""
    descriptor = json.loads(files["matrices/cell/gene/spliced.json"])
    descriptor[name]["n_elements"] = len(values)
    files["matrices/cell/gene/spliced.json"] = compact(descriptor)
    flat = np.array(values, eltype).tobytes()
    path = f"matrices/cell/gene/spliced.{name}.zip"
    files[path] = shard(flat, (len(values),), (16,), "UInt32", ZSTD)


def small_matrix(files: Files, colptr: list[int], rowval: list[int], n_values: int | None = None) -> None:
    sparse(files, "colptr", colptr)
    sparse(files, "rowval", rowval)
    sparse(files, "nzval", [1] * (len(rowval) if n_values is None else n_values))


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    ("colptr", "rowval", "file", "pattern"),
    [
        ([1, 2, 3, 3, 3, 3, 3, 3], [1, 42], "rowval", "value 1 is the index 42, expected 1 to 41"),
        ([1, 2, 3, 3, 3, 3, 3, 3], [0, 1], "rowval", "value 0 is the index 0, expected 1 to 41"),
        ([1, 3, 3, 3, 3, 3, 3, 4], [5, 5, 1], "rowval", "value 1 is the row 5 after 5 in one column"),
        ([1, 3, 3, 3, 3, 3, 3, 4], [5, 4, 1], "rowval", "value 1 is the row 4 after 5 in one column"),
        ([2, 2, 3, 3, 3, 3, 3, 3], [1, 2], "colptr", "begins with 2, expected 1"),
        ([1, 3, 2, 3, 3, 3, 3, 3], [1, 2], "colptr", "value 2 is 2 after 3, expected none to fall"),
        ([1, 2, 2, 2, 2, 2, 2, 2], [1, 2], "colptr", "ends with 2, expected 3"),
        ([1, 2, 2, 2, 2, 2, 2, 4], [1, 2], "colptr", "value 7 is 4, expected at most 3"),
    ],
)
def test_indices_that_cannot_be(
    files: Files, tmp_path: Path, colptr: list[int], rowval: list[int], file: str, pattern: str, is_packed: bool
) -> None:
    small_matrix(files, colptr, rowval)
    suffix = ".zip"
    if not is_packed:
        suffix = ""
        for name, values in (("colptr", colptr), ("rowval", rowval)):
            edit_json(files, "matrices/cell/gene/spliced.json", lambda fields, name=name: unpack(fields[name]))
            files[f"matrices/cell/gene/spliced.{name}"] = np.array(values, "<u4").tobytes()
            del files[f"matrices/cell/gene/spliced.{name}.zip"]
    expect(found_in(files, tmp_path), f"matrices/cell/gene/spliced.{file}{suffix}", pattern)


def unpack(fields: dict[str, Any]) -> None:
    for key in packed_keys((1,), ""):
        fields.pop(key)


def test_rows_that_fall_at_the_beginning_of_a_column_are_sound(files: Files, tmp_path: Path) -> None:
    """More columns than a block of chunks has values, and columns without any."""
    small_matrix(files, [1, 1, 18, 18, 35, 35, 36, 37], [*range(1, 18), *range(1, 18), 9, 3])
    assert found_in(files, tmp_path) == []


def test_components_of_different_lengths(files: Files, tmp_path: Path) -> None:
    small_matrix(files, [1, 2, 3, 3, 3, 3, 3, 3], [1, 2], 3)
    found = found_in(files, tmp_path)
    assert "nzval has 3 values, expected 2" in [one.message for one in found]


def test_nzind_that_does_not_rise(files: Files, tmp_path: Path) -> None:
    nzind = np.frombuffer(files["vectors/cell/doublet.nzind"], "<u4").copy()
    nzind[2] = nzind[1]
    files["vectors/cell/doublet.nzind"] = nzind.tobytes()
    expect(found_in(files, tmp_path), "vectors/cell/doublet.nzind", "value 2 is the index .* expected more")


def test_indices_of_a_type_that_counts_nothing(files: Files, tmp_path: Path) -> None:
    edit_json(files, "vectors/cell/doublet.json", lambda fields: fields["nzind"].update(eltype="Float32"))
    messages = [one.message for one in found_in(files, tmp_path)]
    assert 'nzind: eltype is "Float32", expected a type of integers' in messages


# Values


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_truth_value_of_2(files: Files, tmp_path: Path, is_packed: bool) -> None:
    values = bytes([0, 1] * 8 + [0, 2] + [0] * (N_CELLS - 18))
    if is_packed:
        files["vectors/cell/is_ok.zip"] = shard(values, (N_CELLS,), (16,), "Bool", ZSTD)
        expect(found_in(files, tmp_path), "vectors/cell/is_ok.zip", "value 1 is the byte 2, expected a Bool", 1)
    else:
        edit_json(files, "vectors/cell/is_ok.json", unpack)
        del files["vectors/cell/is_ok.zip"]
        files["vectors/cell/is_ok.data"] = values
        expect(found_in(files, tmp_path), "vectors/cell/is_ok.data", "value 17 is the byte 2, expected a Bool")


def shard_of(raws: list[bytes], shape: tuple[int, ...], chunk: tuple[int, ...], width: int | None) -> bytes:
    """A shard of raw chunks as they are."""
    from dafmount.shard.writer import ShardWriter

    out = io.BytesIO()
    writer = ShardWriter(out, shape, chunk, width, ZSTD, 3)
    for raw in raws:
        writer.append(raw)
    writer.finish()
    return out.getvalue()


def test_padding_that_is_not_zeros(files: Files, tmp_path: Path) -> None:
    files["vectors/cell/age.zip"] = shard_of([bytes(64), bytes(64), bytes(36) + b"\1" * 28], (N_CELLS,), (16,), 4)
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "padding beyond the property's end is not all zeros", 2)


def test_padding_of_a_matrix_in_blocks(files: Files, tmp_path: Path) -> None:
    """7 columns in blocks of 3: the last blocks have two columns of padding, and the lowest ones some rows."""
    chunks = [bytes(16 * 3 * 4) for _ in range(9)]
    good = list(chunks)
    files["matrices/cell/gene/blocks.zip"] = shard_of(good, (N_CELLS, 7), (16, 3), 4)
    assert found_in(files, tmp_path / "good") == []
    chunks[6] = bytes(16 * 4) + b"\1" + bytes(16 * 2 * 4 - 1)
    chunks[2] = bytes(16 * 2 * 4 - 1) + b"\1" + bytes(16 * 4)
    chunks[0] = b"\1" * (16 * 3 * 4)
    files["matrices/cell/gene/blocks.zip"] = shard_of(chunks, (N_CELLS, 7), (16, 3), 4)
    assert sorted((one.chunk for one in found_in(files, tmp_path / "bad")), key=str) == [2, 6]


def strings_chunk(lines: list[bytes]) -> bytes:
    return struct.pack("<I", len(lines)) + b"".join(struct.pack("<I", len(line)) + line for line in lines)


@pytest.mark.parametrize(
    ("lines", "pattern"),
    [
        ([b"a"] * 9 + [b"x"] * 7, "strings beyond the property's end are not empty"),
        ([b"a\xff"] + [b""] * 15, "string 0 is no valid UTF-8"),
        ([b"a\nb"] + [b""] * 15, "a string holds a newline"),
        ([b"a"] * 15, "bytes, expected at least|has 15 strings, expected 16|strings, expected"),
    ],
)
def test_strings_that_cannot_be(files: Files, tmp_path: Path, lines: list[bytes], pattern: str) -> None:
    good = strings_chunk([b"b"] * 16)
    files["vectors/cell/label.zip"] = shard_of([good, good, strings_chunk(lines)], (N_CELLS,), (16,), None)
    expect(found_in(files, tmp_path), "vectors/cell/label.zip", pattern, 2)


# Shards


def change(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


def index_with(shard_bytes: bytes, n_chunks: int, pairs: dict[int, tuple[int, int]]) -> bytes:
    """A shard whose Zarr index says something else of some chunks, with the right checksum."""
    index = bytearray(shard_bytes[: 16 * n_chunks])
    for chunk, pair in pairs.items():
        index[16 * chunk : 16 * chunk + 16] = struct.pack("<QQ", *pair)
    return bytes(index) + google_crc32c.value(bytes(index)).to_bytes(4, "little") + shard_bytes[16 * n_chunks + 4 :]


@pytest.mark.parametrize("compression", [ZSTD, BLOSC, "gzip"])
def test_an_index_that_points_elsewhere(tmp_path: Path, compression: str) -> None:
    files = sample(compression)
    whole = files["vectors/cell/age.zip"]
    offset, length = struct.unpack_from("<QQ", whole, 16)
    files["vectors/cell/age.zip"] = index_with(whole, 3, {1: (offset + 1, length)})
    expect(
        found_in(files, tmp_path),
        "vectors/cell/age.zip",
        f"index puts its {length} bytes at {offset + 1}, expected {length} at {offset}",
        1,
    )


def test_an_index_that_calls_a_chunk_absent_which_is_there(files: Files, tmp_path: Path) -> None:
    whole = files["vectors/cell/age.zip"]
    files["vectors/cell/age.zip"] = index_with(whole, 3, {0: (2**64 - 1, 2**64 - 1)})
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "the Zarr index calls it absent", 0)


def test_a_wrong_checksum_of_the_index(files: Files, tmp_path: Path) -> None:
    files["vectors/cell/age.zip"] = change(files["vectors/cell/age.zip"], 48, b"\0\0\0\0")
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "Zarr index has CRC-32C .*, expected 0x00000000")


def test_a_wrong_gzip_trailer(tmp_path: Path) -> None:
    files = sample("gzip")
    whole = files["vectors/cell/age.zip"]
    offset, length = struct.unpack_from("<QQ", whole, 16)
    files["vectors/cell/age.zip"] = change(whole, offset + length - 8, b"\0\0\0\0")
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "gzip trailer is 00000000", 1)


def test_a_name_that_is_another_chunks(tmp_path: Path) -> None:
    files = sample(ZSTD)
    whole = files["vectors/cell/age.zip"]
    files["vectors/cell/age.zip"] = whole.replace(b"c/1", b"c/2")
    found = found_in(files, tmp_path)
    assert [one.chunk for one in found] == [1]
    assert "directory calls it b'c/2', expected b'c/1'" in found[0].message


def test_a_local_header_that_differs(files: Files, tmp_path: Path) -> None:
    whole = files["vectors/cell/age.zip"]
    at = whole.index(b"c/1")
    files["vectors/cell/age.zip"] = change(whole, at, b"c/7")
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "has the name b'c/7', its directory entry b'c/1'", 1)


def test_a_damaged_chunk_costs_only_itself(files: Files, tmp_path: Path) -> None:
    whole = files["matrices/cell/gene/UMIs.zip"]
    offset, length = struct.unpack_from("<QQ", whole, 16 * 5)
    files["matrices/cell/gene/UMIs.zip"] = change(whole, offset + length - 3, b"???")
    expect(found_in(files, tmp_path), "matrices/cell/gene/UMIs.zip", "", 5)


def test_codec_json_that_names_another_codec(tmp_path: Path) -> None:
    files = sample(BLOSC)
    flat = bytes(4 * N_CELLS)
    files["vectors/cell/age.zip"] = shard(flat, (N_CELLS,), (16,), "Int32", "blosc_lz4_bitshuffle")
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", 'codec.json says .*"lz4".*, expected .*"zstd"')


def test_absent_chunks_are_sound(tmp_path: Path) -> None:
    """A shard whose first chunk reads as zeros: it is neither in the directory nor in the file."""
    files = sample(ZSTD)
    values = np.zeros(N_CELLS, "<i4")
    values[16:] = 5
    whole = shard(values.tobytes(), (N_CELLS,), (16,), "Int32", ZSTD)
    files["vectors/cell/age.zip"] = without_first_entry(index_with(whole, 3, {0: (2**64 - 1, 2**64 - 1)}))
    assert found_in(files, tmp_path) == []


def without_first_entry(shard_bytes: bytes) -> bytes:
    start = shard_bytes.index(b"PK\x01\x02")
    length = shard_bytes.index(b"PK\x01\x02", start + 4) - start
    end = shard_bytes.index(b"PK\x06\x06")
    directory_bytes = end - start - length
    tail = bytearray(shard_bytes[end:])
    n = directory_bytes // length
    struct.pack_into("<QQQQ", tail, 24, n, n, directory_bytes, start)
    struct.pack_into("<Q", tail, 56 + 8, start + directory_bytes)
    return shard_bytes[:start] + shard_bytes[start + length : end] + bytes(tail)


def test_a_zipped_shard_that_another_program_wrote_is_sound(files: Files, tmp_path: Path) -> None:
    """Without an index, with plain names and sizes."""
    values = np.arange(48, dtype="<i4")
    values[N_CELLS:] = 0
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as stream:
        for chunk in range(3):
            stream.writestr(f"c/{chunk}", values[16 * chunk : 16 * chunk + 16].tobytes())
    edit_json(files, "vectors/cell/age.json", lambda fields: fields.update(packed_format="zipped", compression="gzip"))
    edit_json(files, "vectors/cell/age.json", lambda fields: fields.update(compression_level=6))
    files["vectors/cell/age.zip"] = out.getvalue()
    assert found_in(files, tmp_path / "good") == []
    files["vectors/cell/age.zip"] = out.getvalue().replace(b"c/1", b"c/0")
    expect(found_in(files, tmp_path / "bad"), "vectors/cell/age.zip", "directory calls it b'c/0', expected b'c/1'", 1)


def test_a_shard_cut_short(files: Files, tmp_path: Path) -> None:
    files["vectors/cell/age.zip"] = files["vectors/cell/age.zip"][:-1]
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "expected a ZIP end record")


def test_an_empty_shard(files: Files, tmp_path: Path) -> None:
    files["vectors/cell/age.zip"] = b""
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "0 bytes")


def test_a_chunk_that_claims_terabytes(files: Files, tmp_path: Path) -> None:
    edit_json(files, "vectors/cell/age.json", lambda fields: fields.update(chunk_shape=[1 << 40]))
    expect(found_in(files, tmp_path), "vectors/cell/age.zip", "a chunk would take .* bytes, expected at most")


def test_no_more_than_some_faults_of_a_file_are_listed(tmp_path: Path) -> None:
    n = 4096
    flat = np.arange(n, dtype="<i4").tobytes()
    out = io.BytesIO()
    write_shard(out, flat, (n,), (16,), 4, ZSTD, 3)
    files: Files = {
        "daf.json": compact({"version": [1, 1]}),
        "axes/cell.txt": b"".join(b"%d\n" % k for k in range(n)),
        "vectors/cell/age.json": compact({"format": "dense", "eltype": "Int32", **packed_keys((16,), ZSTD)}),
        "vectors/cell/age.zip": out.getvalue().replace(b"PK\x03\x04", b"PK\x03\x05"),
    }
    found = findings(write_directory(files, tmp_path))
    assert len(found) == MAX_PER_FILE + 1
    assert found[-1].message == f"{n // 16 - MAX_PER_FILE} more faults are not listed"


# Outer archives


def zip_of(files: Files, place: Path, **options: Any) -> Path:
    path = place / "x.daf.zip"
    path.write_bytes(zip_bytes(files, **options))
    return path


def test_an_entry_with_a_wrong_checksum(files: Files, tmp_path: Path) -> None:
    path = zip_of(files, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"cell-9\n", b"cell-X\n"))
    expect(findings(path), "axes/cell.txt", "CRC-32 .*, its directory entry declares")


def test_a_local_header_with_another_name(files: Files, tmp_path: Path) -> None:
    path = zip_of(files, tmp_path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"scalars/n.json", b"scalars/m.json", 1))
    messages = [one.message for one in findings(path) if one.path == "scalars/n.json"]
    assert "its local header has the name b'scalars/m.json', its directory entry b'scalars/n.json'" in messages


def test_a_deflated_archive_of_info_zip_is_sound(files: Files, tmp_path: Path) -> None:
    if shutil.which("zip") is None:
        pytest.skip("zip is not installed")
    root = write_directory(files, tmp_path / "x.daf")
    subprocess.run(["zip", "-qr", "../x.daf.zip", "."], cwd=root, check=True)
    subprocess.run(["zip", "-qr", "y.daf.zip", "x.daf"], cwd=tmp_path, check=True)
    assert findings(tmp_path / "x.daf.zip") == []
    assert findings(tmp_path / "y.daf.zip") == []


def test_an_archive_that_was_written_to_a_pipe_is_sound(files: Files, tmp_path: Path) -> None:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, block: Any) -> int:
            self.data += block
            return len(block)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as stream:
        for path, data in files.items():
            stream.writestr(path, data)
    (tmp_path / "x.daf.zip").write_bytes(pipe.data)
    assert findings(tmp_path / "x.daf.zip") == []


def test_entries_that_share_their_bytes(files: Files, tmp_path: Path) -> None:
    """A second directory entry over the first one's header."""
    path = zip_of({**files, "scalars/o.json": files["scalars/n.json"]}, tmp_path)
    data = bytearray(path.read_bytes())
    entries = [at for at in range(len(data)) if data[at : at + 4] == b"PK\x01\x02"]
    by_name = {bytes(data[at + 46 : at + 60]): at for at in entries}
    first, second = by_name[b"scalars/n.json"], by_name[b"scalars/o.json"]
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    path.write_bytes(data)
    messages = {one.message for one in findings(path)}
    assert any("within the entry scalars/n.json" in message or "within the entry" in message for message in messages)


def test_names_that_are_not_shown(files: Files, tmp_path: Path) -> None:
    path = zip_of({**files, "../evil": b""}, tmp_path)
    messages = [one.message for one in findings(path)]
    assert "1 of its names cannot be shown: a name that leads outside its directory" in messages


def test_a_name_that_comes_twice_is_a_warning(files: Files, tmp_path: Path) -> None:
    path = zip_of(files, tmp_path)
    with zipfile.ZipFile(path, "a") as stream, pytest.warns(UserWarning, match="Duplicate"):
        stream.writestr("scalars/n.json", files["scalars/n.json"])
    (found,) = findings(path)
    assert (found.path, found.severity) == ("scalars/n.json", "warning")


def test_only_the_group_that_is_named_is_checked(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "x.dafs.zip"
    bad = {**files, "scalars/n.json": b"{"}
    both = {f"good/{name}": data for name, data in files.items()} | {f"bad/{name}": data for name, data in bad.items()}
    path.write_bytes(zip_bytes(both))
    assert findings(f"{path}#/good") == []
    assert {one.path for one in findings(f"{path}#/bad")} == {"bad/scalars/n.json"}
    assert {one.path for one in findings(path)} == {"bad/scalars/n.json"}


def test_an_archive_cut_short_is_a_finding(files: Files, tmp_path: Path) -> None:
    path = zip_of(files, tmp_path)
    path.write_bytes(path.read_bytes()[:-30])
    (found,) = findings(path)
    assert "cut short or still being written" in found.message


# What cannot be read at all


def test_what_cannot_be_read(files: Files, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        findings(tmp_path / "nothing")
    (tmp_path / "empty.daf.zip").touch()
    with pytest.raises(EmptyFile):
        findings(tmp_path / "empty.daf.zip")
    (tmp_path / "text.daf.zip").write_text("no archive")
    with pytest.raises(NotADaf):
        findings(tmp_path / "text.daf.zip")
    (tmp_path / "x.dafs.zip").write_bytes(zip_bytes({f"one/{path}": data for path, data in files.items()}))
    with pytest.raises(GroupNotFound):
        findings(f"{tmp_path}/x.dafs.zip#/two")
    files["daf.json"] = compact({"version": [2, 0]})
    with pytest.raises(UnsupportedFormat):
        findings(write_directory(files, tmp_path / "new.daf"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(files: Files, tmp_path: Path) -> None:
    root = write_directory(files, tmp_path)
    (root / "vectors/gene/mean.data").chmod(0)
    expect(findings(root), "vectors/gene/mean.data", "Permission denied")


# A glance


def test_a_glance_reads_no_payloads(files: Files, tmp_path: Path) -> None:
    values = bytes([2] * N_CELLS)
    files["vectors/cell/is_ok.zip"] = shard(values, (N_CELLS,), (16,), "Bool", ZSTD)
    root = write_directory(files, tmp_path)
    assert findings(root, quick=True) == []
    assert findings(root) != []


def test_a_glance_sees_sizes_directories_and_the_index(files: Files, tmp_path: Path) -> None:
    files["vectors/gene/mean.data"] += b"\0"
    files["vectors/cell/age.zip"] = files["vectors/cell/age.zip"].replace(b"PK\x01\x02", b"PK\x01\x03")
    files["vectors/cell/label.zip"] = change(files["vectors/cell/label.zip"], 0, b"\0\0\0\0")
    found = findings(write_directory(files, tmp_path), quick=True)
    assert {one.path for one in found} == {
        "vectors/gene/mean.data",
        "vectors/cell/age.zip",
        "vectors/cell/label.zip",
    }


def test_threads_find_the_same(files: Files, tmp_path: Path) -> None:
    whole = files["matrices/cell/gene/UMIs.zip"]
    files["matrices/cell/gene/UMIs.zip"] = whole.replace(b"PK\x03\x04", b"PK\x03\x05")
    root = write_directory(files, tmp_path)
    assert findings(root, jobs=4) == findings(root, jobs=1) != []


def test_progress_reaches_its_end(files: Files, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    check(str(write_directory(files, tmp_path)), lambda _: None, progress=lambda *at: told.append(at))
    done, total = told[-1]
    assert 0.8 * total <= done <= 1.2 * total
