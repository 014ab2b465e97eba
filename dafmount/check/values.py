"""What the values of a component must be, checked block by block as they come.

Owns the rules of Daf for sparse indices (1-based, ascending), truth values and lines of text ("FilesFormat
documentation"). Must not know where values come from. Each checker belongs to one thread and one component.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dafmount.check.findings import Sink

Values = NDArray[Any]
Integers = NDArray[np.int64]


class ValueCheck(Protocol):
    """A check of a component's values, which come in order; those that cannot be read are left out."""

    def feed(self, position: int, values: Values) -> None:
        """The values from number `position` on."""

    def finish(self) -> None:
        """There are no more."""


def integers(values: Values) -> Integers:
    """As int64; what does not fit becomes negative, and so is out of any range."""
    return values.astype(np.int64, copy=False)


def first_untrue(values: NDArray[np.uint8]) -> int | None:
    """The place of the first byte that is no Bool; None where all are."""
    wrong = values > 1
    return int(wrong.argmax()) if wrong.any() else None


class Truths:
    """Bool: each byte is 0 or 1."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def feed(self, position: int, values: Values) -> None:
        """See ValueCheck."""
        at = first_untrue(values.view(np.uint8))
        if at is not None:
            self._sink.error(
                f"value {position + at} is the byte {int(values.view(np.uint8)[at])}, expected a Bool: 0 or 1"
            )

    def finish(self) -> None:
        """Nothing is left to say."""


class Ascending:
    """nzind: each index lies in 1 to `limit`, and each is greater than the one before."""

    def __init__(self, sink: Sink, limit: int) -> None:
        self._sink = sink
        self._limit = limit
        self._next = 0
        self._last = 0

    def feed(self, position: int, values: Values) -> None:
        """See ValueCheck."""
        indices = integers(values)
        if not len(indices):
            return
        last = self._last if position == self._next else 0
        check_range(self._sink, position, indices, self._limit)
        wrong = np.diff(indices, prepend=last) <= 0
        if wrong.any():
            at = int(wrong.argmax())
            before = int(indices[at - 1]) if at else last
            self._sink.error(f"value {position + at} is the index {indices[at]} after {before}, expected more")
        self._next, self._last = position + len(indices), int(indices[-1])

    def finish(self) -> None:
        """Nothing is left to say."""


class Pointers:
    """colptr: begins with 1, never falls, and ends with one more than there are values."""

    def __init__(self, sink: Sink, n_values: int) -> None:
        self._sink = sink
        self._n_values = n_values
        self._next = 0
        self._last = 1

    def feed(self, position: int, values: Values) -> None:
        """See ValueCheck."""
        pointers = integers(values)
        if not len(pointers):
            return
        if position == 0 and pointers[0] != 1:
            self._sink.error(f"begins with {pointers[0]}, expected 1")
        most = self._n_values + 1
        over = pointers > most
        if over.any():
            at = int(over.argmax())
            self._sink.error(f"value {position + at} is {pointers[at]}, expected at most {most}")
        before = self._last if position == self._next and position else int(pointers[0])
        falls = np.diff(pointers, prepend=before) < 0
        if falls.any():
            at = int(falls.argmax())
            previous = int(pointers[at - 1]) if at else before
            self._sink.error(f"value {position + at} is {pointers[at]} after {previous}, expected none to fall")
        self._next, self._last = position + len(pointers), int(pointers[-1])

    def finish(self) -> None:
        """The last one tells the number of values."""
        most = self._n_values + 1
        if self._next and self._last < most:
            self._sink.error(f"ends with {self._last}, expected {most}: one more than there are values")


class ColumnStarts:
    """The positions at which columns begin, asked for in ascending order; `blocks` are those of colptr."""

    def __init__(self, blocks: Iterator[Integers]) -> None:
        self._blocks = blocks
        self._pending: Integers = np.zeros(0, np.int64)

    def before(self, stop: int) -> Integers:
        """The positions (from 0) less than `stop` that were not given yet; a column without values begins as well."""
        parts = []
        while True:
            n = int(np.searchsorted(self._pending, stop, side="left"))
            parts.append(self._pending[:n])
            self._pending = self._pending[n:]
            if len(self._pending):
                break
            block = next(self._blocks, None)
            if block is None:
                break
            self._pending = block - 1
        return np.concatenate(parts)


class ByColumn:
    """rowval: each index lies in 1 to `limit`, and each is greater than the one before in its column."""

    def __init__(self, sink: Sink, limit: int, starts: Callable[[], ColumnStarts] | None) -> None:
        """`starts` is None where colptr cannot be used: then only the range is checked."""
        self._sink = sink
        self._limit = limit
        self._starts = starts() if starts is not None else None
        self._next = 0
        self._last = 0

    def feed(self, position: int, values: Values) -> None:
        """See ValueCheck."""
        indices = integers(values)
        if not len(indices):
            return
        check_range(self._sink, position, indices, self._limit)
        stop = position + len(indices)
        if self._starts is not None:
            begins = self._starts.before(stop)
            begins = begins[begins >= position] - position
            last = self._last if position == self._next else 0
            wrong = np.diff(indices, prepend=last) <= 0
            wrong[begins] = False
            if wrong.any():
                at = int(wrong.argmax())
                before = int(indices[at - 1]) if at else last
                self._sink.error(
                    f"value {position + at} is the row {indices[at]} after {before} in one column, expected more"
                )
        self._next, self._last = stop, int(indices[-1])

    def finish(self) -> None:
        """Nothing is left to say."""


def check_range(sink: Sink, position: int, indices: Integers, limit: int) -> None:
    """The first index of a block that is not in 1 to `limit`."""
    wrong = (indices < 1) | (indices > limit)
    if wrong.any():
        at = int(wrong.argmax())
        sink.error(f"value {position + at} is the index {indices[at]}, expected 1 to {limit}")


class Lines:
    """Text, one value a line: valid UTF-8, each line ended, as many as there are values."""

    def __init__(self, sink: Sink, expected: int | None) -> None:
        self._sink = sink
        self._expected = expected
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._is_text = True
        self._last = b"\n"
        self.n_lines = 0

    def feed(self, block: bytes) -> None:
        """The next bytes."""
        if not block:
            return
        if self._is_text:
            try:
                self._decoder.decode(block)
            except UnicodeDecodeError as error:
                self._not_text(self.n_lines + block.count(b"\n", 0, max(0, error.start)), error)
        self.n_lines += block.count(b"\n")
        self._last = block[-1:]

    def finish(self) -> None:
        """There is no more."""
        if self._is_text:
            try:
                self._decoder.decode(b"", True)
            except UnicodeDecodeError as error:
                self._not_text(self.n_lines, error)
        if self._last != b"\n":
            self.n_lines += 1
            self._sink.error("the last line has no newline at its end")
        if self._expected is not None and self.n_lines != self._expected:
            self._sink.error(f"{self.n_lines} lines, expected {self._expected}")

    def _not_text(self, line: int, error: UnicodeDecodeError) -> None:
        self._is_text = False
        self._sink.error(f"line {line + 1} is no valid UTF-8: {error.reason}")
