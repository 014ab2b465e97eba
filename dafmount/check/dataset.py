"""One Daf: its version, axes, scalars, properties and metadata.json, each against the others.

Owns what belongs together in a Daf. Must not know how shards or ZIP entries are laid out. Belongs to one thread, which
hands the heavy parts to `Work`.

Facts: FilesFormat documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from dafmount.check.blocks import Shard
from dafmount.check.descriptors import descriptor_faults, scalar_faults
from dafmount.check.findings import Emit, Sink
from dafmount.check.shards import check_shard
from dafmount.check.values import (
    Ascending,
    ByColumn,
    ColumnStarts,
    Integers,
    Lines,
    Pointers,
    Truths,
    ValueCheck,
    integers,
)
from dafmount.check.work import Work
from dafmount.daf.catalog import Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import JSON, SPARSE_KEYS, parse_descriptor, parse_json
from dafmount.daf.eltype import NUMERIC, is_string, itemsize
from dafmount.daf.files_layout import MARKER, MAX_DESCRIPTOR_BYTES, METADATA, FilesLayout
from dafmount.errors import Corrupt, NotFound, UnsupportedFormat
from dafmount.source.base import ByteSource, Entry
from dafmount.tree.build import Style, open_shard, packed_content
from dafmount.tree.content import Content

BLOCK_BYTES = 4 << 20
MAX_METADATA_BYTES = 1 << 28
_AXES_INDEX = "metadata.json"
"""dafr lists the axes in a file of this name among them."""

_MAX_LISTED = 3
_FAULTS = (Corrupt, NotFound, UnsupportedFormat, OSError)


@dataclass(slots=True)
class Counts:
    """How much was checked."""

    data_sets: int = 0
    axes: int = 0
    scalars: int = 0
    properties: int = 0
    files: int = 0
    shards: int = 0
    chunks: int = 0


@dataclass(slots=True)
class DatasetCheck:
    """The check of one Daf."""

    layout: FilesLayout
    style: Style
    emit: Emit
    work: Work
    quick: bool
    with_metadata: bool
    """Whether metadata.json counts: in a ZIP archive readers ignore it."""
    counts: Counts
    _described: dict[str, JSON] = field(default_factory=dict)
    """What metadata.json must say."""
    _unknown_axes: set[str] = field(default_factory=set)
    """Axes whose length cannot be told, which was said once."""
    _version: tuple[int, int] = (1, 1)

    def run(self) -> None:
        """Check everything; raises UnsupportedFormat for a version that is not read."""
        self.counts.data_sets += 1
        self._check_version()
        self._check_axes()
        self._check_scalars()
        for axes in self._property_directories():
            self._check_directory(axes)
        if self.with_metadata:
            self._check_metadata()

    def _sink(self, path: str) -> Sink:
        return Sink(self.layout.archive.name, self.layout.path(path), self.emit)

    def _check_version(self) -> None:
        try:
            self._version = self.layout.version()
        except (Corrupt, OSError) as error:
            self._sink(MARKER).error(error)

    def _entries(self, path: str) -> list[Entry]:
        try:
            return self.layout.archive.listdir(self.layout.path(path))
        except NotFound:
            return []
        except OSError as error:
            self._sink(path).error(error)
            return []

    # Axes and scalars.

    def _check_axes(self) -> None:
        for entry in self._entries("axes"):
            path = f"axes/{entry.name}"
            if entry.is_directory or not entry.name.endswith(".txt") or entry.name == ".txt":
                if entry.name != _AXES_INDEX:
                    self._sink(path).warning("belongs to no axis: an axis is a file NAME.txt")
                continue
            axis = entry.name.removesuffix(".txt")
            sink = self._sink(path)
            self.counts.axes += 1
            self.counts.files += 1
            try:
                n_entries = self.layout.axis_length(axis)
                self._described[f"axes/{axis}"] = {"format": "axis", "n_entries": n_entries}
                if not self.quick:
                    self._check_axis(self.layout.path(path), sink)
            except _FAULTS as error:
                self._unknown_axes.add(axis)
                sink.error(error)
            sink.close()

    def _check_axis(self, path: str, sink: Sink) -> None:
        source = self.layout.archive.open(path)
        try:
            text = Lines(sink, None)
            for block in self._read_blocks(source):
                text.feed(block)
            text.finish()
            for name in _repeated(source):
                sink.error(f"the entry {name.decode('utf-8', 'replace')!a} occurs more than once, expected unique ones")
        finally:
            source.close()

    def _read_blocks(self, source: Content, step: int = BLOCK_BYTES) -> Iterator[bytes]:
        for block in _blocks(source, step):
            self.work.advance(len(block))
            yield block

    def _check_scalars(self) -> None:
        for entry in self._entries("scalars"):
            path = f"scalars/{entry.name}"
            sink = self._sink(path)
            if entry.is_directory or not entry.name.endswith(".json"):
                sink.warning("belongs to no scalar: a scalar is a file NAME.json")
                continue
            self.counts.scalars += 1
            self.counts.files += 1
            fields = self._read_json(path, sink)
            if fields is not None:
                self._described[path.removesuffix(".json")] = fields
                for fault in scalar_faults(fields):
                    sink.error(fault)

    def _read_json(self, path: str, sink: Sink, limit: int = MAX_DESCRIPTOR_BYTES) -> dict[str, JSON] | None:
        try:
            raw = self.layout.archive.read_small(self.layout.path(path), limit)
            self.work.advance(len(raw))
            fields = parse_json(raw, path)
            raw.decode("utf-8")
            return fields
        except UnicodeDecodeError as error:
            sink.error(f"no valid UTF-8: {error.reason}")
        except _FAULTS as error:
            sink.error(error)
        return None

    # Properties.

    def _property_directories(self) -> Iterator[tuple[str, ...]]:
        axes = set(self.layout.axes())
        yield from ((axis,) for axis in self._axis_directories("vectors", axes))
        for rows in self._axis_directories("matrices", axes):
            yield from ((rows, columns) for columns in self._axis_directories(f"matrices/{rows}", axes))

    def _axis_directories(self, path: str, axes: set[str]) -> Iterator[str]:
        for entry in self._entries(path):
            sink = self._sink(f"{path}/{entry.name}")
            if not entry.is_directory:
                sink.warning("belongs to no property: expected a directory named for an axis")
                continue
            if entry.name not in axes:
                sink.error(f"there is no axis {entry.name!r}, the axes are {', '.join(sorted(axes)) or 'none'}")
                continue
            yield entry.name

    def _check_directory(self, axes: tuple[str, ...]) -> None:
        path = PropertyKey(axes, "").path.rstrip("/")
        entries = {entry.name: entry for entry in self._entries(path)}
        names = [name for name, entry in entries.items() if not entry.is_directory]
        used = set()
        for name in names:
            if not name.endswith(".json"):
                continue
            key = PropertyKey(axes, name.removesuffix(".json"))
            self.counts.properties += 1
            used.add(name)
            used.update(_PropertyCheck(self, key, entries).run())
        for name in entries:
            if name not in used:
                self._check_unused(axes, path, name, used)

    def _check_unused(self, axes: tuple[str, ...], path: str, name: str, used: set[str]) -> None:
        sink = self._sink(f"{path}/{name}")
        for key in SPARSE_KEYS[len(axes)]:
            for suffix in (f".{key}", f".{key}.zip", ".nztxt"):
                owner = name.removesuffix(suffix)
                if owner != name and f"{owner}.json" in used and not self._is_packed_twin(name, used):
                    sink.error(f"{owner}.json does not speak of it, expected a descriptor of all components")
                    return
        sink.warning("belongs to no property: no descriptor speaks of it")

    def _is_packed_twin(self, name: str, used: set[str]) -> bool:
        """Whether the same component is there in the other form."""
        return f"{name}.zip" in used or (name.removesuffix(".zip") in used and name.endswith(".zip"))

    def describe(self, key: PropertyKey, fields: Mapping[str, JSON]) -> None:
        """What metadata.json must say of a property."""
        self._described[key.path] = dict(fields)

    def lengths(self, axes: tuple[str, ...]) -> list[int] | None:
        """The lengths of axes; None where one cannot be told."""
        return None if self._unknown_axes & set(axes) else [self.layout.axis_length(axis) for axis in axes]

    @property
    def version(self) -> tuple[int, int]:
        """What daf.json says."""
        return self._version

    # metadata.json.

    def _check_metadata(self) -> None:
        sink = self._sink(METADATA)
        try:
            self.layout.archive.open(self.layout.path(METADATA)).close()
        except NotFound:
            return
        except (Corrupt, OSError) as error:
            sink.error(error)
            return
        self.counts.files += 1
        found = self._read_json(METADATA, sink, MAX_METADATA_BYTES)
        if found is None:
            return
        for path, described in self._described.items():
            if path not in found:
                sink.error(f"does not list {path}")
            elif not _same(found[path], described):
                sink.error(
                    f"says {json.dumps(found[path])[:200]} of {path}, its own file {json.dumps(described)[:200]}"
                )
        for path in found:
            if path not in self._described:
                sink.error(f"lists {path}, which is not there or cannot be read")
        sink.close()


class _Part(NamedTuple):
    """A component and the file that holds it."""

    component: Component
    path: str
    sink: Sink
    entry: Entry | None


class _PropertyCheck:
    """The check of one vector or matrix."""

    def __init__(self, check: DatasetCheck, key: PropertyKey, entries: Mapping[str, Entry]) -> None:
        self._check = check
        self._layout = check.layout
        self._key = key
        self._entries = entries

    def run(self) -> set[str]:
        """Check all; the names of the files that belong to the property."""
        path = f"{self._key.path}.json"
        sink = self._check._sink(path)
        self._check.counts.files += 1
        fields = self._check._read_json(path, sink)
        if fields is None:
            return self._possible_names()
        try:
            raw = json.dumps(fields).encode()
            descriptor = parse_descriptor(raw, len(self._key.axes), path)
        except _FAULTS as error:
            sink.error(error)
            return self._possible_names()
        self._check.describe(self._key, fields)
        for fault in descriptor_faults(fields, descriptor):
            sink.error(fault)
        if self._check.version == (1, 0) and (
            descriptor.is_packed or (not descriptor.is_legacy and descriptor.layout == "sparse")
        ):
            sink.error("is in the form of FilesDaf 1.1, but daf.json says 1.0")
        parts = [self._part(component) for component in descriptor.components]
        self._check_parts(descriptor, parts, sink)
        sink.close()
        return {part.path.rpartition("/")[2] for part in parts}

    def _possible_names(self) -> set[str]:
        """Files of the property, as far as that can be told without its descriptor."""
        suffixes = ["", ".data", ".txt", ".nztxt"] + [f".{key}" for key in SPARSE_KEYS[len(self._key.axes)]]
        return {self._key.name + suffix + packed for suffix in suffixes for packed in ("", ".zip")}

    def _part(self, component: Component) -> _Part:
        suffix = component.packed_suffix if component.packing else component.flat_suffix
        path = "/".join([*self._key.path.split("/")[:-1], self._key.name + suffix])
        return _Part(component, path, self._check._sink(path), self._entries.get(self._key.name + suffix))

    def _check_parts(self, descriptor: Descriptor, parts: list[_Part], sink: Sink) -> None:
        lengths = self._check.lengths(self._key.axes)
        if lengths is None:
            return
        if descriptor.layout == "sparse":
            known = {part.component.key: self._with_count(part, len(parts), lengths) for part in parts}
            self._check_sparse(known, lengths, sink)
            return
        for part in parts:
            self._check_component(part, tuple(lengths), self._truths(part))

    # Sparse properties.

    def _with_count(self, part: _Part, n_parts: int, lengths: list[int]) -> _Part:
        """Version 1.0 leaves it to the files to tell the number of their values."""
        component = part.component
        if component.n_elements is not None or part.entry is None or part.entry.is_directory:
            return part
        width = itemsize(component.eltype, part.path)
        size = part.entry.size
        if width is None or size is None:
            return part
        return part._replace(component=replace(component, n_elements=size // width))

    def _check_sparse(self, parts: dict[str, _Part], lengths: list[int], sink: Sink) -> None:
        values, indices = parts.get("nzval"), parts["nzind" if len(lengths) == 1 else "rowval"]
        n_values = indices.component.n_elements
        self._check_counts(parts, n_values, lengths, sink)
        if n_values is None:
            self._say_missing(indices)
            return
        is_sound = True
        pointers = parts.get("colptr")
        if pointers is not None:
            checker = None if self._check.quick else Pointers(pointers.sink, n_values)
            self._check_component(pointers, (lengths[1] + 1,), checker)
            is_sound = pointers.sink.is_clean
        if values is not None and not (self._is_legacy_bool(values) and values.entry is None):
            self._check_component(values, (n_values,), self._truths(values))
        self._check_component(indices, (n_values,), self._index_check(indices, pointers if is_sound else None, lengths))

    def _index_check(self, part: _Part, pointers: _Part | None, lengths: list[int]) -> ValueCheck | None:
        if self._check.quick:
            return None
        if len(lengths) == 1:
            return Ascending(part.sink, lengths[0])
        if pointers is None:
            return ByColumn(part.sink, lengths[0], None)
        starts = self._column_starts(pointers, lengths[1] + 1)
        return ByColumn(part.sink, lengths[0], lambda: ColumnStarts(starts))

    def _is_legacy_bool(self, part: _Part) -> bool:
        return part.component.n_elements is None and part.component.eltype == "Bool"

    def _check_counts(self, parts: dict[str, _Part], n_values: int | None, lengths: list[int], sink: Sink) -> None:
        expected = {"nzind": n_values, "rowval": n_values, "nzval": n_values}
        if len(lengths) == 2:
            expected["colptr"] = lengths[1] + 1
        for key, part in parts.items():
            found, wanted = part.component.n_elements, expected[key]
            if found is not None and wanted is not None and found != wanted:
                sink.error(f"{key} has {found} values, expected {wanted}")
        most = lengths[0] if len(lengths) == 1 else lengths[0] * lengths[1]
        if n_values is not None and n_values > most:
            sink.error(f"{n_values} values are more than the {most} that there can be")

    def _column_starts(self, part: _Part, n: int) -> Iterator[Integers]:
        """colptr, once more, block by block."""
        source = self._layout.archive.open(self._layout.path(part.path))
        content: Content = source
        try:
            if part.component.packing is not None:
                content = packed_content(source, (n,), part.component, self._check.style, _number_of(part.path))
            dtype = np.dtype(NUMERIC[part.component.eltype])
            for block in _blocks(content, BLOCK_BYTES):
                yield integers(np.frombuffer(block, dtype))
        finally:
            content.close()

    # Components.

    def _truths(self, part: _Part) -> ValueCheck | None:
        is_flat_bool = part.component.eltype == "Bool" and part.component.packing is None
        return Truths(part.sink) if is_flat_bool and not self._check.quick else None

    def _check_component(self, part: _Part, shape: tuple[int, ...], values: ValueCheck | None) -> None:
        self._check.counts.files += 1
        if part.entry is None or part.entry.is_directory:
            self._say_missing(part)
            return
        try:
            source = self._layout.archive.open(self._layout.path(part.path))
            try:
                if part.component.packing is not None:
                    self._check_packed(part, source, shape, values)
                elif is_string(part.component.eltype):
                    self._check_text(part, source, shape)
                else:
                    self._check_flat(part, source, shape, values)
            finally:
                source.close()
        except _FAULTS as error:
            part.sink.error(error)
        part.sink.close()

    def _say_missing(self, part: _Part) -> None:
        part.sink.error(f"there is no such file, which {self._key.name}.json speaks of")

    def _check_packed(self, part: _Part, source: ByteSource, shape: tuple[int, ...], values: ValueCheck | None) -> None:
        packing = part.component.packing
        assert packing is not None
        grid, _ = open_shard(source, shape, part.component, self._check.style)
        self._check.counts.shards += 1
        self._check.counts.chunks += grid.n_chunks
        shard = Shard(source, grid, packing, part.component.eltype, self._check.style.max_chunk_bytes)
        check_shard(shard, part.sink, self._check.work, values, quick=self._check.quick)

    def _check_text(self, part: _Part, source: ByteSource, shape: tuple[int, ...]) -> None:
        if self._check.quick:
            return
        n_lines = 1
        for n in shape:
            n_lines *= n
        text = Lines(part.sink, n_lines)
        for block in self._check._read_blocks(source):
            text.feed(block)
        text.finish()

    def _check_flat(self, part: _Part, source: ByteSource, shape: tuple[int, ...], values: ValueCheck | None) -> None:
        dtype = np.dtype(NUMERIC[part.component.eltype])
        expected = dtype.itemsize
        for n in shape:
            expected *= n
        if source.size != expected:
            shown = " x ".join(map(str, shape))
            part.sink.error(f"{source.size} bytes, expected {expected}: {shown} values of {dtype.itemsize}")
        if self._check.quick:
            return
        position = 0
        for block in self._check._read_blocks(source):
            numbers = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
            if values is not None:
                values.feed(position, numbers)
            position += len(numbers)
        if values is not None:
            values.finish()


def _blocks(source: Content, step: int) -> Iterator[bytes]:
    size = source.size
    for offset in range(0, size, step):
        yield bytes(source.read(offset, min(step, size - offset)))


def _number_of(path: str) -> int:
    """A number that tells a file's chunks from those of the one read before it in the shared cache."""
    return hash(path) & 0xFFFFFF


def _lines(source: Content) -> Iterator[bytes]:
    rest = b""
    for block in _blocks(source, BLOCK_BYTES):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _repeated(source: Content) -> list[bytes]:
    """Some of the lines that occur more than once; keeps a hash of each line, and compares only those that agree."""
    hashes = np.fromiter(chain(map(hash, _lines(source))), np.int64)
    hashes.sort()
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return []
    seen: set[bytes] = set()
    found: list[bytes] = []
    for line in _lines(source):
        if hash(line) in suspects:
            if line in seen and line not in found:
                found.append(line)
                if len(found) == _MAX_LISTED:
                    break
            seen.add(line)
    return found


def _same(one: JSON, other: JSON) -> bool:
    """Equal JSON; numbers of different types differ."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
