"""Checks of values find what a plain loop finds, however the values are cut into blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.check.findings import MAX_PER_FILE, Finding, Sink
from dafmount.check.values import Ascending, ByColumn, ColumnStarts, Lines, Pointers, Truths, ValueCheck

MODEST = settings(max_examples=100, deadline=None)


def collecting() -> tuple[Sink, list[Finding]]:
    found: list[Finding] = []
    return Sink("archive", "path", found.append), found


def feed(check: ValueCheck, values: np.ndarray, cuts: list[int]) -> None:
    stops = [*sorted({cut for cut in cuts if 0 < cut < len(values)}), len(values)]
    start = 0
    for stop in stops:
        check.feed(start, values[start:stop])
        start = stop
    check.finish()


def cut_up(values: np.ndarray, cuts: list[int]) -> Iterator[np.ndarray]:
    return iter(np.split(values, sorted({cut for cut in cuts if 0 < cut < len(values)})))


CUTS = st.lists(st.integers(0, 30), max_size=5)


@MODEST
@given(st.lists(st.integers(0, 9), max_size=8), st.sampled_from(["u1", "<i4", "<u8"]), CUTS)
def test_indices_that_rise(indices: list[int], dtype: str, cuts: list[int]) -> None:
    sink, found = collecting()
    feed(Ascending(sink, 8), np.array(indices, dtype), cuts)
    is_sound = all(1 <= index <= 8 for index in indices) and indices == sorted(set(indices))
    assert (found == []) == is_sound


@MODEST
@given(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(0, 5), CUTS)
def test_pointers(pointers: list[int], n_values: int, cuts: list[int]) -> None:
    sink, found = collecting()
    feed(Pointers(sink, n_values), np.array(pointers, "<i8"), cuts)
    is_sound = pointers[0] == 1 and pointers[-1] == n_values + 1 and pointers == sorted(pointers)
    assert (found == []) == is_sound


@MODEST
@given(st.lists(st.lists(st.integers(0, 6), max_size=5), max_size=6), CUTS, CUTS)
def test_rows_that_rise_in_each_column(columns: list[list[int]], cuts: list[int], pointer_cuts: list[int]) -> None:
    sink, found = collecting()
    pointers = np.cumsum([1, *map(len, columns)]).astype(np.int64)
    rows = np.array([row for column in columns for row in column], "<u4")
    check = ByColumn(sink, 5, lambda: ColumnStarts(cut_up(pointers, pointer_cuts)))
    feed(check, rows, cuts)
    is_sound = all(column == sorted(set(column)) and all(1 <= row <= 5 for row in column) for column in columns)
    assert (found == []) == is_sound


def test_a_gap_of_unread_values_is_no_fault() -> None:
    for make in (lambda sink: Ascending(sink, 100), lambda sink: ByColumn(sink, 100, None)):
        sink, found = collecting()
        check = make(sink)
        check.feed(0, np.array([50, 60], "<u4"))
        check.feed(10, np.array([3, 4], "<u4"))
        check.finish()
        assert found == []


def test_an_unsigned_index_beyond_all_bounds() -> None:
    sink, found = collecting()
    feed(Ascending(sink, 10), np.array([1, 2**64 - 1], "<u8"), [])
    assert "expected 1 to 10" in found[0].message


@MODEST
@given(st.binary(max_size=12), CUTS)
def test_truths(data: bytes, cuts: list[int]) -> None:
    sink, found = collecting()
    feed(Truths(sink), np.frombuffer(data, "?"), cuts)
    assert (found == []) == (set(data) <= {0, 1})


@MODEST
@given(st.lists(st.one_of(st.text(max_size=4).map(str.encode), st.binary(max_size=3)), max_size=5), CUTS, st.booleans())
def test_lines(lines: list[bytes], cuts: list[int], is_ended: bool) -> None:
    text = b"\n".join(lines) + (b"\n" if is_ended and lines else b"")
    sink, found = collecting()
    check = Lines(sink, text.count(b"\n") + (not text.endswith(b"\n") and text != b""))
    for block in np.split(np.frombuffer(text, np.uint8), sorted({cut for cut in cuts if 0 < cut < len(text)})):
        check.feed(block.tobytes())
    check.finish()
    try:
        text.decode()
        is_text = True
    except UnicodeDecodeError:
        is_text = False
    assert (found == []) == (is_text and (text == b"" or text.endswith(b"\n")))


@pytest.mark.parametrize(("text", "line"), [(b"a\nb\n\xff\n", 3), (b"\xff", 1), (b"a\n\xc3\n", 2)])
def test_the_line_that_is_no_text_is_named(text: bytes, line: int) -> None:
    sink, found = collecting()
    check = Lines(sink, None)
    check.feed(text)
    check.finish()
    assert found[0].message.startswith(f"line {line} is no valid UTF-8")


def test_a_sink_names_the_place_once() -> None:
    sink, found = collecting()
    sink.error("archive: path: chunk 3: broken", 3)
    sink.error("archive/path: broken\nin two")
    assert [one.line for one in found] == ["archive: path: chunk 3: broken", "archive: path: broken in two"]


def test_a_sink_counts_what_it_does_not_list() -> None:
    sink, found = collecting()
    for number in range(MAX_PER_FILE + 5):
        sink.error("broken", number)
    assert len(found) == MAX_PER_FILE
    sink.close()
    assert found[-1].message == "5 more faults are not listed"
