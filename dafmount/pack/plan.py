"""What a data set will consist of, found out before anything is written.

Owns the order of the files, their descriptors and metadata.json, and the check that what the descriptors say and what
the files hold agree. Knows nothing of destinations. One thread makes a plan; what the plan opens may be read by many.

Unlike a mount, which shows what it can, a plan does not tolerate anything damaged: the copy would hide the damage.

Facts: FilesFormat documentation; order and descriptors as in what DataAxesFormats.jl and dafr wrote.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

from dafmount.daf.catalog import DENSE, Component, Descriptor, Packing, PropertyKey
from dafmount.daf.descriptor import JSON, PACKED_KEYS, compact_json, minify, parse_json
from dafmount.daf.eltype import itemsize
from dafmount.daf.files_layout import (
    MARKER,
    MAX_DESCRIPTOR_BYTES,
    METADATA,
    SECTIONS,
    FilesLayout,
    PackedComponent,
    count_lines,
)
from dafmount.errors import CorruptDescriptor, NotFound, UnsupportedFormat
from dafmount.pack.settings import PackSettings, Selection
from dafmount.shard.codecs import CODECS, METHOD_DEFLATE
from dafmount.shard.grid import make_grid
from dafmount.source.base import Archive, ByteSource
from dafmount.tree.build import MAX_CHUNK_BYTES, DafTree, PackedOpener, Style
from dafmount.tree.cache import ChunkCache
from dafmount.tree.content import Content
from dafmount.tree.nodes import Directory, File, join

CACHE_BYTES = 32 << 20
"""Decoded chunks of a packed source; more where its chunks are larger than half of that."""

VERSION_JSON = compact_json({"version": [1, 1]})

_INDEXES_OF_DAFR = ("metadata.zip", "axes/metadata.json")
"""What dafr keeps beside a data set and makes anew where it is missing; a copy would describe the wrong files."""

_GZIP_MAX_CHUNKS = 1 << 24

Open = Callable[[], Content]


@dataclass(frozen=True, slots=True)
class Document:
    """A file of a few bytes that are known."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class FlatFile:
    """A file that holds the flat bytes of an axis or component."""

    path: str
    open: Open
    size: int
    n_lines: int | None
    """Lines that a text must have; None for numbers."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file that holds a component packed."""

    path: str
    open: Open
    """Opens its flat bytes."""
    size: int
    """Bytes of the flat component."""
    shape: tuple[int, ...]
    itemsize: int | None
    """Bytes of a value; None for strings."""
    packing: Packing


Planned = Document | FlatFile | ShardFile


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole data set, in the order in which it is written."""

    files: tuple[Planned, ...]
    metadata: bytes
    """metadata.json, which directories have and archives have not."""
    directories: tuple[str, ...]
    """Those that a directory has even when they are empty."""
    left_out: tuple[str, ...]
    """Files of the source that are no part of the format."""

    @property
    def size(self) -> int:
        """Flat bytes of everything but descriptors."""
        return sum(file.size for file in self.files if not isinstance(file, Document))


def make_plan(archive: Archive, root: str, settings: PackSettings | None, selection: Selection) -> Plan:
    """The plan for a copy of the data set at the archive's directory `root`; `settings` None leaves everything flat.

    Reads every descriptor and opens every file once. Raises CorruptDescriptor, UnsupportedFormat, UsageError for a
    pattern that matches nothing, and what the archive raises.
    """
    return _Planner(archive, root, settings, selection).plan()


class _Planner:
    def __init__(self, archive: Archive, root: str, settings: PackSettings | None, selection: Selection) -> None:
        self._archive = archive
        self._settings = settings
        self._selection = selection
        self._cache = ChunkCache(CACHE_BYTES)
        self._tree = DafTree(archive, root, Style(self._cache))
        self._layout: FilesLayout = self._tree.layout
        self._metadata: list[bytes] = []
        self._used: set[str] = {MARKER, METADATA, *_INDEXES_OF_DAFR}

    def plan(self) -> Plan:
        layout = self._layout
        layout.version()
        scalars, keys = list(layout.scalars()), list(layout.properties())
        paths = [*(f"scalars/{name}" for name in scalars), *(key.path for key in keys)]
        self._selection.check_used(paths)
        axes = list(self._axes())
        files: list[Planned] = [Document(MARKER, VERSION_JSON), *self._scalars(scalars), *axes]
        for key in keys:
            files.extend(self._property(key))
        metadata = b"{" + b",".join(self._metadata) + b"}"
        return Plan(tuple(files), metadata, tuple(self._directories()), tuple(self._left_out()))

    def _axes(self) -> Iterator[FlatFile]:
        for axis in self._layout.axes():
            path = f"axes/{axis}.txt"
            n_entries = self._layout.axis_length(axis)
            self._list(f"axes/{axis}", compact_json({"format": "axis", "n_entries": n_entries}))
            open_axis = self._opener(path)
            with closing(open_axis()) as content:
                yield FlatFile(path, open_axis, content.size, n_entries)

    def _scalars(self, names: Sequence[str]) -> Iterator[Document]:
        for name in names:
            path = f"scalars/{name}.json"
            self._used.add(path)
            if self._selection.holds(f"scalars/{name}"):
                raw = self._archive.read_small(self._layout.path(path), MAX_DESCRIPTOR_BYTES)
                parse_json(raw, self._layout.where(path))
                self._list(f"scalars/{name}", raw)
                yield Document(path, raw)

    def _property(self, key: PropertyKey) -> Iterator[Planned]:
        raw, descriptor = self._layout.descriptor(key)
        self._used.add(key.path + ".json")
        where = self._layout.where(key.path + ".json")
        for axis in key.axes:
            if axis not in self._layout.axes():
                raise CorruptDescriptor(f"{where}: there is no axis {axis!r}")
        sources = list(self._sources(key, descriptor))
        if not self._selection.holds(key.path):
            return
        written: list[Component] = []
        payloads: list[Planned] = []
        for component, open_flat in sources:
            complete, payload = self._component(key, component, open_flat)
            written.append(complete)
            payloads.append(payload)
        data = _describe(raw, descriptor, written, where)
        self._list(key.path, data)
        yield Document(key.path + ".json", data)
        yield from payloads

    def _sources(self, key: PropertyKey, descriptor: Descriptor) -> Iterator[tuple[Component, Open]]:
        """Each component that has a file, and how its flat bytes are opened."""
        for component in descriptor.components:
            if descriptor.is_legacy and component.key == "nzval" and component.eltype == "Bool":
                # In this form the values are true and not stored; old writers did store some.
                try:
                    self._archive.open(self._layout.path(key.path + component.flat_suffix)).close()
                except NotFound:
                    continue
            suffix = component.flat_suffix if component.packing is None else component.packed_suffix
            yield component, self._opener(key.path + suffix, key, component)

    def _opener(self, path: str, key: PropertyKey | None = None, component: Component | None = None) -> Open:
        self._used.add(path)
        full, where = self._layout.path(path), self._layout.where(path)
        if key is None or component is None or component.packing is None:
            return lambda: self._archive.open(full)
        name = path.rpartition("/")[2]
        opener = PackedOpener(self._tree, PackedComponent(key, component, name), full, None)
        width = itemsize(component.eltype, where) or 1
        self._cache.limit_bytes = max(
            self._cache.limit_bytes, min(MAX_CHUNK_BYTES, 2 * width * math.prod(component.packing.chunk_shape))
        )
        return lambda: opener.open(File(name, _NOWHERE, None, 0, opener))

    def _component(self, key: PropertyKey, component: Component, open_flat: Open) -> tuple[Component, Planned]:
        """The component as it will be described, and its file."""
        where = self._layout.where(key.path + component.flat_suffix)
        width = itemsize(component.eltype, where)
        try:
            with closing(open_flat()) as content:
                size = content.size
                n_elements = component.n_elements
                if component.key != DENSE and n_elements is None:
                    n_elements = _count_lines(content) if width is None else _whole(size, width, where)
        except NotFound as error:
            raise CorruptDescriptor(f"{error}: its descriptor claims a {component.key or 'dense'} component") from error
        complete = Component(component.key, component.eltype, n_elements, None)
        shape = self._layout.shape(key, complete)
        n_values = math.prod(shape)
        if width is not None and size != n_values * width:
            raise CorruptDescriptor(f"{where}: {size} bytes, expected {n_values * width} for shape {list(shape)}")
        chunk_shape = None if self._settings is None else self._settings.chunk_shape(shape, width)
        if self._settings is None or chunk_shape is None:
            n_lines = n_values if width is None else None
            return complete, FlatFile(key.path + component.flat_suffix, open_flat, size, n_lines)
        settings = self._settings
        packing = Packing("indexed+zipped", chunk_shape, settings.compression, settings.level)
        grid = make_grid(shape, chunk_shape, width or 1, MAX_CHUNK_BYTES, where)
        if CODECS[settings.compression].zip_method == METHOD_DEFLATE and grid.n_chunks > _GZIP_MAX_CHUNKS:
            raise UnsupportedFormat(
                f"{where}: {grid.n_chunks} chunks, gzip can name {_GZIP_MAX_CHUNKS}; choose larger chunks"
            )
        packed = Component(component.key, component.eltype, n_elements, packing)
        return packed, ShardFile(key.path + component.packed_suffix, open_flat, size, shape, width, packing)

    def _list(self, path: str, data: bytes) -> None:
        self._metadata.append(compact_json(path).rstrip(b"\n") + b":" + minify(data))

    def _directories(self) -> Iterator[str]:
        axes = self._layout.axes()
        yield from SECTIONS
        for axis in axes:
            yield f"vectors/{axis}"
        for rows in axes:
            for columns in axes:
                yield f"matrices/{rows}/{columns}"

    def _left_out(self) -> Iterator[str]:
        for entry in self._archive.listdir(self._layout.root):
            if not entry.is_directory:
                if entry.name not in self._used:
                    yield entry.name
            elif entry.name in SECTIONS:
                yield from self._left_out_below(entry.name)

    def _left_out_below(self, path: str) -> Iterator[str]:
        for entry in self._archive.listdir(self._layout.path(path)):
            below = join(path, entry.name)
            if entry.is_directory:
                yield from self._left_out_below(below)
            elif below not in self._used:
                yield below


def _no_children(directory: Directory) -> dict[str, Directory | File]:
    return {}


_NOWHERE = Directory("", None, 0, _no_children)
"""Contents are opened for a file, which must be somewhere."""


def _count_lines(content: Content) -> int:
    """Of a component of version 1.0, which is never packed: its content is the file itself."""
    return count_lines(cast(ByteSource, content))


def _whole(size: int, width: int, where: str) -> int:
    if size % width:
        raise CorruptDescriptor(f"{where}: {size} bytes are no whole number of values of {width}")
    return size // width


def _describe(raw: bytes, descriptor: Descriptor, components: Sequence[Component], where: str) -> bytes:
    """The descriptor for `components`, in the form of version 1.1; `raw` itself where it says the same."""
    packed = any(component.packing is not None for component in components)
    if not packed and not descriptor.is_packed and not descriptor.is_legacy:
        return raw
    fields = parse_json(raw, where)
    if descriptor.is_legacy:
        fields = {"format": "sparse"}
        fields |= {component.key: _legacy_component(component) for component in components}
    for component in components:
        if component.key == DENSE:
            fields = _repacked(fields, component.packing)
        else:
            inner = fields[component.key]
            assert isinstance(inner, dict)  # or the descriptor would not have been parsed
            fields[component.key] = _repacked(inner, component.packing)
    return compact_json(fields)


def _legacy_component(component: Component) -> dict[str, JSON]:
    return {"format": "dense", "eltype": component.eltype, "n_elements": component.n_elements}


def _repacked(fields: dict[str, JSON], packing: Packing | None) -> dict[str, JSON]:
    fields = {key: value for key, value in fields.items() if key not in PACKED_KEYS}
    if packing is not None:
        fields |= {
            "packed_format": packing.packed_format,
            "chunk_shape": list(packing.chunk_shape),
            "compression": packing.compression,
            "compression_level": packing.compression_level,
            "index_location": "start",
        }
    return fields
