"""How long the steps of a read take; `pytest --benchmark-only` prints the table."""

from __future__ import annotations

import io

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from dafmount.shard import codecs, directory, grid, strings, writer

SHAPE = grid.make_grid([1024 * 128], [1024], 8, 1 << 20, "x")
RAW = np.random.default_rng(1).poisson(1, 1024 * 128).astype("<i8").tobytes()
FOUR = ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip"]


def shard(compression: str) -> bytes:
    out = io.BytesIO()
    writer.write_shard(out, RAW, [1024 * 128], [1024], 8, compression, 5)
    return out.getvalue()


def located(data: bytes) -> tuple[directory.Stride, bytes, directory.Chunks]:
    end = directory.parse_end(data[-98:], len(data), "x")
    entries = data[end.directory_offset :][: end.directory_bytes]
    stride = directory.parse_stride(entries[:4096], end, 128, "x")
    return stride, entries, directory.parse_entries(entries, stride, 0, 128, "x")


def test_parse_the_entries_of_a_mebibyte(benchmark: BenchmarkFixture) -> None:
    stride, entries, _ = located(shard("zstd"))
    assert len(benchmark(directory.parse_entries, entries, stride, 0, 128, "x").crc) == 128


def test_parse_one_entry(benchmark: BenchmarkFixture) -> None:
    stride, entries, chunks = located(shard("zstd"))
    assert benchmark(directory.parse_entry, entries[: stride.entry_bytes], stride, 0, "x").crc == chunks.crc[0]


def test_find_the_data_of_a_mebibyte(benchmark: BenchmarkFixture) -> None:
    data = shard("zstd")
    chunks = located(data)[2]
    starts = benchmark(directory.data_starts, data, chunks.header_offset, range(1 << 40), "x")
    assert (starts > chunks.header_offset).all()


def test_plan_a_mebibyte_as_a_run(benchmark: BenchmarkFixture) -> None:
    columns = grid.make_grid([1200, 1000], [1024, 1], 8, 1 << 20, "x")
    assert benchmark(columns.run, 12345, 1 << 20).first == 2


def test_plan_a_mebibyte_as_pieces(benchmark: BenchmarkFixture) -> None:
    assert sum(piece.stop - piece.start for piece in benchmark(SHAPE.pieces, 0, 1 << 20)) == 1 << 20


@pytest.mark.parametrize("compression", FOUR)
@pytest.mark.parametrize("verify", [True, False], ids=["crc", "no-crc"])
def test_decode_a_mebibyte(benchmark: BenchmarkFixture, compression: str, verify: bool) -> None:
    data = shard(compression)
    chunks = located(data)[2]
    starts = directory.data_starts(data, chunks.header_offset, range(1 << 40), "x")
    decoder = codecs.make_decoder(compression, 8, None, verify, "x")
    run = SHAPE.run(0, SHAPE.size)
    assert run is not None
    out = bytearray(run.buffer_bytes)
    benchmark(decoder.decode_run, data, starts, chunks, out, run.places, 8192, str)
    assert out == RAW


@pytest.mark.parametrize("compression", FOUR)
def test_decode_one_chunk(benchmark: BenchmarkFixture, compression: str) -> None:
    payload, crc, stated = codecs.encode_chunk(compression, 5, 8, RAW[:8192])
    decoder = codecs.make_decoder(compression, 8, None, True, "x")
    assert benchmark(decoder.decode, payload, decoder.zip_method, crc, stated, 8192, 8192, "x") == RAW[:8192]


@pytest.mark.parametrize("compression", FOUR)
def test_encode_one_chunk(benchmark: BenchmarkFixture, compression: str) -> None:
    assert benchmark(codecs.encode_chunk, compression, 5, 8, RAW[:8192])[0]


@pytest.mark.parametrize("every", [0, 9], ids=["short", "some-empty"])
def test_decode_a_chunk_of_strings(benchmark: BenchmarkFixture, every: int) -> None:
    lines = [b"" if every and k % every == 0 else b"AGCTTAGC-%d" % k for k in range(512)]
    raw = strings.encode_strings(lines, 512)
    assert benchmark(strings.decode_strings, raw, 512, 512, "x").split(b"\n")[:-1] == lines
