"""Shards whose directory leaves out the chunks that are absent, and indexes that are missing or wrong."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Collection
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from dafmount.daf.catalog import Component, Packing
from dafmount.errors import CorruptShard
from dafmount.shard.codecs import CODECS
from dafmount.shard.directory import index_bytes
from dafmount.shard.writer import write_shard
from dafmount.source.ahead import Ahead
from dafmount.source.base import ByteSource
from dafmount.source.fetchers import Fetchers
from dafmount.source.local import LocalFile
from dafmount.tree.build import Style, packed_content
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import DECODED
from dafmount.tree.content import Content

N, CHUNK = 1000, 64
N_CHUNKS = -(-N // CHUNK)
VALUES = np.random.default_rng(3).integers(1, 300, N).astype("<u4")
LINES = [b"line %d" % (n % 70) for n in range(N)]
ABSENT = 2**64 - 1

SETS = [{0}, {3}, {N_CHUNKS - 1}, {0, 1, 7}, set(range(N_CHUNKS)), set(range(1, N_CHUNKS))]


def shard_of(compression: str, *, strings: bool = False) -> bytes:
    out = io.BytesIO()
    write_shard(out, LINES if strings else VALUES.tobytes(), [N], [CHUNK], None if strings else 4, compression, 3)
    return out.getvalue()


def without(shard: bytes, absent: Collection[int], *, keeps_codec_json: bool = True) -> bytes:
    """The shard with some chunks called absent by its index, and not in its directory."""
    index = np.frombuffer(shard[: 16 * N_CHUNKS], "<u8").reshape(-1, 2).copy()
    index[list(absent)] = ABSENT
    end = len(shard) - 98
    n_entries, directory_bytes, start = struct.unpack_from("<QQQ", shard, end + 32)
    stride = 46 + sum(struct.unpack_from("<HHH", shard, start + 28))
    entries = [shard[start + stride * k :][:stride] for k in range(N_CHUNKS) if k not in absent]
    if n_entries > N_CHUNKS and keeps_codec_json:
        entries.append(shard[start + stride * N_CHUNKS : start + directory_bytes])
    directory, tail = b"".join(entries), bytearray(shard[end:])
    struct.pack_into("<QQQ", tail, 24, len(entries), len(entries), len(directory))
    struct.pack_into("<Q", tail, 56 + 8, start + len(directory))
    checksum = google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    return index.tobytes() + checksum + shard[index_bytes(N_CHUNKS) : start] + directory + bytes(tail)


def expected_without(absent: Collection[int], *, strings: bool = False) -> bytes:
    if strings:
        return b"".join((b"" if n // CHUNK in absent else line) + b"\n" for n, line in enumerate(LINES))
    values = VALUES.copy()
    values[np.isin(np.arange(N) // CHUNK, list(absent))] = 0
    return values.tobytes()


def open_shard(
    place: Path, shard: bytes, compression: str, *, strings: bool = False, how: str = "indexed+zipped",
    is_far: bool = False,
) -> Content:  # fmt: skip
    place.write_bytes(shard)
    source: ByteSource = LocalFile(place, "shard")
    if is_far:
        source = Ahead(source, Fetchers(1, 1 << 20))
    component = Component("", "String" if strings else "UInt32", None, Packing(how, (CHUNK,), compression, 3))
    return packed_content(source, (N,), component, Style(ChunkCache(1 << 20)), 5)


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("absent", SETS, ids=len)
@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("keeps_codec_json", [True, False])
def test_absent_chunks_are_zeros_or_empty_lines(
    compression: str, absent: set[int], strings: bool, keeps_codec_json: bool, tmp_path: Path
) -> None:
    """Also the only one of a shard whose codec.json makes up for the entry that is missing."""
    shard = without(shard_of(compression, strings=strings), absent, keeps_codec_json=keeps_codec_json)
    expected = expected_without(absent, strings=strings)
    content = open_shard(tmp_path / "shard", shard, compression, strings=strings)
    assert content.size == len(expected)
    assert content.read(0, len(expected)) == expected
    content = open_shard(tmp_path / "shard", shard, compression, strings=strings)
    for at in (0, 255, 256, 257, 700, len(expected) - 5):
        assert content.read(at, 5) == expected[at : at + 5]


@pytest.mark.parametrize("compression", ["zstd", "gzip", "blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle"])
@pytest.mark.parametrize("absent", SETS, ids=len)
def test_the_size_of_strings_is_known_without_decoding_where_chunks_are_absent(
    compression: str, absent: set[int], tmp_path: Path
) -> None:
    shard = without(shard_of(compression, strings=True), absent)
    content = open_shard(tmp_path / "shard", shard, compression, strings=True)
    before = DECODED.n_chunks
    assert content.size == len(expected_without(absent, strings=True))
    assert DECODED.n_chunks == before


@pytest.mark.parametrize("compression", CODECS)
def test_damage_beside_absent_chunks_is_found(compression: str, tmp_path: Path) -> None:
    shard = bytearray(without(shard_of(compression), {0}))
    offset, length = struct.unpack_from("<QQ", shard, 16 * 2)
    shard[offset + length // 2] ^= 1
    content = open_shard(tmp_path / "shard", bytes(shard), compression)
    with pytest.raises(CorruptShard, match="chunk 2"):
        content.read(2 * CHUNK * 4, 10)
    assert content.read(3 * CHUNK * 4, 10) == VALUES.tobytes()[3 * CHUNK * 4 :][:10]


@pytest.mark.parametrize("compression", ["zstd", "gzip", "blosc_zstd_bitshuffle"])
@pytest.mark.parametrize("n_listed", [0, 1, N_CHUNKS - 1])
def test_an_end_record_that_hides_chunks_is_found_out(compression: str, n_listed: int, tmp_path: Path) -> None:
    shard = bytearray(shard_of(compression))
    struct.pack_into("<QQ", shard, len(shard) - 98 + 24, n_listed, n_listed)
    content = open_shard(tmp_path / "shard", bytes(shard), compression)
    with pytest.raises(CorruptShard, match="directory"):
        content.read(0, 10)


@pytest.mark.parametrize("strings", [False, True])
def test_an_index_of_absent_chunks_must_be_whole(strings: bool, tmp_path: Path) -> None:
    shard = without(shard_of("zstd", strings=strings), {5})
    for at in (3, 16 * 5, 16 * N_CHUNKS):
        damaged = bytearray(shard)
        damaged[at] ^= 1
        with pytest.raises(CorruptShard, match="CRC-32C"):
            open_shard(tmp_path / "shard", bytes(damaged), "zstd", strings=strings).read(0, 1)


def cut(shard: bytes, start: int, n_bytes: int) -> bytes:
    """The shard without some bytes in front of its first local header, all offsets as they are then."""
    end = len(shard) - 98 - n_bytes
    cut_out = bytearray(shard[:start] + shard[start + n_bytes :])
    n_entries, _, at = struct.unpack_from("<QQQ", cut_out, end + 32)
    places = [end + 48, end + 56 + 8, *range(0, start if start == 16 * N_CHUNKS else 0, 16)]
    at -= n_bytes
    for _ in range(n_entries):
        name, extra, comment = struct.unpack_from("<HHH", cut_out, at + 28)
        places.append(at + 46 + name + 4 + 16)
        at += 46 + name + extra + comment
    for place in places:
        struct.pack_into("<Q", cut_out, place, struct.unpack_from("<Q", cut_out, place)[0] - n_bytes)
    return bytes(cut_out)


def wrong(shard: bytes) -> bytes:
    return shard[: 16 * N_CHUNKS] + bytes(4) + shard[16 * N_CHUNKS + 4 :]


@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("damage", [wrong, lambda shard: cut(shard, 16 * N_CHUNKS, 4)], ids=["wrong", "none"])
def test_a_missing_or_wrong_checksum_of_the_index_does_not_matter(
    compression: str, damage: Callable[[bytes], bytes], is_far: bool, tmp_path: Path
) -> None:
    """Where all chunks are there the directory tells where they are, and has a checksum of each."""
    shard = damage(shard_of(compression))
    content = open_shard(tmp_path / "shard", shard, compression, is_far=is_far)
    assert content.read(0, N * 4) == VALUES.tobytes()
    content.close()


@pytest.mark.parametrize("compression", CODECS)
def test_a_zipped_shard_needs_no_index(compression: str, tmp_path: Path) -> None:
    """Neither index nor checksum: the first local header is the first byte."""
    shard = cut(shard_of(compression), 0, index_bytes(N_CHUNKS))
    assert shard.startswith(b"PK\3\4")
    content = open_shard(tmp_path / "shard", shard, compression, how="zipped")
    assert content.read(0, N * 4) == VALUES.tobytes()
