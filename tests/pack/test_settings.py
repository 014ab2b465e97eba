"""Which components are packed, and how large their chunks are."""

from __future__ import annotations

import pytest

from dafmount.errors import UsageError
from dafmount.pack.settings import Selection, make_settings


@pytest.mark.parametrize(
    ("shape", "itemsize", "target_kb", "expected"),
    [
        ((1023,), 8, 8, None),
        ((1024,), 8, 8, (1024,)),
        ((5000,), 8, 39, (4992,)),
        ((511,), None, 8, None),
        ((1200,), None, 8, (512,)),
        ((1023, 10**6), 8, 8, None),  # many short columns
        ((1024, 1), 8, 8, (1024, 1)),
        ((5000, 700), 4, 8, (2048, 1)),
        ((600, 3), None, 8, (512, 1)),
        ((0,), 8, 8, None),
        ((5000, 0), 8, 8, None),
        ((700,), 8, 4, (512,)),
        ((10**12,), 1, 8, (8192,)),
    ],
)
def test_chunks_have_the_target_size_and_smaller_columns_stay_flat(
    shape: tuple[int, ...], itemsize: int | None, target_kb: int, expected: tuple[int, ...] | None
) -> None:
    assert make_settings({}, target_kb).chunk_shape(shape, itemsize) == expected


def test_the_environment_counts_where_nothing_is_given() -> None:
    environment = {
        "DAF_PACKED_TARGET_CHUNK_KB": "16",
        "DAF_PACKED_COMPRESSION": "zstd",
        "DAF_PACKED_COMPRESSION_LEVEL": "19",
    }
    settings = make_settings(environment)
    assert (settings.target_chunk_bytes, settings.compression, settings.level) == (16384, "zstd", 19)
    settings = make_settings(environment, 32, "gzip", 1)
    assert (settings.target_chunk_bytes, settings.compression, settings.level) == (32768, "gzip", 1)
    settings = make_settings({"DAF_PACKED_COMPRESSION": ""})
    assert (settings.target_chunk_bytes, settings.compression, settings.level) == (8192, "blosc_zstd_bitshuffle", 5)


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "gzip", "gzip_shuffle"])
@pytest.mark.parametrize("level", [-1, 0, 10])
def test_a_level_out_of_range_is_refused(compression: str, level: int) -> None:
    with pytest.raises(UsageError, match=f"level {level}, expected 1 to 9"):
        make_settings({}, None, compression, level)


@pytest.mark.parametrize("level", [0, 23])
def test_zstd_has_more_levels(level: int) -> None:
    assert make_settings({}, None, "zstd", 22).level == 22
    with pytest.raises(UsageError, match="expected 1 to 22"):
        make_settings({}, None, "zstd_bitshuffle", level)


def test_an_unknown_codec_is_told_which_are_known() -> None:
    with pytest.raises(UsageError, match=r"'lzma'.*blosc_zstd_bitshuffle.*blosc_lz4_bitshuffle.*zstd.*gzip_shuffle"):
        make_settings({"DAF_PACKED_COMPRESSION": "lzma"})


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²"])
def test_a_variable_that_is_no_number_is_named(value: str) -> None:
    with pytest.raises(UsageError, match="DAF_PACKED_TARGET_CHUNK_KB"):
        make_settings({"DAF_PACKED_TARGET_CHUNK_KB": value})


@pytest.mark.parametrize("target_kb", [0, -8, 1 << 20])
def test_a_target_out_of_range_is_refused(target_kb: int) -> None:
    with pytest.raises(UsageError, match="expected 1 to"):
        make_settings({}, target_kb)


def test_patterns_select_properties() -> None:
    selection = Selection(("vectors/cell/*", "matrices/*/UMIs"), ("*/secret*",))
    assert selection.holds("vectors/cell/age")
    assert selection.holds("matrices/cell/gene/UMIs")
    assert not selection.holds("vectors/cell/secret_age")
    assert not selection.holds("vectors/gene/age")
    assert Selection().holds("scalars/x")
    with pytest.raises(UsageError, match="'matrices"):
        selection.check_used(["vectors/cell/age", "vectors/cell/secret"])
