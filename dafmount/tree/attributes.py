"""Extended attributes of the files of vectors and matrices: what they hold, how to map them, how they are stored.

Owns the names `user.daf.*` and their values. Must not know FUSE. Nothing is read before a value is asked for, and names
never need reading, so that listing a large directory costs no more for them. Threads may share everything here.

With `dtype`, `shape` and `order` numpy.memmap needs nothing else. Lists are JSON; matrices are column-major (FilesDaf
documentation), which numpy calls order F.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

from dafmount.daf.catalog import DENSE, Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import SPARSE_KEYS
from dafmount.daf.eltype import NUMERIC, is_string
from dafmount.daf.files_layout import FilesLayout, PackedComponent, count_lines
from dafmount.tree.content import Content
from dafmount.tree.nodes import File, Opener

PREFIX = "user.daf."

ELTYPE = PREFIX + "eltype"
"""Daf's element type, such as `UInt32` or `String`."""
SHAPE = PREFIX + "shape"
"""Elements in each dimension, such as `[2000,300]`, rows first; of a component of a sparse property `[n]`."""
LAYOUT = PREFIX + "layout"
"""Of the property: `dense` or `sparse`."""
COMPRESSION = PREFIX + "compression"
"""How the archive compresses the chunks, or `none`."""
CHUNK_SHAPE = PREFIX + "chunk_shape"
"""Elements of a chunk in each dimension; packed files alone have it."""
STORED_BYTES = PREFIX + "stored_bytes"
"""Bytes in the archive: of the shard, or of the file itself."""
DTYPE = PREFIX + "dtype"
"""numpy's name of the element type, such as `<u4`; numbers alone have it."""
ORDER = PREFIX + "order"
"""`F`; numbers alone have it."""

_ALWAYS = (ELTYPE, SHAPE, LAYOUT, COMPRESSION, STORED_BYTES)
_OF_NUMBERS = (DTYPE, ORDER)
_OF_DESCRIPTORS = (ELTYPE, SHAPE, LAYOUT)

_TEXT_SUFFIXES = (".txt", ".nztxt")


class PackedAttributes:
    """Of the flat form of one shard."""

    def __init__(self, layout: FilesLayout, packed: PackedComponent, path: str) -> None:
        self._layout = layout
        self._packed = packed
        self._path = path

    def names(self) -> Sequence[str]:
        """Of the attributes."""
        numbers = () if is_string(self._packed.component.eltype) else _OF_NUMBERS
        return (*_ALWAYS, CHUNK_SHAPE, *numbers)

    def values(self) -> Mapping[str, bytes]:
        """Of all; raises CorruptDescriptor, or what the archive raises."""
        layout, key, component = self._layout, self._packed.key, self._packed.component
        packing = component.packing
        assert packing is not None
        form = "dense" if component.key == DENSE else "sparse"
        stored_bytes = _size(layout, self._path)
        values = _payload(form, component, layout.shape(key, component), stored_bytes, packing.compression)
        values[CHUNK_SHAPE] = _numbers(packing.chunk_shape)
        return values


class FlatPayloads:
    """Opens the files of one directory that hold a component flat in the archive, and describes them."""

    def __init__(self, layout: FilesLayout, axes: tuple[str, ...], as_stored: Opener) -> None:
        """`as_stored` opens the files of the directory."""
        self._layout = layout
        self._axes = axes
        self._as_stored = as_stored

    def holds(self, name: str, names: Collection[str]) -> bool:
        """Whether a file is a payload, judged by its name and those of all files of the directory."""
        if name[-5:] == ".data":  # as most are, of perhaps 100,000
            return name[:-5] + ".json" in names
        found = _flat_component(name, len(self._axes))
        return found is not None and found[0] + ".json" in names

    def open(self, file: File) -> Content:
        """The bytes as they are stored."""
        return self._as_stored.open(file)

    def open_nowait(self, file: File) -> Content | None:
        """As `open`, or None where it would have to wait."""
        return self._as_stored.open_nowait(file)

    def attribute_names(self, file: File) -> Sequence[str]:
        """See `Described`."""
        return _ALWAYS if file.name.endswith(_TEXT_SUFFIXES) else (*_ALWAYS, *_OF_NUMBERS)

    def attributes(self, file: File) -> Mapping[str, bytes]:
        """See `Described`; none where the property has no such component."""
        found = _flat_component(file.name, len(self._axes))
        assert found is not None
        key = PropertyKey(self._axes, found[0])
        _, descriptor = self._layout.descriptor(key)
        for component in descriptor.components:
            if component.key == found[1] and key.name + component.flat_suffix == file.name:
                path = self._layout.path(key.path + component.flat_suffix)
                shape = self._shape(key, component, path)
                return _payload(descriptor.layout, component, shape, _size(self._layout, path), "none")
        return {}

    def _shape(self, key: PropertyKey, component: Component, path: str) -> tuple[int, ...]:
        if component.key == DENSE or component.n_elements is not None:
            return self._layout.shape(key, component)
        # In version 1.0 only the file tells how many there are.
        source = self._layout.archive.open(path)
        try:
            width = NUMERIC.get(component.eltype)
            return (count_lines(source) if width is None else source.size // int(width[2:]),)
        finally:
            source.close()


def descriptor_names() -> Sequence[str]:
    """Of the attributes of a descriptor."""
    return _OF_DESCRIPTORS


def descriptor_values(layout: FilesLayout, key: PropertyKey) -> Mapping[str, bytes]:
    """Of the property that a descriptor describes; raises CorruptDescriptor for an axis without its file too."""
    _, descriptor = layout.descriptor(key)
    return {
        ELTYPE: value_eltype(descriptor).encode(),
        SHAPE: _numbers([layout.axis_length(axis) for axis in key.axes]),
        LAYOUT: descriptor.layout.encode(),
    }


def value_eltype(descriptor: Descriptor) -> str:
    """The element type of a property's values; a sparse property without values is true where it has an index."""
    by_key = {component.key: component.eltype for component in descriptor.components}
    return by_key.get(DENSE) or by_key.get("nzval") or "Bool"


def _payload(
    form: str, component: Component, shape: Sequence[int], stored_bytes: int, compression: str
) -> dict[str, bytes]:
    values = {
        ELTYPE: component.eltype.encode(),
        SHAPE: _numbers(shape),
        LAYOUT: form.encode(),
        COMPRESSION: compression.encode(),
        STORED_BYTES: str(stored_bytes).encode(),
    }
    if not is_string(component.eltype):
        values[DTYPE] = NUMERIC[component.eltype].encode()
        values[ORDER] = b"F"
    return values


def _numbers(numbers: Sequence[int]) -> bytes:
    return json.dumps(list(numbers), separators=(",", ":")).encode()


def _size(layout: FilesLayout, path: str) -> int:
    source = layout.archive.open(path)
    try:
        return source.size
    finally:
        source.close()


def _flat_component(name: str, n_axes: int) -> tuple[str, str] | None:
    """The property and the component whose flat file has this name; None where no component's has."""
    stem, dot, suffix = name.rpartition(".")
    if not dot:
        return None
    if suffix in ("data", "txt"):
        return stem, DENSE
    if suffix == "nztxt":
        return stem, "nzval"
    return (stem, suffix) if suffix in SPARSE_KEYS[n_axes] else None
