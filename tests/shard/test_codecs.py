"""Chunks against the libraries that define their codecs, and what damage does to them."""

from __future__ import annotations

import gzip
import json
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress

import numcodecs
import numpy as np
import pytest
import zstandard

from dafmount.errors import Corrupt, CorruptShard, UnsupportedFormat
from dafmount.shard import blosc, codecs
from dafmount.shard.directory import Chunks

RAW = np.random.default_rng(3).poisson(2, 1024).astype("<i8").tobytes()
LIMIT = 1 << 20
BLOSC = ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle"]


def decode(
    compression: str, payload: bytes, crc: int, stated: int, expected: int | None = len(RAW), *, verify: bool = True
) -> bytes:
    decoder = codecs.make_decoder(compression, 8, None, verify, "shard")
    method = decoder.zip_method
    raw = decoder.decode(payload, method, crc, stated, expected, LIMIT, lambda: "chunk 7")
    if expected is not None:
        out = bytearray(b"\xaa" * (expected + 20))
        decoder.decode_into(memoryview(payload), out, 10, method, crc, stated, expected, "chunk 7")
        assert out == b"\xaa" * 10 + raw + b"\xaa" * 10
        assert run_of_one(decoder, payload, method, crc, stated, expected) == raw
    return bytes(raw)


def run_of_one(decoder: codecs.Decoder, payload: bytes, method: int, crc: int, stated: int, expected: int) -> bytes:
    chunks = Chunks(
        np.array([method], np.uint16),
        np.array([crc], np.uint32),
        np.array([len(payload)], np.int64),
        np.array([stated], np.int64),
        np.array([0], np.int64),
        30,
    )
    out = bytearray(expected)
    decoder.decode_run(payload, np.array([0]), chunks, out, [0], expected, lambda i: f"chunk {i}")
    return bytes(out)


@pytest.fixture(params=["ctypes", "package"])
def either_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way through ctypes, and the one where that is not to be had."""
    if request.param == "package":
        monkeypatch.setattr(blosc, "library", lambda: None)
    return str(request.param)


@pytest.mark.parametrize("compression", list(codecs.CODECS))
@pytest.mark.parametrize("itemsize", [None, 1, 2, 8])
@pytest.mark.parametrize("raw", [b"", b"\1", RAW[:100], RAW, bytes(8192), RAW * 70 + b"abc"], ids=len)
def test_what_is_encoded_is_decoded(compression: str, itemsize: int | None, raw: bytes) -> None:
    payload, crc, stated = codecs.encode_chunk(compression, 5, itemsize, raw)
    decoder = codecs.make_decoder(compression, itemsize, None, True, "x")
    for expected in (len(raw), None):
        assert decoder.decode(payload, decoder.zip_method, crc, stated, expected, LIMIT, "x") == raw
    size = decoder.raw_size(payload[:16], len(payload), stated, "x")
    assert size == (None if compression.endswith("_shuffle") or compression == "zstd_bitshuffle" else len(raw))


@pytest.mark.parametrize("cname", ["zstd", "lz4", "lz4hc", "zlib", "blosclz"])
@pytest.mark.parametrize("how", [numcodecs.Blosc.NOSHUFFLE, numcodecs.Blosc.SHUFFLE, numcodecs.Blosc.BITSHUFFLE])
@pytest.mark.parametrize("blocksize", [0, 512, 3000])
@pytest.mark.usefixtures("either_library")
def test_any_blosc_buffer_that_numcodecs_writes_is_read(cname: str, how: int, blocksize: int) -> None:
    for values in (
        np.frombuffer(RAW, "<i8"),
        np.frombuffer(RAW, "u1"),
        np.frombuffer(np.random.default_rng(1).bytes(8192), "<i4"),
    ):
        payload = bytes(numcodecs.Blosc(cname, 5, how, blocksize).encode(values))
        assert decode("blosc_zstd_bitshuffle", payload, zlib.crc32(payload), len(payload)) == values.tobytes()


@pytest.mark.parametrize("how", [numcodecs.Blosc.NOSHUFFLE, numcodecs.Blosc.SHUFFLE, numcodecs.Blosc.BITSHUFFLE])
@pytest.mark.parametrize("typesize", [1, 2, 3, 8, 16, 17, 255])
@pytest.mark.parametrize("cname", ["zstd", "lz4"])
@pytest.mark.usefixtures("either_library")
def test_a_chunk_that_is_no_whole_number_of_items_is_read(cname: str, how: int, typesize: int) -> None:
    """As strings are; libblosc2 leaves what follows the last item of a bit-shuffled block unwritten."""
    for n in (128, 129, 200, 1003, 4125, 8192):
        for blocksize in (0, 1000):
            payload = bytes(numcodecs.Blosc(cname, 5, how, blocksize, typesize=typesize).encode(RAW[:n]))
            assert decode("blosc_zstd_bitshuffle", payload, zlib.crc32(payload), len(payload), n) == RAW[:n]


@pytest.mark.parametrize("compression", BLOSC)
@pytest.mark.parametrize("level", range(1, 10))
@pytest.mark.parametrize("typesize", [1, 2, 4, 8])
def test_numcodecs_reads_and_would_have_written_our_blosc(compression: str, level: int, typesize: int) -> None:
    payload, _, _ = codecs.encode_chunk(compression, level, typesize, RAW)
    assert numcodecs.Blosc().decode(payload) == RAW
    cname = "zstd" if "zstd" in compression else "lz4"
    theirs = bytes(numcodecs.Blosc(cname, level, numcodecs.Blosc.BITSHUFFLE).encode(np.frombuffer(RAW, f"u{typesize}")))
    assert payload[:4] == theirs[:4]


@pytest.mark.parametrize("compression", BLOSC)
@pytest.mark.parametrize(
    "raw", [b"abc", bytes(127), bytes(128), RAW * 70 + b"abc", np.random.default_rng(1).bytes(9999)]
)
def test_numcodecs_reads_our_blosc_of_any_size(compression: str, raw: bytes) -> None:
    for typesize in (1, 8):
        payload, _, _ = codecs.encode_chunk(compression, 5, typesize, raw)
        assert bytes(numcodecs.Blosc().decode(payload)) == raw


@pytest.mark.parametrize("cname", ["zstd", "lz4"])
@pytest.mark.parametrize("blocksize", [0, 1024])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.usefixtures("either_library")
def test_every_altered_byte_of_a_blosc_header_is_an_error_or_changes_nothing(
    cname: str, blocksize: int, verify: bool
) -> None:
    payload = bytes(numcodecs.Blosc(cname, 5, numcodecs.Blosc.BITSHUFFLE, blocksize).encode(np.frombuffer(RAW, "<i8")))
    n_errors = 0
    for at in range(16 + 4 * 8 + 4):
        for value in {0, 1, 2, 0x7F, 0x80, 0xFF, *(payload[at] ^ (1 << bit) for bit in range(8))} - {payload[at]}:
            altered = payload[:at] + bytes([value]) + payload[at + 1 :]
            crc = zlib.crc32(payload) if verify else 0
            try:
                raw = decode("blosc_zstd_bitshuffle", altered, crc, len(payload), verify=verify)
            except (CorruptShard, UnsupportedFormat):
                n_errors += 1
            else:
                assert not verify
                assert len(raw) == len(RAW)
    assert n_errors > 100


@pytest.mark.parametrize("cname", ["zstd", "lz4"])
@pytest.mark.parametrize("blocksize", [0, 1024])
@pytest.mark.parametrize("how", [numcodecs.Blosc.NOSHUFFLE, numcodecs.Blosc.SHUFFLE, numcodecs.Blosc.BITSHUFFLE])
def test_the_short_way_takes_just_what_passes_all_checks_of_many(cname: str, blocksize: int, how: int) -> None:
    payload = bytes(numcodecs.Blosc(cname, 5, how, blocksize).encode(np.frombuffer(RAW, "<i8")))
    altered = [payload]
    for at in range(24):
        altered += [payload[:at] + bytes([payload[at] ^ (1 << bit)]) + payload[at + 1 :] for bit in range(8)]
    n_taken = 0
    for buffer in altered:
        start, stored = np.array([0], np.int64), np.array([len(buffer)], np.int64)
        simple = bool(blosc.simple_chunks(np.frombuffer(buffer, np.uint8), start, stored, len(RAW))[0])
        raw = blosc.decode_simple(buffer, len(RAW))
        assert raw is None or simple
        n_taken += raw is not None
        if buffer is payload:
            assert (raw is not None) is simple
            assert raw is None or raw == RAW
    assert n_taken > 0 or blocksize != 0


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_every_altered_or_missing_byte_of_a_payload_is_an_error(compression: str) -> None:
    payload, crc, stated = codecs.encode_chunk(compression, 5, 8, RAW[:800])
    for at in range(len(payload)):
        altered = payload[:at] + bytes([payload[at] ^ 0x41]) + payload[at + 1 :]
        with pytest.raises(Corrupt):
            decode(compression, altered, crc, stated, 800)
        with pytest.raises(Corrupt):
            decode(compression, payload[:at], crc, stated, 800)
    with pytest.raises(Corrupt):
        decode(compression, payload + b"\0", crc, stated, 800)


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_altered_payloads_do_no_harm_without_verification(compression: str) -> None:
    payload, _, stated = codecs.encode_chunk(compression, 5, 8, RAW[:800])
    for at in range(len(payload)):
        altered = payload[:at] + bytes([payload[at] ^ 0x41]) + payload[at + 1 :]
        with suppress(CorruptShard, UnsupportedFormat):
            assert len(decode(compression, altered, 0, stated, 800, verify=False)) == 800


def test_a_frame_that_does_not_state_its_size_is_read() -> None:
    payload = zstandard.ZstdCompressor(write_content_size=False).compress(RAW)
    assert decode("zstd", payload, zlib.crc32(RAW), len(RAW)) == RAW
    for wrong in (len(RAW) - 1, len(RAW) + 1):
        with pytest.raises(CorruptShard):
            decode("zstd", payload, 0, wrong, wrong, verify=False)


def too_long() -> Iterator[tuple[str, bytes]]:
    """Chunks that decode to more than they should, each a few bytes long."""
    many = bytes(1 << 26)
    yield "zstd", zstandard.ZstdCompressor().compress(many)
    yield "zstd", zstandard.ZstdCompressor(write_content_size=False).compress(many)
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    yield "gzip", stream.compress(many) + stream.flush()
    yield "gzip_shuffle", gzip.compress(many)
    yield "zstd_bitshuffle", zstandard.ZstdCompressor().compress(many)
    yield "blosc_lz4_bitshuffle", bytes(numcodecs.Blosc("lz4", 5).encode(many))


@pytest.mark.parametrize(("compression", "payload"), list(too_long()))
@pytest.mark.parametrize("expected", [len(RAW), None])
def test_a_chunk_that_would_take_too_much_is_refused(compression: str, payload: bytes, expected: int | None) -> None:
    stated = len(RAW) if compression in ("zstd", "gzip") else len(payload)
    with pytest.raises(CorruptShard, match="chunk 7"):
        decode(compression, payload, 0, stated, expected, verify=False)


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_what_the_directory_states_must_be_true(compression: str) -> None:
    payload, crc, stated = codecs.encode_chunk(compression, 5, 8, RAW)
    decoder = codecs.make_decoder(compression, 8, None, True, "x")
    for method in {0, 8, 93, 99} - {decoder.zip_method}:
        with pytest.raises(CorruptShard, match=f"ZIP method {method}, expected {decoder.zip_method}"):
            decoder.decode(payload, method, crc, stated, len(RAW), LIMIT, "x")
    with pytest.raises(CorruptShard, match=rf"states .*expected {stated}"):
        decoder.decode(payload, decoder.zip_method, crc, stated + 1, len(RAW), LIMIT, "x")
    with pytest.raises(CorruptShard, match="CRC-32"):
        decoder.decode(payload, decoder.zip_method, crc ^ 1, stated, len(RAW), LIMIT, "x")
    with pytest.raises(CorruptShard):
        decoder.decode(payload, decoder.zip_method, crc, stated, len(RAW) + 8, LIMIT, "x")


def test_chunks_outside_what_was_given_are_never_touched() -> None:
    payload, crc, stated = codecs.encode_chunk("blosc_zstd_bitshuffle", 5, 8, RAW)
    decoder = codecs.make_decoder("blosc_zstd_bitshuffle", 8, None, True, "x")
    row = Chunks(
        np.array([0], np.uint16), np.array([crc], np.uint32), np.array([stated]), np.array([stated]), np.array([0]), 30
    )
    for start, place in ((1, 0), (-1, 0), (0, 1), (0, -1)):
        with pytest.raises(ValueError, match=r"not within|do not fit"):
            decoder.decode_run(payload, np.array([start]), row, bytearray(len(RAW)), [place], len(RAW), str)
    with pytest.raises(ValueError, match="do not fit"):
        decoder.decode_into(payload, bytearray(len(RAW)), 1, 0, crc, stated, len(RAW), "x")


def with_list(*entries: object) -> bytes:
    return json.dumps(entries).encode()


def test_codec_json_is_followed_for_the_shuffle_variants() -> None:
    """A pipeline of other origin: other item size, other compressor, no filter."""
    shuffled = bytes(numcodecs.Shuffle(4).encode(RAW))
    four: dict[str, object] = {"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}}
    cases = [
        (with_list({"name": "bytes"}, four, {"name": "zstd"}), zstandard.compress(shuffled)),
        (with_list("bytes", four, "gzip"), gzip.compress(shuffled)),
        (with_list("bytes", four, "blosc"), bytes(numcodecs.Blosc("lz4").encode(shuffled))),
        (with_list("bytes", four), shuffled),
        (with_list("bytes"), RAW),
    ]
    for text, payload in cases:
        decoder = codecs.make_decoder("gzip_shuffle", 8, text, True, "x")
        crc = zlib.crc32(payload)
        assert decoder.decode(payload, 0, crc, len(payload), len(RAW), LIMIT, "x") == RAW


@pytest.mark.parametrize("compression", ["zstd_bitshuffle", "gzip_shuffle"])
def test_our_own_codec_json_says_what_we_do(compression: str) -> None:
    payload, crc, stated = codecs.encode_chunk(compression, 5, 8, RAW)
    text = codecs.codec_json_text(compression, 5, 8)
    decoder = codecs.make_decoder(compression, 8, text, True, "x")
    assert decoder.decode(payload, 0, crc, stated, len(RAW), LIMIT, "x") == RAW


@pytest.mark.parametrize(
    ("text", "error", "found"),
    [
        (with_list("bytes", "lzma"), UnsupportedFormat, "lzma"),
        (with_list({"name": "bytes", "configuration": {"endian": "big"}}), UnsupportedFormat, "big"),
        (with_list("bytes", {"name": "bitshuffle"}), UnsupportedFormat, "elementsize None"),
        (with_list("bytes", "gzip", "zstd"), UnsupportedFormat, "several"),
        (with_list("vlen-utf8", "gzip"), CorruptShard, "vlen-utf8"),
        (with_list(7), CorruptShard, "7"),
        (b"{}", CorruptShard, "list"),
        (b"\xff", CorruptShard, "no JSON"),
        (b"[" * 60000, CorruptShard, "no JSON"),
    ],
)
def test_a_codec_json_that_cannot_be_followed_is_refused(text: bytes, error: type[Exception], found: str) -> None:
    with pytest.raises(error, match=found):
        codecs.make_decoder("gzip_shuffle", 8, text, True, "x")


def test_codec_json_is_not_believed_for_blosc_and_strings() -> None:
    for compression, itemsize in (("blosc_zstd_bitshuffle", 8), ("gzip_shuffle", None)):
        assert not codecs.needs_codec_json(compression, itemsize)
        codecs.make_decoder(compression, itemsize, b"nonsense", True, "x")
    assert codecs.needs_codec_json("gzip_shuffle", 8)


@pytest.mark.parametrize("compression", ["snappy", "", "ZSTD"])
def test_an_unknown_compression_is_refused_with_a_list_of_the_known(compression: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"blosc_zstd_bitshuffle, blosc_lz4_bitshuffle, .*gzip_shuffle"):
        codecs.make_decoder(compression, 8, None, True, "x")


@pytest.mark.parametrize("compression", list(codecs.CODECS))
def test_threads_share_a_decoder(compression: str) -> None:
    decoder = codecs.make_decoder(compression, 8, None, True, "x")
    raws = [np.random.default_rng(k).poisson(2, 1024).astype("<i8").tobytes() for k in range(8)]
    encoded = [codecs.encode_chunk(compression, 5, 8, raw) for raw in raws]
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(50):
            payload, crc, stated = encoded[k]
            raw = decoder.decode(payload, decoder.zip_method, crc, stated, 8192, 8192, "x")
            if raw != raws[k] or codecs.encode_chunk(compression, 5, 8, raws[k]) != encoded[k]:
                wrong.append(k)

    run_all([lambda k=k: work(k) for k in range(8)])
    assert not wrong


def run_all(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_library_is_called_through_ctypes_here() -> None:
    """Else the tests of that way prove nothing."""
    assert blosc.library() is not None


@pytest.mark.parametrize("compression", list(codecs.CODECS))
@pytest.mark.parametrize(("n_bytes", "itemsize"), [(8192, 4), (8192, 1), (8196, 4), (80, 8), (1 << 20, 8), (24, None)])
def test_many_chunks_are_encoded_as_each_alone(compression: str, n_bytes: int, itemsize: int | None) -> None:
    numbers = np.random.default_rng(5)
    raws = [bytes(n_bytes), numbers.bytes(n_bytes), numbers.integers(0, 5, n_bytes, np.uint8).tobytes()] * 2
    alone = [codecs.encode_chunk(compression, 5, itemsize, raw) for raw in raws]
    assert codecs.encode_chunks(compression, 5, itemsize, raws) == alone
    mixed = [*raws, b"short", b""]
    alone = [codecs.encode_chunk(compression, 5, itemsize, raw) for raw in mixed]
    assert codecs.encode_chunks(compression, 5, itemsize, mixed) == alone
    assert codecs.encode_chunks(compression, 5, itemsize, []) == []
