"""A Daf for Python programs: names, and the properties as numpy and scipy arrays.

Owns which kind of array each property becomes. Reads through the same contents as a mount. Threads may share a Daf.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dafmount.arrays.lazy import LazyArray, NumberStretches, StringStretches, text_array
from dafmount.daf.catalog import Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import JSON, parse_json
from dafmount.daf.eltype import NUMERIC, is_string
from dafmount.daf.files_layout import MAX_DESCRIPTOR_BYTES, FilesLayout
from dafmount.daf.sources import open_source
from dafmount.errors import CorruptDescriptor, GroupNotFound, NotFound, UnsupportedFormat
from dafmount.source.base import ByteSource
from dafmount.source.local import LocalFile
from dafmount.source.names import shown
from dafmount.source.resolve import Resolved, daf_roots
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from dafmount.tree.build import Style, open_shard, packed_content
from dafmount.tree.cache import ChunkCache

if TYPE_CHECKING:
    from scipy.sparse import csc_array

Array: TypeAlias = NDArray[Any] | LazyArray
Scalar: TypeAlias = bool | int | float | str

_FLOAT_WORDS = {
    None: math.nan,
    "NaN": math.nan,
    "Inf": math.inf,
    "-Inf": -math.inf,
    "Infinity": math.inf,
    "-Infinity": -math.inf,
}
"""How writers say what JSON has no numbers for."""


def open_daf(source: str, *, cache_bytes: int, spool: Path | None, spool_bytes: int, verify: bool) -> Daf:
    """See `dafmount.open`."""
    resolved = open_source(source, spool=Spool(spool, spool_bytes), verify="auto" if verify else "off")
    try:
        if not resolved.is_daf:
            raise _several(resolved)
        return Daf(resolved, Style(ChunkCache(cache_bytes), verify=verify))
    except BaseException:
        resolved.archive.close()
        raise


def _several(resolved: Resolved) -> GroupNotFound:
    groups = daf_roots(resolved.archive) if isinstance(resolved.archive, ZipArchive) else []
    listed = ", ".join(map(shown, groups[:20]))
    return GroupNotFound(f"{shown(resolved.display)}: several data sets, name one of them after '#/': {listed}")


class Daf:
    """One data set, open for reading. Use it in a `with` statement, or close it.

    A dense numeric property is a numpy.memmap where it is a plain local file (which must not be cut short while it is
    used), and a LazyArray, which reads what is indexed, where it is packed or lies in an archive. Packed strings are a
    LazyArray too. Flat strings and sparse vectors are read whole. A sparse matrix is a scipy.sparse.csc_array.

    A matrix of `rows` and `columns` has the shape `(n_rows, n_columns)` and lies column after column (Fortran order),
    as in Julia and R: work along columns.
    """

    def __init__(self, resolved: Resolved, style: Style) -> None:
        """Takes over the archive; use `dafmount.open`. Raises UnsupportedFormat or CorruptDescriptor."""
        self._archive = resolved.archive
        self._name = resolved.display
        self._style = style
        self._layout = FilesLayout(resolved.archive, resolved.root)
        self._version = self._layout.version()
        self._numbers = itertools.count(1)
        self._arrays: dict[PropertyKey, LazyArray] = {}

    def __enter__(self) -> Daf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        axes = ", ".join(self._layout.axes())
        return f"<Daf {shown(self._name)} of {axes or 'no axes'}>"

    @property
    def name(self) -> str:
        """The source as an absolute path or a URL."""
        return self._name

    @property
    def version(self) -> tuple[int, int]:
        """Of the FilesDaf format."""
        return self._version

    def close(self) -> None:
        """Let go of the files. Lazy arrays cannot be read any more; numpy arrays can."""
        arrays, self._arrays = self._arrays, {}
        for array in arrays.values():
            array.close()
        self._archive.close()

    # Names.

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return self._layout.axes()

    @property
    def scalars(self) -> tuple[str, ...]:
        """The names of the scalars."""
        return tuple(self._layout.scalars())

    def vectors(self, axis: str) -> tuple[str, ...]:
        """The names of the vectors of an axis; raises NotFound."""
        return self._names(axis)

    def matrices(self, rows: str, columns: str) -> tuple[str, ...]:
        """The names of the matrices of two axes; raises NotFound."""
        return self._names(rows, columns)

    def _names(self, *axes: str) -> tuple[str, ...]:
        for axis in axes:
            self._check_axis(axis)
        return tuple(self._layout.names(axes))

    def _check_axis(self, axis: str) -> None:
        if axis not in self._layout.axes():
            raise NotFound(f"{shown(self._name)}: no axis {axis!r}; it has {_listed(self._layout.axes())}")

    # Values.

    def axis_length(self, axis: str) -> int:
        """The number of entries of an axis; raises NotFound."""
        self._check_axis(axis)
        return self._layout.axis_length(axis)

    def axis_entries(self, axis: str) -> list[str]:
        """The entries of an axis, in their order; raises NotFound."""
        self._check_axis(axis)
        entries: list[str] = self._read_text(f"axes/{axis}.txt", self._layout.axis_length(axis)).tolist()
        return entries

    def scalar(self, name: str) -> Scalar:
        """The value of a scalar; raises NotFound or CorruptDescriptor."""
        path = f"scalars/{name}.json"
        if name not in self._layout.scalars():
            raise NotFound(f"{shown(self._name)}: no scalar {name!r}; it has {_listed(self._layout.scalars())}")
        where = self._layout.where(path)
        fields = parse_json(self._archive.read_small(self._layout.path(path), MAX_DESCRIPTOR_BYTES), where)
        value = _scalar_value(fields.get("type"), fields.get("value"))
        if value is None:
            raise CorruptDescriptor(
                f"{where}: {fields.get('value')!r}, expected a value of type {fields.get('type')!r}"
            )
        return value

    def vector(self, axis: str, name: str) -> Array:
        """A vector, of shape `(n,)`.

        Sparse ones are filled up with zeros, False or "". Raises NotFound, Corrupt or UnsupportedFormat.
        """
        key, descriptor = self._property(name, axis)
        if descriptor.layout == "dense":
            return self._dense(key, descriptor.components[0], (self._layout.axis_length(axis),))
        return self._sparse_vector(key, descriptor)

    def matrix(self, rows: str, columns: str, name: str) -> Array | csc_array[Any]:
        """A matrix, of shape `(n_rows, n_columns)`.

        A sparse one needs scipy; of strings it is an array of objects, filled up with "". Raises NotFound, Corrupt or
        UnsupportedFormat.
        """
        key, descriptor = self._property(name, rows, columns)
        shape = (self._layout.axis_length(rows), self._layout.axis_length(columns))
        if descriptor.layout == "dense":
            return self._dense(key, descriptor.components[0], shape)
        return self._sparse_matrix(key, descriptor, shape)

    def _property(self, name: str, *axes: str) -> tuple[PropertyKey, Descriptor]:
        for axis in axes:
            self._check_axis(axis)
        key = PropertyKey(axes, name)
        try:
            return key, self._layout.descriptor(key)[1]
        except NotFound as error:
            what = "vector" if len(axes) == 1 else "matrix"
            known = _listed(self._names(*axes))
            raise NotFound(
                f"{shown(self._name)}: no {what} {name!r} of {' and '.join(axes)}; there are {known}"
            ) from error

    # Dense.

    def _dense(self, key: PropertyKey, component: Component, shape: tuple[int, ...]) -> Array:
        known = self._arrays.get(key)
        if known is not None:
            return known
        array = self._component(key, component, shape)
        if isinstance(array, LazyArray):
            self._arrays[key] = array
        return array

    def _component(self, key: PropertyKey, component: Component, shape: tuple[int, ...]) -> Array:
        """A component as an array; a lazy one is the caller's to close."""
        suffix = component.packed_suffix if component.packing else component.flat_suffix
        path = key.path + suffix
        if component.packing is None and is_string(component.eltype):
            return self._read_text(path, math.prod(shape)).reshape(shape, order="F")
        source = self._archive.open(self._layout.path(path))
        try:
            if component.packing is None:
                return self._flat(source, component, shape)
            return self._packed(source, component, shape)
        except BaseException:
            source.close()
            raise

    def _flat(self, source: ByteSource, component: Component, shape: tuple[int, ...]) -> Array:
        dtype = np.dtype(NUMERIC[component.eltype])
        expected = math.prod(shape) * dtype.itemsize
        if source.size != expected:
            raise CorruptDescriptor(f"{source.name}: {source.size} bytes, expected {expected}")
        if not isinstance(source, LocalFile):
            return LazyArray(NumberStretches(source, shape[0], dtype), shape, dtype)
        if expected == 0:
            source.close()
            return np.empty(shape, dtype, order="F")
        mapped: NDArray[Any] = np.memmap(source.real_path(), dtype, "r", shape=shape, order="F")
        source.close()
        return mapped

    def _packed(self, source: ByteSource, component: Component, shape: tuple[int, ...]) -> LazyArray:
        number = next(self._numbers)
        if is_string(component.eltype):
            grid, reader = open_shard(source, shape, component, self._style)
            return LazyArray(StringStretches(grid, reader, self._style.cache, number), shape, np.dtype(object))
        dtype = np.dtype(NUMERIC[component.eltype])
        content = packed_content(source, shape, component, self._style, number)
        return LazyArray(NumberStretches(content, shape[0], dtype), shape, dtype)

    def _read_text(self, path: str, n_lines: int) -> NDArray[Any]:
        source = self._archive.open(self._layout.path(path))
        try:
            values = text_array(source.read(0, source.size), source.name)
        finally:
            source.close()
        if len(values) != n_lines:
            raise CorruptDescriptor(f"{self._layout.where(path)}: {len(values)} lines, expected {n_lines}")
        return values

    # Sparse.

    def _sparse_vector(self, key: PropertyKey, descriptor: Descriptor) -> NDArray[Any]:
        components = {component.key: component for component in descriptor.components}
        indices = self._whole(key, components["nzind"])
        n = self._layout.axis_length(key.axes[0])
        _check_indices(indices, n, self._layout.where(f"{key.path}.nzind"))
        values = self._nonzeros(key, components.get("nzval"), len(indices))
        filled = np.full(n, "", object) if values.dtype == object else np.zeros(n, values.dtype)
        filled[indices.astype(np.int64) - 1] = values
        return filled

    def _sparse_matrix(
        self, key: PropertyKey, descriptor: Descriptor, shape: tuple[int, int]
    ) -> NDArray[Any] | csc_array[Any]:
        components = {component.key: component for component in descriptor.components}
        pointers = self._whole(key, components["colptr"], shape[1] + 1).astype(np.int64)
        rows = self._whole(key, components["rowval"])
        _check_indices(rows, shape[0], self._layout.where(f"{key.path}.rowval"))
        if pointers[0] != 1 or pointers[-1] != len(rows) + 1 or (np.diff(pointers) < 0).any():
            raise CorruptDescriptor(
                f"{self._layout.where(f'{key.path}.colptr')}: from {pointers[0]} to {pointers[-1]}, "
                f"expected to rise from 1 to {len(rows) + 1}"
            )
        values = self._nonzeros(key, components.get("nzval"), len(rows))
        rows = rows.astype(np.int64) - 1
        if values.dtype == object:
            filled = np.full(shape, "", object, order="F")
            filled[rows, np.repeat(np.arange(shape[1]), np.diff(pointers))] = values
            return filled
        index_type = np.int32 if max(len(rows), *shape) < 1 << 31 else np.int64
        return _make_csc(values, rows.astype(index_type), (pointers - 1).astype(index_type), shape, key.path)

    def _nonzeros(self, key: PropertyKey, component: Component | None, n: int) -> NDArray[Any]:
        """The values; where all are true they are not stored."""
        if component is None:
            return np.ones(n, np.bool_)
        try:
            return self._whole(key, component, n)
        except NotFound:
            if component.eltype == "Bool" and component.n_elements is None:
                return np.ones(n, np.bool_)
            raise

    def _whole(self, key: PropertyKey, component: Component, n: int | None = None) -> NDArray[Any]:
        """All values of a sparse component; where neither descriptor nor caller knows how many, the file tells."""
        n_elements = component.n_elements
        if n_elements is None:
            n_elements = self._elements(key, component) if n is None else n
        if n is not None and n_elements != n:
            where = self._layout.where(key.path)
            raise CorruptDescriptor(f"{where}: {n_elements} values of {component.key}, expected {n}")
        array = self._component(key, component, (n_elements,))
        if not isinstance(array, LazyArray):
            return array
        try:
            values: NDArray[Any] = array[...]
            return values
        finally:
            array.close()

    def _elements(self, key: PropertyKey, component: Component) -> int:
        source = self._archive.open(self._layout.path(key.path + component.flat_suffix))
        try:
            return source.size // np.dtype(NUMERIC[component.eltype]).itemsize
        finally:
            source.close()


def _scalar_value(kind: JSON, value: JSON) -> Scalar | None:
    """A scalar's JSON as what it stands for; None where it does not suit its type."""
    if kind == "Bool":
        return bool(value) if value in (0, 1) else None
    if kind in ("Float32", "Float64"):
        if value is None or isinstance(value, str):
            return _FLOAT_WORDS.get(value)
        return float(value) if isinstance(value, int | float) else None
    if isinstance(kind, str) and is_string(kind):
        return value if isinstance(value, str) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _check_indices(indices: NDArray[Any], n: int, where: str) -> None:
    if len(indices) and (int(indices.min()) < 1 or int(indices.max()) > n):
        raise CorruptDescriptor(f"{where}: indices from {indices.min()} to {indices.max()}, expected 1 to {n}")


def _make_csc(
    values: NDArray[Any], rows: NDArray[Any], pointers: NDArray[Any], shape: tuple[int, int], name: str
) -> csc_array[Any]:
    try:
        from scipy.sparse import csc_array
    except ImportError as error:
        raise UnsupportedFormat(f"{name} is sparse, which needs scipy: pip install 'dafmount[scipy]'") from error
    return csc_array((values, rows, pointers), shape=shape)


def _listed(names: Iterable[str]) -> str:
    listed = [shown(name) for name in itertools.islice(names, 21)]
    more = ", ..." if len(listed) > 20 else ""
    return ", ".join(listed[:20]) + more or "none"
