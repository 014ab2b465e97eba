"""Descriptors of both versions, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dafmount.daf.descriptor import (
    compact_json,
    flat_json,
    legacy_json,
    minify,
    parse_descriptor,
    parse_version,
)
from dafmount.errors import CorruptDescriptor, DafmountError, UnsupportedFormat

PACKED = (
    b'{"format":"dense","eltype":"Float64","packed_format":"indexed+zipped","chunk_shape":[1024,1],'
    b'"compression":"zstd","compression_level":5,"index_location":"start"}\n'
)
SPARSE = (
    b'{"format":"sparse","colptr":{"format":"dense","eltype":"UInt16","n_elements":9},"rowval":{"format":"dense",'
    b'"eltype":"UInt16","n_elements":20,"packed_format":"zipped","chunk_shape":[8],"compression":"gzip"},'
    b'"nzval":{"format":"dense","eltype":"Float64","n_elements":20}}\n'
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def test_a_packed_descriptor_loses_exactly_its_packing() -> None:
    descriptor = parse_descriptor(PACKED, 2, "x")
    assert flat_json(PACKED, descriptor, "x") == b'{"format":"dense","eltype":"Float64"}\n'


def test_a_sparse_descriptor_is_packed_component_by_component() -> None:
    descriptor = parse_descriptor(SPARSE, 2, "x")
    assert [component.packing is not None for component in descriptor.components] == [False, True, False]
    assert json.loads(flat_json(SPARSE, descriptor, "x"))["rowval"] == {
        "format": "dense",
        "eltype": "UInt16",
        "n_elements": 20,
    }


def test_key_order_and_layout_of_the_json_do_not_matter() -> None:
    spread = json.dumps(dict(reversed(json.loads(SPARSE).items())), indent=3).encode()
    assert parse_descriptor(spread, 2, "x") == parse_descriptor(SPARSE, 2, "x")


def test_flat_descriptors_stay_as_they_are_to_the_byte() -> None:
    raw = b'{ "eltype" : "Int8",\n "format":"dense" }'
    assert flat_json(raw, parse_descriptor(raw, 1, "x"), "x") is raw


def test_layout_1_0_of_a_sparse_descriptor_names_both_types() -> None:
    assert legacy_json(SPARSE, parse_descriptor(SPARSE, 2, "x"), "x") == (
        b'{"format":"sparse","eltype":"Float64","indtype":"UInt16"}\n'
    )


def test_layout_1_0_cannot_say_that_index_types_differ() -> None:
    raw = SPARSE.replace(b'"UInt16"', b'"Int64"', 1)
    with pytest.raises(UnsupportedFormat, match="Int64 and UInt16"):
        legacy_json(raw, parse_descriptor(raw, 2, "x"), "x")


def test_an_all_true_bool_has_no_nzval_and_is_bool_in_layout_1_0() -> None:
    raw = b'{"format":"sparse","nzind":{"format":"dense","eltype":"UInt8","n_elements":3}}'
    descriptor = parse_descriptor(raw, 1, "x")
    assert [component.flat_suffix for component in descriptor.components] == [".nzind"]
    assert legacy_json(raw, descriptor, "x") == b'{"format":"sparse","eltype":"Bool","indtype":"UInt8"}\n'


def test_string_values_of_sparse_properties_are_text() -> None:
    raw = b'{"format":"sparse","eltype":"string","indtype":"Int32"}'
    descriptor = parse_descriptor(raw, 1, "x")
    assert descriptor.is_legacy
    assert [component.flat_suffix for component in descriptor.components] == [".nzind", ".nztxt"]


def test_every_descriptor_of_the_corpus_parses_and_flat_ones_are_unchanged(corpus: Path) -> None:
    n_seen = 0
    for path in corpus.glob("*/**/*.json"):
        parts = path.parts
        if ".zarr" in str(path) or not {"vectors", "matrices"} & set(parts):
            continue
        n_axes = 1 if "vectors" in parts else 2
        raw = path.read_bytes()
        descriptor = parse_descriptor(raw, n_axes, str(path))
        assert b"packed_format" not in flat_json(raw, descriptor, str(path))
        n_seen += 1
    assert n_seen > 200


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[]", "expected a JSON object"),
        (b'{"format":"dense"}', "expected an element type"),
        (b'{"format":"dense","eltype":"Int128"}', "unknown element type"),
        (b'{"format":"round","eltype":"Int8"}', "dense"),
        (b'{"format":"sparse","nzind":7}', "expected an object"),
        (b'{"format":"sparse","nzind":{"eltype":"Int8","n_elements":-1}}', "expected a count"),
        (b'{"format":"sparse","nzind":{"eltype":"Int8","n_elements":true}}', "expected a count"),
        (PACKED, "expected 1 sizes"),
        (PACKED.replace(b"[1024,1]", b"[0]"), "at least 1"),
        (PACKED.replace(b"[1024,1]", b"[9]").replace(b'"zstd"', b"4"), "expected a codec"),
    ],
)
def test_contradictions_are_corrupt_descriptors(raw: bytes, message: str) -> None:
    with pytest.raises(CorruptDescriptor, match=f"^here.*{message}"):
        parse_descriptor(raw, 1, "here")


@pytest.mark.parametrize("key", [b'"indexed+zipped"', b'"start"'])
def test_unknown_packings_are_unsupported(key: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match="future"):
        parse_descriptor(PACKED.replace(key, b'"future"'), 2, "x")


@pytest.mark.parametrize(("raw", "version"), [(b'{"version":[1,1]}\n', (1, 1)), (b'{ "version" : [1, 0] }', (1, 0))])
def test_both_versions_are_read(raw: bytes, version: tuple[int, int]) -> None:
    assert parse_version(raw, "x") == version


@pytest.mark.parametrize("version", ["[2,0]", "[1,2]", "[0,9]"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(UnsupportedFormat, match=r"reads 1\.0 and 1\.1"):
        parse_version(b'{"version":%s}' % version.encode(), "x")


@pytest.mark.parametrize("raw", [b"{}", b'{"version":"1.1"}', b'{"version":[1]}', b'{"version":[true,1]}'])
def test_a_version_that_is_none_is_corrupt(raw: bytes) -> None:
    with pytest.raises(CorruptDescriptor, match="expected a version"):
        parse_version(raw, "x")


@given(json_values, st.integers(0, 4))
def test_minified_json_is_one_line_and_means_the_same(value: object, indent: int) -> None:
    spread = json.dumps(value, indent=indent or None).encode()
    assert json.loads(minify(spread)) == json.loads(spread)
    assert b"\n" not in minify(spread)


def test_minify_keeps_numbers_as_they_were_written() -> None:
    assert minify(b'{"value": 1.0e-300,\n "s": "a  b\\" c"}\n') == b'{"value":1.0e-300,"s":"a  b\\" c"}'


@given(json_values)
def test_any_json_gives_a_descriptor_or_our_error(value: object) -> None:
    raw = json.dumps(value).encode()
    try:
        parse_descriptor(raw, 1, "x")
        parse_version(raw, "x")
    except DafmountError:
        pass


def test_compact_json_keeps_every_character() -> None:
    assert compact_json({"é": "\ud800"}) == '{"é":"'.encode() + b"\xed\xa0\x80" + b'"}\n'
