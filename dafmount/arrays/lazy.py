"""Arrays that read what is asked of them, and nothing before.

Owns basic indexing, and which stretches of a file a selection is. Must not know Daf's names. Threads may share an
array.
"""

from __future__ import annotations

import operator
from types import EllipsisType
from typing import Any, Protocol, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dafmount.errors import Corrupt
from dafmount.shard import strings
from dafmount.shard.grid import Grid
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import ShardReader
from dafmount.tree.content import KEY_BITS, Content
from dafmount.tree.units import CachedUnits

READ_BYTES = 2 << 20
"""The most that is read at once into an array that is being filled."""

Index: TypeAlias = SupportsIndex | slice | EllipsisType
Key: TypeAlias = Index | tuple[Index, ...]


class Stretches(Protocol):
    """Where a lazy array's values come from. A vector is a matrix of one column here."""

    def read(self, first_row: int, stop_row: int, first_column: int, stop_column: int) -> NDArray[Any]:
        """The values of some consecutive rows and columns, as a matrix in Fortran order."""

    def close(self) -> None:
        """Let go of the source."""


class LazyArray:
    """A vector or matrix whose values are read when it is indexed; numpy.asarray reads all.

    Indices are integers, slices and `...`, as in numpy; the results are numpy arrays of their own. A matrix lies column
    after column (Fortran order), so that `matrix[:, 3]` reads one stretch and `matrix[3]` one for each column.
    """

    def __init__(self, stretches: Stretches, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._stretches = stretches
        self._shape = shape
        self._dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """`(n,)`, or `(n_rows, n_columns)`."""
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of a value; strings are Python objects."""
        return self._dtype

    @property
    def ndim(self) -> int:
        """1 or 2."""
        return len(self._shape)

    @property
    def size(self) -> int:
        """Number of values."""
        return self._shape[0] * self._columns

    @property
    def nbytes(self) -> int:
        """Bytes that all values would take in memory."""
        return self.size * self._dtype.itemsize

    @property
    def _columns(self) -> int:
        return self._shape[1] if len(self._shape) == 2 else 1

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        return f"<lazy array of {' x '.join(map(str, self._shape))} {self._dtype}>"

    def __getitem__(self, key: Key) -> Any:
        """A numpy array, or a single value; reads only the chunks that hold it. Raises IndexError, or as reading."""
        indices = _expanded(key, self.ndim)
        ranges = [_selected(index, n) for index, n in zip(indices, self._shape, strict=True)]
        columns = ranges[1] if len(ranges) == 2 else range(1)
        values = self._read(ranges[0], columns)
        picks = tuple(slice(None) if isinstance(index, slice) else 0 for index in indices)
        return values[picks if len(ranges) == 2 else (*picks, 0)]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the values are not in memory: reading them makes a copy")
        values: NDArray[Any] = self[...]
        return values if dtype is None else values.astype(dtype, copy=False)

    def close(self) -> None:
        """Let go of the source; to be called once, by whoever made the array."""
        self._stretches.close()

    def _read(self, rows: range, columns: range) -> NDArray[Any]:
        if not rows or not columns:
            return np.empty((len(rows), len(columns)), self._dtype, order="F")
        low, high = min(rows[0], rows[-1]), max(rows[0], rows[-1]) + 1
        step = slice(None, None, rows.step)
        if abs(columns.step) == 1 or len(columns) == 1:
            left, right = min(columns[0], columns[-1]), max(columns[0], columns[-1]) + 1
            values = self._stretches.read(low, high, left, right)
            return values[step, :: columns.step if len(columns) > 1 else 1]
        found = np.empty((len(rows), len(columns)), self._dtype, order="F")
        for at, column in enumerate(columns):
            found[:, at] = self._stretches.read(low, high, column, column + 1)[step, 0]
        return found


def _expanded(key: Key, ndim: int) -> list[SupportsIndex | slice]:
    """One index for each dimension."""
    keys = key if isinstance(key, tuple) else (key,)
    given = [index for index in keys if index is not Ellipsis]
    if len(keys) - len(given) > 1 or len(given) > ndim:
        raise IndexError(f"{len(given)} indices for an array of {ndim} dimensions")
    at = next((at for at, index in enumerate(keys) if index is Ellipsis), len(keys))
    filled: list[Any] = [*keys[:at], *[slice(None)] * (ndim - len(given)), *keys[at + 1 :]]
    return filled


def _selected(index: SupportsIndex | slice, n: int) -> range:
    """The numbers that an index selects of `n`."""
    if isinstance(index, slice):
        return range(*index.indices(n))
    if isinstance(index, bool | np.bool_):
        raise IndexError("a truth value is no index here; read the array to select with a mask")
    try:
        number = operator.index(index)
    except TypeError as error:
        what = type(index).__name__
        raise IndexError(
            f"{what} is no index here, expected an integer, a slice or ...; read the array first"
        ) from error
    if not -n <= number < n:
        raise IndexError(f"index {number} of a dimension of {n}")
    number %= n
    return range(number, number + 1)


class NumberStretches:
    """Numbers out of the flat bytes of a component, packed or not."""

    def __init__(self, content: Content, n_rows: int, dtype: np.dtype[Any]) -> None:
        self._content = content
        self._n_rows = n_rows
        self._dtype = dtype

    def read(self, first_row: int, stop_row: int, first_column: int, stop_column: int) -> NDArray[Any]:
        """See Stretches."""
        shape = (stop_row - first_row, stop_column - first_column)
        values = np.empty(shape, self._dtype, order="F")
        if shape[0] == self._n_rows:
            self._fill(values.reshape(-1, order="F"), first_column * self._n_rows)
        else:
            for at in range(shape[1]):
                self._fill(values[:, at], (first_column + at) * self._n_rows + first_row)
        return values

    def close(self) -> None:
        """Let go of the source."""
        self._content.close()

    def _fill(self, values: NDArray[Any], position: int) -> None:
        """Fill a stretch of memory with the values from number `position` on."""
        width = self._dtype.itemsize
        per_read = max(1, READ_BYTES // width)
        for start in range(0, len(values), per_read):
            n = min(per_read, len(values) - start)
            data = self._content.read((position + start) * width, n * width)
            values[start : start + n] = np.frombuffer(data, self._dtype)


class StringStretches:
    """Strings out of the chunks of a packed component, as Python objects."""

    def __init__(self, grid: Grid, reader: ShardReader, cache: ChunkCache, number: int) -> None:
        """`number` tells the chunks from those of other components in the cache."""
        self._grid = grid
        self._name = reader.name
        self._chunks = CachedUnits(reader, cache, number << KEY_BITS)

    def read(self, first_row: int, stop_row: int, first_column: int, stop_column: int) -> NDArray[Any]:
        """See Stretches."""
        rows, columns = (*self._grid.chunk_shape, 1)[:2]
        values = np.empty((stop_row - first_row, stop_column - first_column), object, order="F")
        for column_block in range(first_column // columns, -(-stop_column // columns)):
            for row_block in range(first_row // rows, -(-stop_row // rows)):
                chunk = self._chunk(column_block * self._grid.grid_shape[0] + row_block).reshape(columns, rows).T
                top, left = row_block * rows, column_block * columns
                low, high = max(first_row, top), min(stop_row, top + rows)
                begin, end = max(first_column, left), min(stop_column, left + columns)
                part = chunk[low - top : high - top, begin - left : end - left]
                values[low - first_row : high - first_row, begin - first_column : end - first_column] = part
        return values

    def close(self) -> None:
        """Let go of the source."""
        self._chunks.close()

    def _chunk(self, number: int) -> NDArray[Any]:
        """The strings of a chunk, those of its padding too."""
        (raw,) = self._chunks.get([number])
        count = self._grid.chunk_count
        lines = strings.decode_strings(raw, count, count, f"{self._name}: chunk {number}")
        return text_array(lines, f"{self._name}: chunk {number}")


def text_array(lines: bytes, where: str) -> NDArray[Any]:
    """Lines of text, each with its newline, as an array of Python strings; raises Corrupt for what is no UTF-8."""
    try:
        texts = lines.decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise Corrupt(f"{where}: no valid UTF-8: {error.reason}") from error
    if texts[-1] == "":
        texts.pop()
    values = np.empty(len(texts), object)
    values[:] = texts
    return values
