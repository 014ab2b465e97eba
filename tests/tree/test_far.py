"""Packed components of far sources: the same bytes as from near ones, by few requests."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.daf.catalog import Component, Packing
from dafmount.errors import Corrupt
from dafmount.shard.directory import index_bytes
from dafmount.shard.writer import write_shard
from dafmount.source.ahead import Ahead
from dafmount.source.base import Range
from dafmount.source.fetchers import Fetchers
from dafmount.tree import index_chunks
from dafmount.tree.build import Style, packed_content
from dafmount.tree.cache import ChunkCache
from dafmount.tree.content import Content, ReadAheadDeclined

COMPRESSIONS = ("blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip", "gzip_shuffle", "zstd_bitshuffle")
ROWS, COLUMNS = 1000, 40
VALUES = np.random.default_rng(3).integers(0, 300, (COLUMNS, ROWS)).astype("<u4")
FLAT = VALUES.tobytes()


class Far:
    """Bytes that are never at hand, and a list of what was asked for."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.asked: list[tuple[int, int]] = []
        self.name, self.size, self.gap_bytes = "far", len(data), 1024

    def read(self, offset: int, length: int) -> bytes:
        self.asked.append((offset, length))
        assert 0 <= offset <= offset + length <= len(self.data)
        return self.data[offset : offset + length]

    def read_nowait(self, offset: int, length: int) -> bytes | None:
        return None

    def read_ranges(self, ranges: Sequence[Range]) -> list[bytes]:
        return [self.read(start, stop - start) for start, stop in ranges]

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def fetchers() -> Iterator[Fetchers]:
    made = Fetchers(2, 1 << 20)
    yield made
    made.close()


def shard_of(compression: str, chunk_shape: tuple[int, ...] = (64, 1), values: Any = VALUES) -> bytes:
    out = io.BytesIO()
    write_shard(out, values.tobytes(), values.shape[::-1], chunk_shape, 4, compression, 3)
    return out.getvalue()


def open_far(
    shard: bytes,
    fetchers: Fetchers,
    compression: str = "zstd",
    chunk_shape: tuple[int, ...] = (64, 1),
    shape: tuple[int, ...] = (ROWS, COLUMNS),
    eltype: str = "UInt32",
) -> tuple[Content, Far]:
    far = Far(shard)
    component = Component("", eltype, None, Packing("indexed+zipped", chunk_shape, compression, 3))
    content = packed_content(Ahead(far, fetchers), shape, component, Style(ChunkCache(1 << 20)), 5)
    return content, far


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("chunk_shape", [(64, 1), (1000, 3), (7, 5), (2000, 50)])
def test_the_bytes_are_those_packed(compression: str, chunk_shape: tuple[int, ...], fetchers: Fetchers) -> None:
    content, _ = open_far(shard_of(compression, chunk_shape), fetchers, compression, chunk_shape)
    assert content.size == len(FLAT)
    for offset, length in ((0, 4096), (4096, 4096), (100_001, 3), (len(FLAT) - 7, 7), (3990, 20_000), (0, len(FLAT))):
        assert content.read(offset, length) == FLAT[offset : offset + length]
        assert content.read_nowait(offset, length) in (None, FLAT[offset : offset + length])
    content.close()


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "gzip"])
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(FLAT) - 1), st.integers(1, 20_000), st.booleans()), max_size=15))
def test_any_reads_in_any_order(compression: str, reads: list[tuple[int, int, bool]]) -> None:
    fetchers = Fetchers(2, 100_000)
    content, _ = open_far(shard_of(compression), fetchers, compression)
    for offset, length, is_impatient in reads:
        length = min(length, len(FLAT) - offset)
        found = None
        if is_impatient and length < 64 * 1024:
            found = content.read_nowait(offset, length)
        assert bytes(content.read(offset, length) if found is None else found) == FLAT[offset : offset + length]
    content.close()
    assert fetchers.held_bytes == 0
    fetchers.close()


@pytest.mark.parametrize("compression", ["blosc_lz4_bitshuffle", "zstd", "gzip"])
def test_strings(compression: str, fetchers: Fetchers) -> None:
    lines = [f"value {at % 13}".encode() * (at % 3) for at in range(500)]
    out = io.BytesIO()
    write_shard(out, lines, (500,), (32,), None, compression, 3)
    content, _ = open_far(out.getvalue(), fetchers, compression, (32,), (500,), "String")
    flat = b"".join(line + b"\n" for line in lines)
    assert content.size == len(flat)
    assert content.read(100, 1000) == flat[100:1100]
    assert content.read(0, len(flat)) == flat


def test_a_column_is_one_request_after_the_index(fetchers: Fetchers) -> None:
    content, far = open_far(shard_of("zstd"), fetchers)
    column = ROWS * 4
    content.read(5 * column, column)
    far.asked.clear()
    for at in (30, 12, 21):
        assert content.read(at * column, column) == FLAT[at * column : (at + 1) * column]
    assert len(far.asked) == 3
    assert sum(length for _, length in far.asked) < 1.3 * len(far.data) * 3 / COLUMNS


def test_the_first_part_of_a_columns_read_fetches_all_of_it(fetchers: Fetchers) -> None:
    rows, kib = 131_072, 1024
    values = np.random.default_rng(1).integers(0, 9, (3, rows)).astype("<u4")
    content, far = open_far(shard_of("zstd", (2048, 1), values), fetchers, "zstd", (2048, 1), (rows, 3))
    content.read(0, 4)
    far.asked.clear()
    flat = values.tobytes()
    for at in range(0, 512 * kib, 128 * kib):
        start = 512 * kib + at
        assert bytes(content.read(start, 128 * kib)) == flat[start : start + 128 * kib]
    assert len(far.asked) == 1


def test_reading_around_the_first_element_of_a_column_fetches_nothing_of_the_one_before(fetchers: Fetchers) -> None:
    rows, kib = 65_536, 1024
    values = np.random.default_rng(1).integers(0, 9, (4, rows)).astype("<u4")
    content, far = open_far(shard_of("zstd", (2048, 1), values), fetchers, "zstd", (2048, 1), (rows, 4))
    content.read(0, 4)
    far.asked.clear()
    flat, column = values.tobytes(), rows * 4
    with pytest.raises(ReadAheadDeclined):  # what a page fault at the first element makes the kernel ask for
        content.read_nowait(2 * column - 64 * kib, 128 * kib)
    for at in range(2 * column, 2 * column + 64 * kib, 4 * kib):  # then it asks page by page, and goes on as usual
        assert bytes(content.read(at, 4 * kib)) == flat[at : at + 4 * kib]
    for at in range(2 * column + 64 * kib, 3 * column, 64 * kib):
        assert bytes(content.read(at, 64 * kib)) == flat[at : at + 64 * kib]
    assert len(far.asked) == 1
    assert far.asked[0][1] < 1.1 * len(far.data) / 4
    # Who reads so on purpose, and is told of errors, gets what was asked for.
    assert bytes(content.read(column - 64 * kib, 128 * kib)) == flat[column - 64 * kib : column + 64 * kib]


def test_columns_of_a_matrix_with_a_large_index(fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_chunks, "MAX_INDEX_BYTES", 256 * 1024)
    rows, columns = 8192, 1500
    column = np.random.default_rng(8).integers(0, 1 << 30, rows).astype("<u4")
    shard = shard_of("zstd", (512, 1), np.tile(column, (columns, 1)))
    index = index_bytes(columns * rows // 512)
    assert index > index_chunks.MAX_INDEX_BYTES
    content, far = open_far(shard, fetchers, "zstd", (512, 1), (rows, columns))
    chosen = [int(at) for at in np.random.default_rng(1).choice(columns, 30, replace=False)]
    for at in chosen:
        assert bytes(content.read(at * column.nbytes, column.nbytes)) == column.tobytes()
    assert len(far.asked) <= 2 * len(chosen) + 4  # a part of the index for each column
    assert sum(length for _, length in far.asked) <= 1.3 * (len(shard) - index) * len(chosen) / columns


def test_an_index_in_parts(fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_chunks, "SMALL_INDEX_BYTES", 100)
    monkeypatch.setattr(index_chunks, "PART_CHUNKS", 32)
    for most in (0, 1 << 20):
        monkeypatch.setattr(index_chunks, "MAX_INDEX_BYTES", most)
        content, far = open_far(shard_of("gzip"), fetchers, "gzip")
        for at in (0, 30, 12, 21, 13, 14):
            assert content.read(at * 4000, 4000) == FLAT[at * 4000 : (at + 1) * 4000]
        whole = (0, index_bytes(16 * COLUMNS))
        assert (whole in far.asked) is (most > 0)
        assert content.read(0, len(FLAT)) == FLAT


@pytest.mark.parametrize("at", [0, 8, 16, 640 * 16, 640 * 16 + 3])
def test_a_damaged_index_is_done_without(at: int, fetchers: Fetchers, caplog: pytest.LogCaptureFixture) -> None:
    shard = bytearray(shard_of("zstd"))
    assert len(shard) > index_bytes(640)
    shard[at] ^= 0x55
    content, _ = open_far(bytes(shard), fetchers)
    assert content.read(0, len(FLAT)) == FLAT
    assert "its Zarr index is not used" in caplog.text


def test_a_damaged_index_that_is_read_in_parts(fetchers: Fetchers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_chunks, "SMALL_INDEX_BYTES", 100)
    monkeypatch.setattr(index_chunks, "MAX_INDEX_BYTES", 0)
    shard = bytearray(shard_of("zstd"))
    shard[0:16], shard[16:32] = shard[16:32], shard[0:16]  # two entries swapped: each leads to a sound chunk
    content, _ = open_far(bytes(shard), fetchers)
    assert content.read(0, 4000) == FLAT[:4000]
    huge = bytearray(shard_of("zstd"))
    huge[8:16] = b"\xff\xff\xff\xff\xff\xff\xff\x3f"
    content, _ = open_far(bytes(huge), fetchers)
    assert content.read(0, 4000) == FLAT[:4000]


def test_damaged_chunks_are_found_out(fetchers: Fetchers) -> None:
    shard = shard_of("zstd")
    found = 0
    for at in range(index_bytes(640) + 60, index_bytes(640) + 200):
        content, _ = open_far(shard[:at] + bytes([shard[at] ^ 1]) + shard[at + 1 :], fetchers)
        try:
            assert content.read(0, 600) == FLAT[:600]
        except Corrupt:
            found += 1
    assert found > 100


def test_absent_chunks_are_zeros(fetchers: Fetchers) -> None:
    shard = bytearray(shard_of("zstd"))
    index = np.frombuffer(shard[: 640 * 16], "<u8").copy()
    index[6:8] = 2**64 - 1
    from google_crc32c import value as crc32c

    shard[: 640 * 16] = index.tobytes()
    shard[640 * 16 : 640 * 16 + 4] = crc32c(index.tobytes()).to_bytes(4, "little")
    content, _ = open_far(bytes(shard), fetchers)
    expected = FLAT[: 3 * 256] + bytes(256) + FLAT[4 * 256 : 4000]
    assert content.read(0, 4000) == expected
    assert content.read(3 * 256 + 10, 20) == bytes(20)


def test_real_shards(corpus: Path, fetchers: Fetchers) -> None:
    """Those of the corpus that hold a dense matrix of numbers: the index is believed and gives the flat bytes."""
    import json

    n = 0
    for place in sorted((corpus / "dafr").glob("*.daf")):
        for path in sorted(place.glob("matrices/*/*/*.json")):
            fields = json.loads(path.read_bytes())
            flat = corpus / "dafr" / "flat.daf" / path.relative_to(place).with_suffix(".data")
            shard = path.with_suffix(".zip")
            if "packed_format" not in fields or fields["format"] != "dense" or not flat.exists():
                continue
            shape = tuple(
                (place / "axes" / f"{axis}.txt").read_bytes().count(b"\n") for axis in path.parts[-3:-1]
            )
            codec, chunk_shape = fields["compression"], tuple(fields["chunk_shape"])
            content, far = open_far(shard.read_bytes(), fetchers, codec, chunk_shape, shape, fields["eltype"])
            expected = flat.read_bytes()
            assert bytes(content.read(0, len(expected))) == expected
            assert not any(offset > os.stat(shard).st_size - 98 for offset, _ in far.asked)
            n += 1
    assert n
