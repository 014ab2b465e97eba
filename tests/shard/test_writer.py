"""What the writer makes, as zarr-python, Python's zipfile, unzip and 7z read it."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr

from dafmount.errors import UnsupportedFormat
from dafmount.shard import codecs, directory, grid, writer

READ_BY_ZARR = ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip", "gzip_shuffle"]
SHAPES = [
    ([1000], [256]),
    ([1024], [256]),
    ([3], [7]),
    ([130, 9], [64, 1]),
    ([130, 9], [50, 4]),
    ([4096, 2], [40000, 1]),
]


def values_of(shape: list[int], dtype: str) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    values = np.random.default_rng(7).poisson(3, int(np.prod(shape))).astype(dtype)
    return values.reshape(shape, order="F")


def written(flat: bytes | list[bytes], shape: list[int], chunk: list[int], itemsize: int | None, name: str) -> bytes:
    out = io.BytesIO()
    assert writer.write_shard(out, flat, shape, chunk, itemsize, name, 5) == out.tell() == len(out.getvalue())
    return out.getvalue()


def open_with_zarr(
    folder: Path, data: bytes, shape: list[int], chunk: list[int], dtype: str, itemsize: int | None, name: str
) -> zarr.Array:
    """As upstream lays out a packed Zarr array: one shard, dimensions reversed, so that both are row-major there."""
    sharding = {
        "chunk_shape": chunk[::-1],
        "codecs": codecs.codec_list(name, 5, itemsize),
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "start",
    }
    whole = [-(-n // size) * size for n, size in zip(shape, chunk, strict=True)]
    metadata = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape[::-1],
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": whole[::-1]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "" if dtype == "string" else 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
    }
    (folder / "zarr.json").write_text(json.dumps(metadata))
    path = folder.joinpath("c", *["0"] * len(shape))
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return zarr.open_array(folder, mode="r")


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("compression", READ_BY_ZARR)
@pytest.mark.parametrize(("shape", "chunk"), SHAPES)
def test_zarr_reads_numbers_through_the_index(
    tmp_path: Path, compression: str, shape: list[int], chunk: list[int]
) -> None:
    values = values_of(shape, "<f8")
    data = written(values.tobytes(order="F"), shape, chunk, 8, compression)
    array = open_with_zarr(tmp_path, data, shape, chunk, "float64", 8, compression)
    np.testing.assert_array_equal(np.asarray(array[:]).T, values)


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip"])
@pytest.mark.parametrize(("dtype", "itemsize"), [("uint8", 1), ("int16", 2), ("float32", 4)])
def test_zarr_reads_all_item_sizes(tmp_path: Path, compression: str, dtype: str, itemsize: int) -> None:
    values = values_of([5001], dtype)
    data = written(values.tobytes(), [5001], [2000], itemsize, compression)
    array = open_with_zarr(tmp_path, data, [5001], [2000], dtype, itemsize, compression)
    np.testing.assert_array_equal(np.asarray(array[:]), values)


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip"])
def test_zarr_reads_strings_through_the_index(tmp_path: Path, compression: str) -> None:
    lines = [f"é{k}" * (k % 5) for k in range(130)]
    data = written([line.encode() for line in lines], [130], [64], None, compression)
    array = open_with_zarr(tmp_path, data, [130], [64], "string", None, compression)
    assert [str(value) for value in np.asarray(array[:])] == lines


def without_utf8_flags(data: bytes) -> bytes:
    """Python refuses upstream's flag over names that are no UTF-8; what else the headers say is to be read."""
    copy = bytearray(data)
    end = directory.parse_end(data[-98:], len(data), "x")
    entries = data[end.directory_offset :][: end.directory_bytes]
    stride = directory.parse_stride(entries[:4096], end, end.n_entries, "x")
    for k, header in enumerate(directory.parse_entries(entries, stride, 0, end.n_entries, "x").header_offset):
        flags_at = end.directory_offset + k * stride.entry_bytes + 8
        copy[flags_at : flags_at + 2] = copy[header + 6 : header + 8] = bytes(2)
    return bytes(copy)


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_zip_tools_find_every_entry_whole(tmp_path: Path, compression: str) -> None:
    values = values_of([1000, 3], "<i4")
    data = written(values.tobytes(order="F"), [1000, 3], [300, 1], 4, compression)
    path = tmp_path / "x.zip"
    path.write_bytes(without_utf8_flags(data) if compression == "gzip" else data)
    with zipfile.ZipFile(path) as archive:
        names = archive.infolist()
        n_more = 1 if codecs.CODECS[compression].zip_method == 0 else 0
        assert len(names) == 4 * 3 + n_more
        if compression != "zstd" or sys.version_info >= (3, 14):
            assert archive.testzip() is None
        if compression == "gzip":
            chunks = b"".join(archive.read(name)[: 300 * 4 if k % 4 < 3 else 400] for k, name in enumerate(names))
            assert chunks == values.tobytes(order="F")
        if n_more:
            assert json.loads(archive.read("codec.json")) == codecs.codec_list(compression, 5, 4)


@pytest.mark.parametrize("compression", [name for name in codecs.CODECS if name != "zstd"])
def test_unzip_finds_no_errors(tmp_path: Path, compression: str) -> None:
    unzip = shutil.which("unzip")
    if unzip is None:
        pytest.skip("unzip is not installed")
    path = tmp_path / "x.zip"
    path.write_bytes(written(values_of([1000], "<i4").tobytes(), [1000], [300], 4, compression))
    result = subprocess.run([unzip, "-tqq", path], capture_output=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_shard_may_begin_anywhere_in_a_file() -> None:
    alone = written(bytes(800), [100], [30], 8, "zstd")
    out = io.BytesIO(b"before")
    out.seek(6)
    writer.write_shard(out, bytes(800), [100], [30], 8, "zstd", 5)
    assert out.getvalue() == b"before" + alone


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_an_empty_property_is_a_shard_without_chunks(compression: str) -> None:
    data = written(b"", [0], [30], 8, compression)
    end = directory.parse_end(data[-98:], len(data), "x")
    stride = directory.parse_stride(data[end.directory_offset :][: end.directory_bytes], end, 0, "x")
    assert (directory.codec_json_entry_range(end, stride, 0) is None) == (end.n_entries == 0)
    assert len(directory.parse_index(data[:4], 0, len(data), "x").offset) == 0


def test_names_of_many_chunks_are_padded_to_one_width() -> None:
    shape, chunk = [23, 101], [2, 1]
    data = written(bytes(23 * 101), shape, chunk, 1, "zstd")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        names = archive.namelist()
    assert names == [f"c/{column:03}/{row:02}" for column in range(101) for row in range(12)]


def test_encoded_chunks_may_come_from_elsewhere() -> None:
    values = values_of([100], "<i8").tobytes()
    out = io.BytesIO()
    shard = writer.ShardWriter(out, [100], [64], 8, "zstd", 5)
    encoded = [codecs.encode_chunk("zstd", 5, 8, raw) for raw in writer.split_flat(values, shard.grid)]
    for payload, crc, raw_bytes in encoded:
        shard.append_encoded(payload, crc, raw_bytes)
    shard.finish()
    assert out.getvalue() == written(values, [100], [64], 8, "zstd")


def test_a_writer_takes_exactly_the_chunks_of_its_grid() -> None:
    shard = writer.ShardWriter(io.BytesIO(), [100], [64], 8, "zstd", 5)
    with pytest.raises(ValueError, match="expected 512"):
        shard.append(bytes(511))
    shard.append(bytes(512))
    with pytest.raises(ValueError, match="expected 2"):
        shard.finish()
    shard.append(bytes(512))
    with pytest.raises(ValueError, match="2 chunks only"):
        shard.append(bytes(512))


@pytest.mark.parametrize(
    ("compression", "level", "found"),
    [("lzma", 5, "blosc_zstd_bitshuffle, .*gzip_shuffle"), ("zstd", 0, "1 to 22"), ("gzip", 10, "1 to 9")],
)
def test_unknown_compressions_and_levels_are_refused(compression: str, level: int, found: str) -> None:
    with pytest.raises(UnsupportedFormat, match=found):
        writer.ShardWriter(io.BytesIO(), [1], [1], 8, compression, level)


def test_gzip_cannot_name_more_chunks_than_its_header_holds() -> None:
    with pytest.raises(UnsupportedFormat, match="16777216"):
        writer.ShardWriter(io.BytesIO(), [(1 << 24) + 1], [1], 1, "gzip", 5)


def test_split_flat_runs_over_the_grid_in_chunk_order() -> None:
    shape = grid.make_grid([3, 2], [2, 1], 1, 10, "x")
    assert list(writer.split_flat(b"abcdef", shape)) == [b"ab", b"c\0", b"de", b"f\0"]
