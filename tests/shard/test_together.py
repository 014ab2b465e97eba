"""Many chunks decoded by one call: what libblosc2 and zstandard say of each alone, whatever was done to one of them."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numcodecs
import numpy as np
import pytest
import zstandard

from dafmount.errors import CorruptShard, UnsupportedFormat
from dafmount.shard import blosc, codecs, together
from dafmount.shard.directory import Chunks

N_CHUNKS, N_ITEMS = 7, 512
RAWS = [np.random.default_rng(n).poisson(2, N_ITEMS).astype("<i4").tobytes() for n in range(N_CHUNKS)]
SIZE = len(RAWS[0])
GAP = b"\xff" * 33
"""As a local header before each chunk."""

FLAT = range(0, N_CHUNKS * SIZE, SIZE)
PADDED = [n * (SIZE - 100) for n in range(N_CHUNKS)]
"""Places where each covers the last 100 bytes of the one before it."""


def laid_out(payloads: Sequence[bytes], compression: str, raws: Sequence[bytes] = RAWS) -> tuple[bytes, Chunks]:
    """Stored chunks one behind the other, and what a directory says of them."""
    method = codecs.find_codec(compression).zip_method
    of_stored = method == codecs.METHOD_STORED
    data, starts = b"", []
    for payload in payloads:
        data += GAP
        starts.append(len(data))
        data += payload
    return data, Chunks(
        np.full(len(payloads), method, np.uint16),
        np.array([zlib.crc32(p if of_stored else raw) for p, raw in zip(payloads, raws, strict=True)], np.uint32),
        np.array([len(payload) for payload in payloads]),
        np.array([len(p if of_stored else raw) for p, raw in zip(payloads, raws, strict=True)]),
        np.array(starts),
        0,
    )


def decoded(data: bytes, chunks: Chunks, compression: str, places: Sequence[int], *, verify: bool = True) -> bytes:
    out = bytearray(max(places) + SIZE)
    decoder = codecs.make_decoder(compression, 4, None, verify, "x")
    decoder.decode_run(data, chunks.header_offset, chunks, out, places, SIZE, lambda n: f"chunk {n}")
    return bytes(out)


def expected(places: Sequence[int]) -> bytes:
    out = bytearray(max(places) + SIZE)
    for place, raw in zip(places, RAWS, strict=True):
        out[place : place + SIZE] = raw
    return bytes(out)


def streams(data: bytes, chunks: Chunks, compression: str) -> together.Streams | None:
    decoder = codecs.make_decoder(compression, 4, None, True, "x")
    return decoder.prepare(data, chunks.header_offset, chunks, SIZE).streams


def payloads_of(compression: str) -> list[bytes]:
    """As other programs write them."""
    values = [np.frombuffer(raw, "<i4") for raw in RAWS]
    if compression == "blosc_zstd_bitshuffle":
        return [bytes(numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE).encode(each)) for each in values]
    if compression == "blosc_lz4_bitshuffle":
        return [bytes(numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE).encode(each)) for each in values]
    if compression == "zstd":
        return [zstandard.compress(raw) for raw in RAWS]
    return [codecs.encode_chunk(compression, 5, 4, raw)[0] for raw in RAWS]


TOGETHER = ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "zstd_bitshuffle"]
library_only = pytest.mark.skipif(blosc.library() is None, reason="libblosc2 cannot be loaded")


@pytest.mark.parametrize("places", [FLAT, PADDED], ids=["flat", "padded"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_a_run_is_its_chunks(compression: str, verify: bool, places: Sequence[int]) -> None:
    data, chunks = laid_out(payloads_of(compression), compression)
    assert decoded(data, chunks, compression, places, verify=verify) == expected(places)


@library_only
@pytest.mark.parametrize("compression", TOGETHER)
def test_one_call_decodes_any_part_of_a_run(compression: str) -> None:
    data, chunks = laid_out(payloads_of(compression), compression)
    found = streams(data, chunks, compression)
    assert found is not None
    for begin in range(N_CHUNKS):
        for end in range(begin + 1, N_CHUNKS + 1):
            out = bytearray(SIZE * (end - begin))
            assert found.decode(data, begin, end, memoryview(out), SIZE)
            assert out == b"".join(RAWS[begin:end])
    assert not found.decode(data, 0, N_CHUNKS, memoryview(bytearray(SIZE * N_CHUNKS - 1)), SIZE)


@pytest.mark.parametrize("odd", ["copied", "unshuffled", "typesize", "blocks", "lz4", "empty"])
def test_a_run_of_several_kinds_is_decoded_one_by_one(odd: str) -> None:
    raws, payloads = list(RAWS), payloads_of("blosc_zstd_bitshuffle")
    values = np.frombuffer(RAWS[3], "<i4")
    made = {
        "copied": numcodecs.Blosc("zstd", 0, numcodecs.Blosc.BITSHUFFLE),
        "unshuffled": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.NOSHUFFLE),
        "typesize": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE, typesize=2),
        "blocks": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE, blocksize=256),
        "lz4": numcodecs.Blosc("lz4", 5, numcodecs.Blosc.BITSHUFFLE),
        "empty": numcodecs.Blosc("zstd", 5, numcodecs.Blosc.BITSHUFFLE),
    }
    payloads[3] = bytes(made[odd].encode(values if odd != "empty" else np.empty(0, "<i4")))
    data, chunks = laid_out(payloads, "blosc_zstd_bitshuffle", raws)
    assert streams(data, chunks, "blosc_zstd_bitshuffle") is None
    if odd == "empty":
        with pytest.raises(CorruptShard, match=r"chunk 3: .* 0 bytes"):
            decoded(data, chunks, "blosc_zstd_bitshuffle", FLAT)
    else:
        assert decoded(data, chunks, "blosc_zstd_bitshuffle", FLAT) == expected(FLAT)


def test_zstd_frames_as_long_as_their_chunk_are_not_taken_for_copies() -> None:
    """Blosc would hand out the frame's own bytes."""
    noise, compressor = np.random.default_rng(1).bytes(SIZE), zstandard.ZstdCompressor(level=22, write_checksum=True)
    frames = [compressor.compress(noise[:n] + bytes(SIZE - n)) for n in range(SIZE - 60, SIZE)]
    frame = next(frame for frame in frames if len(frame) == SIZE)
    whole = zstandard.decompress(frame)
    data, chunks = laid_out([frame] * N_CHUNKS, "zstd", [whole] * N_CHUNKS)
    assert streams(data, chunks, "zstd") is None
    assert decoded(data, chunks, "zstd", FLAT) == whole * N_CHUNKS


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_every_altered_byte_of_a_run_is_an_error_that_names_its_chunk(compression: str) -> None:
    payloads = payloads_of(compression)
    data, chunks = laid_out(payloads, compression)
    start = int(chunks.header_offset[4])
    for at in range(start, start + len(payloads[4]), 3):
        altered = data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :]
        with pytest.raises(CorruptShard, match=r"^chunk 4: "):
            decoded(altered, chunks, compression, FLAT)


@pytest.mark.parametrize("compression", TOGETHER)
def test_unchecked_damage_never_reaches_beyond_its_chunk(compression: str) -> None:
    """Without CRC-32 the library is all that stands between damage and the reader."""
    payloads = payloads_of(compression)
    data, chunks = laid_out(payloads, compression)
    start = int(chunks.header_offset[4])
    said = []
    for at in range(start, start + min(80, len(payloads[4]))):
        for bit in range(8):
            altered = data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]
            try:
                raw = decoded(altered, chunks, compression, FLAT, verify=False)
            except (CorruptShard, UnsupportedFormat) as error:
                said.append(str(error))
            else:
                assert raw[: 4 * SIZE] == expected(FLAT)[: 4 * SIZE]
                assert raw[5 * SIZE :] == expected(FLAT)[5 * SIZE :]
    assert said
    assert all(error.startswith("chunk 4: ") for error in said)


@pytest.mark.parametrize("stream", range(4))
def test_a_stream_that_reaches_into_the_next_chunk_is_an_error(stream: int) -> None:
    """Of a chunk that has a stream for each byte of an item; its CRC-32 is right, whoever wrote it was wrong."""
    payloads = payloads_of("blosc_lz4_bitshuffle")
    damaged = bytearray(payloads[4])
    assert not damaged[2] & 0x10
    at = 20
    for _ in range(stream):
        at += 4 + int.from_bytes(damaged[at : at + 4], "little")
    damaged[at : at + 4] = (SIZE // 4).to_bytes(4, "little")  # a copy
    payloads[4] = bytes(damaged)
    data, chunks = laid_out(payloads, "blosc_lz4_bitshuffle")
    for verify in (True, False):
        with pytest.raises(CorruptShard, match=r"^chunk 4: "):
            decoded(data, chunks, "blosc_lz4_bitshuffle", FLAT, verify=verify)


def test_frames_within_others_are_decoded_one_by_one() -> None:
    """The length before one would be written over the bytes of another."""
    inner = codecs.encode_chunk("zstd_bitshuffle", 5, 4, RAWS[1])[0]
    skipped = b"\x50\x2a\x4d\x18" + (len(inner) + 40).to_bytes(4, "little") + bytes(40) + inner
    outer = codecs.encode_chunk("zstd_bitshuffle", 5, 4, RAWS[0])[0] + skipped
    data, chunks = laid_out([outer, inner], "zstd_bitshuffle", RAWS[:2])
    inside = chunks._replace(header_offset=np.array([len(GAP), len(GAP) + len(outer) - len(inner)]))
    assert streams(data, chunks, "zstd_bitshuffle") is not None
    assert streams(data, inside, "zstd_bitshuffle") is None
