"""vlen-utf8 chunks against numcodecs' encoder, and what is not one."""

from __future__ import annotations

import numcodecs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.errors import CorruptShard
from dafmount.shard.strings import decode_strings, encode_strings, text_bytes

texts = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=20) | st.just("x" * 300)
printable = st.text("ABCde", min_size=1, max_size=12)


def theirs(values: list[str]) -> bytes:
    return bytes(numcodecs.VLenUTF8().encode(np.array(values, dtype=object)))


@settings(max_examples=100, deadline=None)
@given(values=st.lists(texts, max_size=12) | st.lists(printable, max_size=40), padding=st.integers(0, 5))
def test_lines_are_what_numcodecs_encoded(values: list[str], padding: int) -> None:
    raw = theirs(values + [""] * padding)
    count = len(values) + padding
    lines = [value.encode() for value in values]
    expected = b"".join(line + b"\n" for line in lines)
    assert encode_strings(lines, count) == raw
    assert decode_strings(raw, count, len(values), "x") == expected
    assert text_bytes(len(raw), count, len(values), "x") == len(expected)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(printable, min_size=1, max_size=6), data=st.data())
def test_an_altered_byte_is_an_error_or_text_of_the_same_size(values: list[str], data: st.DataObject) -> None:
    raw = bytearray(theirs([*values, ""]))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        text = decode_strings(raw, len(values) + 1, len(values), "x")
    except CorruptShard:
        return
    assert len(text) == text_bytes(len(raw), len(values) + 1, len(values), "x")
    assert text.count(b"\n") == len(values)


@pytest.mark.parametrize(
    ("raw", "n_valid", "found"),
    [
        (b"", 2, "0 bytes"),
        (b"\x03\0\0\0" + bytes(12), 2, "3 strings"),
        (b"\x02\0\0\0" + b"\x01\0\0\0a" + b"\x01\0\0\0b", 1, "not empty"),
        (b"\x02\0\0\0" + b"\x01\0\0\0a" + b"\x09\0\0\0b", 2, "claims 9 bytes"),
        (b"\x02\0\0\0" + b"\xff\xff\xff\xffa" + b"\x09\0\0\0b", 2, "claims 4294967295 bytes"),
        (b"\x02\0\0\0" + b"\x01\0\0\0a" + b"\x01\0\0\0bc", 2, "follow the last"),
        (b"\x02\0\0\0" + b"\x06\0\0\0a\0\0\0\0b" + b"\0\0\0", 2, "begins at"),
        (b"\x02\0\0\0" + b"\x01\0\0\0\n" + b"\x01\0\0\0b", 2, "newline"),
        (b"\x02\0\0\0" + bytes(9), 0, "not empty|follow the last"),
    ],
)
def test_a_chunk_that_contradicts_itself_is_corrupt(raw: bytes, n_valid: int, found: str) -> None:
    with pytest.raises(CorruptShard, match=found):
        decode_strings(raw, 2, n_valid, "x")


def test_text_cannot_be_smaller_than_its_lengths() -> None:
    with pytest.raises(CorruptShard, match="expected at least 12"):
        text_bytes(11, 2, 2, "x")
