"""One vector or matrix: its descriptor, its files, and what is in them.

Owns what belongs together in a property. Must not know how shards are laid out. Belongs to one thread.

Facts: FilesFormat documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from dafmount.check.blocks import Shard
from dafmount.check.context import FAULTS, Context, file_blocks
from dafmount.check.descriptors import descriptor_faults
from dafmount.check.findings import Sink
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
from dafmount.daf.catalog import Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import JSON, SPARSE_KEYS, parse_descriptor
from dafmount.daf.eltype import NUMERIC, is_string, itemsize
from dafmount.source.base import ByteSource, Entry
from dafmount.tree.build import open_shard, packed_content
from dafmount.tree.content import Content

_numbers = count(1)
"""Tell the chunks of one file from those of another in the shared cache."""


class _Part(NamedTuple):
    """A component and the file that holds it."""

    component: Component
    path: str
    sink: Sink
    entry: Entry | None


class PropertyCheck:
    """The check of one vector or matrix."""

    def __init__(
        self, context: Context, version: tuple[int, int], key: PropertyKey, entries: Mapping[str, Entry]
    ) -> None:
        """`version` is that of daf.json, `entries` those of the property's directory."""
        self._context = context
        self._layout = context.layout
        self._version = version
        self._key = key
        self._entries = entries
        self._sink = context.sink(f"{key.path}.json")

    def read(self) -> dict[str, JSON] | None:
        """The descriptor's JSON; None where it cannot be read, which was reported."""
        self._context.counts.files += 1
        return self._context.read_json(f"{self._key.path}.json", self._sink)

    def run(self, fields: Mapping[str, JSON], lengths: list[int] | None) -> set[str]:
        """Check all, given the descriptor's JSON; the names of the payload files that it speaks of.

        `lengths` are those of the axes; without them only the descriptor is checked.
        """
        try:
            descriptor = parse_descriptor(json.dumps(fields).encode(), len(self._key.axes), f"{self._key.path}.json")
        except FAULTS as error:
            self._sink.error(error)
            return self.possible_names()
        for fault in descriptor_faults(fields, descriptor):
            self._sink.error(fault)
        is_new = descriptor.is_packed or (not descriptor.is_legacy and descriptor.layout == "sparse")
        if self._version == (1, 0) and is_new:
            self._sink.error("is in the form of FilesDaf 1.1, but daf.json says 1.0")
        parts = [self._part(component) for component in descriptor.components]
        if lengths is not None:
            try:
                self._check_parts(descriptor, parts, lengths)
            except FAULTS as error:
                self._sink.error(error)
        self._sink.close()
        return {part.path.rpartition("/")[2] for part in parts}

    def possible_names(self) -> set[str]:
        """Files of the property, as far as that can be told without its descriptor."""
        suffixes = ["", ".data", ".txt", ".nztxt"] + [f".{key}" for key in SPARSE_KEYS[len(self._key.axes)]]
        return {self._key.name + suffix + packed for suffix in suffixes for packed in ("", ".zip")}

    def _part(self, component: Component) -> _Part:
        suffix = component.packed_suffix if component.packing else component.flat_suffix
        path = "/".join([*self._key.path.split("/")[:-1], self._key.name + suffix])
        return _Part(component, path, self._context.sink(path), self._entries.get(self._key.name + suffix))

    def _check_parts(self, descriptor: Descriptor, parts: list[_Part], lengths: list[int]) -> None:
        if descriptor.layout == "sparse":
            self._check_sparse({part.component.key: self._with_count(part) for part in parts}, lengths)
            return
        for part in parts:
            self._check_component(part, tuple(lengths), self._truths(part))

    # Sparse properties.

    def _with_count(self, part: _Part) -> _Part:
        """Version 1.0 leaves it to the files to tell the number of their values."""
        component = part.component
        width = itemsize(component.eltype, part.path)
        if component.n_elements is not None or width is None or part.entry is None or part.entry.is_directory:
            return part
        size = part.entry.size
        if size is None:
            source = self._layout.archive.open(self._layout.path(part.path))
            size = source.size
            source.close()
        return part._replace(component=replace(component, n_elements=size // width))

    def _check_sparse(self, parts: dict[str, _Part], lengths: list[int]) -> None:
        values, indices = parts.get("nzval"), parts["nzind" if len(lengths) == 1 else "rowval"]
        n_values = indices.component.n_elements
        self._check_counts(parts, n_values, lengths)
        if n_values is None:
            self._say_missing(indices)
            return
        is_sound = True
        pointers = parts.get("colptr")
        if pointers is not None:
            checker = None if self._context.quick else Pointers(pointers.sink, n_values)
            self._check_component(pointers, (lengths[1] + 1,), checker)
            is_sound = pointers.sink.is_clean
        if values is not None and not (self._is_legacy_bool(values) and values.entry is None):
            self._check_component(values, (n_values,), self._truths(values))
        self._check_component(indices, (n_values,), self._index_check(indices, pointers if is_sound else None, lengths))

    def _index_check(self, part: _Part, pointers: _Part | None, lengths: list[int]) -> ValueCheck | None:
        if self._context.quick:
            return None
        if len(lengths) == 1:
            return Ascending(part.sink, lengths[0])
        if pointers is None:
            return ByColumn(part.sink, lengths[0], None)
        starts = self._column_starts(pointers, lengths[1] + 1)
        return ByColumn(part.sink, lengths[0], lambda: ColumnStarts(starts))

    def _is_legacy_bool(self, part: _Part) -> bool:
        return part.component.n_elements is None and part.component.eltype == "Bool"

    def _check_counts(self, parts: dict[str, _Part], n_values: int | None, lengths: list[int]) -> None:
        expected = {"nzind": n_values, "rowval": n_values, "nzval": n_values}
        if len(lengths) == 2:
            expected["colptr"] = lengths[1] + 1
        for key, part in parts.items():
            found, wanted = part.component.n_elements, expected[key]
            if found is not None and wanted is not None and found != wanted:
                self._sink.error(f"{key} has {found} values, expected {wanted}")
        most = lengths[0] if len(lengths) == 1 else lengths[0] * lengths[1]
        if n_values is not None and n_values > most:
            self._sink.error(f"{n_values} values are more than the {most} that there can be")

    def _column_starts(self, part: _Part, n: int) -> Iterator[Integers]:
        """colptr, once more, block by block."""
        source = self._layout.archive.open(self._layout.path(part.path))
        content: Content = source
        try:
            if part.component.packing is not None:
                content = packed_content(source, (n,), part.component, self._context.style, next(_numbers))
            dtype = np.dtype(NUMERIC[part.component.eltype])
            for block in file_blocks(content):
                yield integers(np.frombuffer(block, dtype))
        finally:
            content.close()

    # Components.

    def _truths(self, part: _Part) -> ValueCheck | None:
        is_flat_bool = part.component.eltype == "Bool" and part.component.packing is None
        return Truths(part.sink) if is_flat_bool and not self._context.quick else None

    def _check_component(self, part: _Part, shape: tuple[int, ...], values: ValueCheck | None) -> None:
        self._context.counts.files += 1
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
        except FAULTS as error:
            part.sink.error(error)
        part.sink.close()

    def _say_missing(self, part: _Part) -> None:
        part.sink.error(f"there is no such file, which {self._key.name}.json speaks of")

    def _check_packed(self, part: _Part, source: ByteSource, shape: tuple[int, ...], values: ValueCheck | None) -> None:
        packing = part.component.packing
        assert packing is not None
        grid, _ = open_shard(source, shape, part.component, self._context.style)
        self._context.counts.shards += 1
        self._context.counts.chunks += grid.n_chunks
        shard = Shard(source, grid, packing, part.component.eltype, self._context.style.max_chunk_bytes)
        check_shard(shard, part.sink, self._context.work, values, quick=self._context.quick)

    def _check_text(self, part: _Part, source: ByteSource, shape: tuple[int, ...]) -> None:
        if self._context.quick:
            return
        n_lines = 1
        for n in shape:
            n_lines *= n
        text = Lines(part.sink, n_lines)
        for block in self._context.read_blocks(source):
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
        if self._context.quick:
            return
        position = 0
        for block in self._context.read_blocks(source):
            numbers = np.frombuffer(block, dtype, len(block) // dtype.itemsize)
            if values is not None:
                values.feed(position, numbers)
            position += len(numbers)
        if values is not None:
            values.finish()
