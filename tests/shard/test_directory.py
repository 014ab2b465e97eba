"""Directory and index of shards: plain and foreign ones, and damaged ones."""

from __future__ import annotations

import io
import struct
import zipfile
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.errors import Corrupt, CorruptShard, UnsupportedFormat
from dafmount.shard import codecs, directory, grid, writer

N_CHUNKS = 7
RAW = np.random.default_rng(5).poisson(2, 7 * 100).astype("<i4").tobytes()
CHUNK_BYTES = 400


def shard(compression: str) -> bytes:
    out = io.BytesIO()
    writer.write_shard(out, RAW, [700], [100], 4, compression, 5)
    return out.getvalue()


def read_all(data: bytes, compression: str, n_chunks: int = N_CHUNKS) -> bytes:
    end = directory.parse_end(data[-directory.TAIL_BYTES :], len(data), "x")
    entries = data[end.directory_offset :][: end.directory_bytes]
    stride = directory.parse_stride(entries[:4096], end, n_chunks, "x")
    at = directory.codec_json_entry_range(end, stride, n_chunks)
    text = None
    if at is not None:
        found = directory.parse_codec_json_entry(data[at[0] : at[0] + at[1]], end, "x")
        start = found.header_offset + directory.data_start(data, found.header_offset, "x")
        text = data[start : start + found.stored_bytes]
        if codecs.crc32(text) != found.crc:
            raise CorruptShard("x: codec.json has another CRC-32")
    chunks = directory.parse_entries(entries, stride, 0, n_chunks, "x")
    starts = directory.data_starts(data, chunks.header_offset, range(1 << 40), "x")
    decoder = codecs.make_decoder(compression, 4, text, True, "x")
    raws = []
    for k in range(n_chunks):
        one = directory.parse_entry(entries[k * stride.entry_bytes : (k + 1) * stride.entry_bytes], stride, k, "x")
        assert one == tuple(int(column[k]) for column in chunks[:5])
        start = one.header_offset + directory.data_start(data, one.header_offset, "x")
        assert start == starts[k]
        payload = data[start : start + one.stored_bytes]
        raws.append(decoder.decode(payload, one.method, one.crc, one.raw_bytes, CHUNK_BYTES, CHUNK_BYTES, "x"))
    return b"".join(raws)


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_what_was_written_is_read(compression: str) -> None:
    data = shard(compression)
    assert read_all(data, compression) == RAW
    end = directory.parse_end(data[-98:], len(data), "x")
    entries = data[end.directory_offset :][: end.directory_bytes]
    stride = directory.parse_stride(entries[:4096], end, N_CHUNKS, "x")
    chunks = directory.parse_entries(entries, stride, 0, N_CHUNKS, "x")
    starts = directory.data_starts(data, chunks.header_offset, range(1 << 40), "x")
    assert (starts <= chunks.header_offset + chunks.header_hint).all()


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "zstd", "gzip", "gzip_shuffle"])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_an_altered_byte_is_our_error_or_changes_nothing(compression: str, data: st.DataObject) -> None:
    altered = bytearray(shard(compression))
    directory_at = directory.parse_end(bytes(altered[-98:]), len(altered), "x").directory_offset
    for _ in range(data.draw(st.integers(1, 2))):
        at = data.draw(st.integers(0, len(altered) - 1) | st.integers(directory_at, len(altered) - 1))
        altered[at] = data.draw(st.integers(0, 255))
    with suppress(Corrupt, UnsupportedFormat):
        assert read_all(bytes(altered), compression) == RAW


@pytest.mark.parametrize("compression", ["blosc_lz4_bitshuffle", "gzip"])
def test_a_shard_cut_short_anywhere_is_corrupt(compression: str) -> None:
    data = shard(compression)
    for stop in [*range(120), *range(120, len(data), 37), len(data) - 1]:
        with pytest.raises(CorruptShard):
            read_all(data[:stop], compression)


@settings(max_examples=100, deadline=None)
@given(tail=st.binary(max_size=98), size=st.integers(0, 1 << 63))
def test_any_tail_is_an_end_within_the_shard_or_corrupt(tail: bytes, size: int) -> None:
    for end_of in (tail, tail[:-22] + b"PK\5\6" + tail[-18:-2] + bytes(2)):
        shard_bytes = size + len(end_of)
        try:
            end = directory.parse_end(end_of, shard_bytes, "x")
        except CorruptShard:
            continue
        assert end.directory_offset + end.directory_bytes <= shard_bytes
        assert end.n_entries * 46 <= end.directory_bytes


def foreign(n_chunks: int, method: int) -> bytes:
    """A "zipped" shard as a ZIP library makes it: no ZIP64, no index."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for k in range(n_chunks):
            archive.writestr(f"c/{k}", RAW[k * CHUNK_BYTES : (k + 1) * CHUNK_BYTES])
    return out.getvalue()


def test_a_shard_without_zip64_is_read() -> None:
    assert read_all(foreign(N_CHUNKS, zipfile.ZIP_DEFLATED), "gzip") == RAW


def test_entries_of_other_origin_may_carry_other_extra_fields() -> None:
    """The ZIP64 field may come after others, and hold only what the entry leaves out."""
    times = struct.pack("<HHI", 0x5455, 4, 0)
    zip64 = struct.pack("<HHQ", 1, 8, 123)
    name = b"c/0"
    head = struct.pack("<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 8, 0, 33, 77, 10, 20, 3, 20, 0, 0, 0, 0, 0xFFFFFFFF)
    entry = head + name + times + zip64
    end = directory.End(1000, 2 * len(entry), 2)
    stride = directory.parse_stride(entry, end, 2, "x")
    assert directory.parse_entry(entry, stride, 0, "x") == (8, 77, 10, 20, 123)
    chunks = directory.parse_entries(entry * 2, stride, 0, 2, "x")
    assert [column.tolist() for column in chunks[:5]] == [[8, 8], [77, 77], [10, 10], [20, 20], [123, 123]]


@pytest.mark.parametrize(
    ("n_chunks", "found"), [(N_CHUNKS - 2, "lists 8"), (N_CHUNKS + 1, "do not fill|lists"), (9, "lists 8")]
)
def test_a_directory_of_another_number_of_chunks_is_corrupt(n_chunks: int, found: str) -> None:
    with pytest.raises(CorruptShard, match=found):
        read_all(shard("blosc_zstd_bitshuffle"), "blosc_zstd_bitshuffle", n_chunks)


def test_names_of_different_lengths_are_corrupt() -> None:
    with pytest.raises(CorruptShard, match="do not fill"):
        read_all(foreign(11, zipfile.ZIP_DEFLATED), "gzip", 11)


def test_the_first_bad_chunk_is_named() -> None:
    data = shard("zstd")
    end = directory.parse_end(data[-98:], len(data), "x")
    entries = bytearray(data[end.directory_offset :][: end.directory_bytes])
    stride = directory.parse_stride(bytes(entries[:4096]), end, N_CHUNKS, "x")
    entries[3 * stride.entry_bytes] ^= 1
    with pytest.raises(CorruptShard, match="chunk 103 has byte 0x51 at 0, expected 0x50"):
        directory.parse_entries(bytes(entries), stride, 100, N_CHUNKS, "x")
    entries[3 * stride.entry_bytes] ^= 1
    at = 5 * stride.entry_bytes + stride.offset_at
    entries[at : at + 8] = (1 << 63).to_bytes(8, "little")
    for read in (
        lambda: directory.parse_entries(bytes(entries), stride, 100, N_CHUNKS, "x"),
        lambda: directory.parse_entry(bytes(entries)[5 * stride.entry_bytes :][: stride.entry_bytes], stride, 105, "x"),
    ):
        with pytest.raises(CorruptShard, match=rf"chunk 105 claims .* at {1 << 63}"):
            read()


def test_an_entry_that_was_never_completed_says_so() -> None:
    with pytest.raises(CorruptShard, match="never completed"):
        directory.data_start(bytes(100), 20, "x")
    with pytest.raises(CorruptShard, match=r"x: chunk 4: .*never completed"):
        directory.data_starts(bytes(100), np.array([20]), range(4, 5), "x")
    for at in (-1, 71, 200):
        with pytest.raises(CorruptShard):
            directory.data_start(bytes(100), at, "x")
        with pytest.raises(CorruptShard):
            directory.data_starts(bytes(100), np.array([at]), range(1), "x")


def index_of(pairs: list[tuple[int, int]]) -> bytes:
    import google_crc32c

    body = b"".join(struct.pack("<QQ", *pair) for pair in pairs)
    return body + google_crc32c.value(body).to_bytes(4, "little")


def test_absent_chunks_of_the_index_are_marked() -> None:
    absent = ((1 << 64) - 1, (1 << 64) - 1)
    index = directory.parse_index(index_of([(52, 8), absent, (60, 0)]), 3, 60, "x")
    assert index.offset.tolist() == [52, -1, 60]
    assert index.length.tolist() == [8, -1, 0]


@pytest.mark.parametrize("pair", [(61, 0), (52, 9), ((1 << 64) - 1, 0), (0, (1 << 64) - 1), (1 << 63, 1 << 63)])
def test_an_index_that_points_outside_the_shard_is_corrupt(pair: tuple[int, int]) -> None:
    with pytest.raises(CorruptShard, match="chunk 1"):
        directory.parse_index(index_of([(52, 8), pair]), 2, 60, "x")


def test_every_altered_bit_of_the_index_is_noticed() -> None:
    data = shard("zstd")
    block = data[: directory.index_bytes(N_CHUNKS)]
    assert directory.parse_index(block, N_CHUNKS, len(data), "x").length.min() > 0
    for at in range(len(block)):
        altered = block[:at] + bytes([block[at] ^ 0x10]) + block[at + 1 :]
        with pytest.raises(CorruptShard, match="CRC-32C"):
            directory.parse_index(altered, N_CHUNKS, len(data), "x")
    with pytest.raises(CorruptShard, match="116"):
        directory.parse_index(block[:-1], N_CHUNKS, len(data), "x")


def test_offsets_past_four_gigabytes_are_read() -> None:
    name = b"c/0"
    head = struct.pack(
        "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0, 0, 0, 33, 7, *[0xFFFFFFFF] * 2, 3, 28, *[0] * 4, 0xFFFFFFFF
    )
    far = 5 << 40
    entry = head + name + struct.pack("<HHQQQ", 1, 24, 8192, 999, far)
    stride = directory.parse_stride(entry, directory.End(far + 2000, len(entry), 1), 1, "x")
    assert directory.parse_entry(entry, stride, 0, "x") == (0, 7, 999, 8192, far)
    assert directory.parse_entries(entry, stride, 0, 1, "x").header_offset.tolist() == [far]


def test_the_grid_and_the_directory_agree_on_the_order_of_chunks() -> None:
    out = io.BytesIO()
    shape = grid.make_grid([5, 3], [2, 2], 1, 100, "x")
    writer.write_shard(out, bytes(range(15)), [5, 3], [2, 2], 1, "zstd", 5)
    with zipfile.ZipFile(out) as archive:
        assert archive.namelist() == ["c/0/0", "c/0/1", "c/0/2", "c/1/0", "c/1/1", "c/1/2"]
    assert shape.grid_shape == (3, 2)
