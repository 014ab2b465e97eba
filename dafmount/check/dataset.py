"""One Daf: its version, axes, scalars, properties and metadata.json, each against the others.

Owns what belongs together in a Daf. Must not know what is in a property's files. Belongs to one thread.

Facts: FilesFormat documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from dafmount.check.context import FAULTS, Context, file_blocks
from dafmount.check.descriptors import scalar_faults
from dafmount.check.findings import Sink
from dafmount.check.properties import PropertyCheck
from dafmount.check.values import Lines
from dafmount.daf.catalog import PropertyKey
from dafmount.daf.descriptor import JSON, SPARSE_KEYS
from dafmount.daf.files_layout import MARKER, METADATA
from dafmount.errors import Corrupt, NotFound
from dafmount.source.base import Entry
from dafmount.tree.content import Content

MAX_METADATA_BYTES = 1 << 28
_AXES_INDEX = "metadata.json"
"""dafr lists the axes in a file of this name among them."""

_MAX_LISTED = 3


@dataclass(slots=True)
class DatasetCheck:
    """The check of one Daf."""

    context: Context
    with_metadata: bool
    """Whether metadata.json counts: in a ZIP archive readers ignore it."""
    _described: dict[str, JSON] = field(default_factory=dict)
    """What metadata.json must say."""
    _unknown_axes: set[str] = field(default_factory=set)
    """Axes whose length cannot be told, which was said once."""
    _version: tuple[int, int] = (1, 1)

    def run(self) -> None:
        """Check everything; raises UnsupportedFormat for a version that is not read."""
        self.context.counts.data_sets += 1
        self._check_version()
        self._check_axes()
        self._check_scalars()
        for axes in self._property_directories():
            self._check_directory(axes)
        if self.with_metadata:
            self._check_metadata()

    def _check_version(self) -> None:
        try:
            self._version = self.context.layout.version()
        except (Corrupt, OSError) as error:
            self.context.sink(MARKER).error(error)

    # Axes and scalars.

    def _check_axes(self) -> None:
        for entry in self.context.entries("axes"):
            path = f"axes/{entry.name}"
            if entry.is_directory or not entry.name.endswith(".txt") or entry.name == ".txt":
                if entry.name != _AXES_INDEX:
                    self.context.sink(path).warning("belongs to no axis: an axis is a file NAME.txt")
                continue
            axis = entry.name.removesuffix(".txt")
            sink = self.context.sink(path)
            self.context.counts.axes += 1
            self.context.counts.files += 1
            try:
                n_entries = self.context.layout.axis_length(axis)
                self._described[f"axes/{axis}"] = {"format": "axis", "n_entries": n_entries}
                if not self.context.quick:
                    self._check_axis(self.context.layout.path(path), sink)
            except FAULTS as error:
                self._unknown_axes.add(axis)
                sink.error(error)
            sink.close()

    def _check_axis(self, path: str, sink: Sink) -> None:
        source = self.context.layout.archive.open(path)
        try:
            text = Lines(sink, None)
            for block in self.context.read_blocks(source):
                text.feed(block)
            text.finish()
            for name in _repeated(source):
                sink.error(f"the entry {name.decode('utf-8', 'replace')!a} occurs more than once, expected unique ones")
        finally:
            source.close()

    def _check_scalars(self) -> None:
        for entry in self.context.entries("scalars"):
            path = f"scalars/{entry.name}"
            sink = self.context.sink(path)
            if entry.is_directory or not entry.name.endswith(".json"):
                sink.warning("belongs to no scalar: a scalar is a file NAME.json")
                continue
            self.context.counts.scalars += 1
            self.context.counts.files += 1
            fields = self.context.read_json(path, sink)
            if fields is not None:
                self._described[path.removesuffix(".json")] = fields
                for fault in scalar_faults(fields):
                    sink.error(fault)

    # Properties.

    def _property_directories(self) -> Iterator[tuple[str, ...]]:
        axes = set(self.context.layout.axes())
        yield from ((axis,) for axis in self._axis_directories("vectors", axes))
        for rows in self._axis_directories("matrices", axes):
            yield from ((rows, columns) for columns in self._axis_directories(f"matrices/{rows}", axes))

    def _axis_directories(self, path: str, axes: set[str]) -> Iterator[str]:
        for entry in self.context.entries(path):
            sink = self.context.sink(f"{path}/{entry.name}")
            if not entry.is_directory:
                sink.warning("belongs to no property: expected a directory named for an axis")
                continue
            if entry.name not in axes:
                sink.error(f"there is no axis {entry.name!r}, the axes are {', '.join(sorted(axes)) or 'none'}")
                continue
            yield entry.name

    def _check_directory(self, axes: tuple[str, ...]) -> None:
        path = PropertyKey(axes, "").path.rstrip("/")
        entries = {entry.name: entry for entry in self.context.entries(path)}
        names = [name for name, entry in entries.items() if not entry.is_directory]
        used = set()
        for name in names:
            if not name.endswith(".json"):
                continue
            key = PropertyKey(axes, name.removesuffix(".json"))
            self.context.counts.properties += 1
            used.add(name)
            used.update(self._check_property(key, entries))
        for name in entries:
            if name not in used:
                self._check_unused(axes, path, name, used)

    def _check_property(self, key: PropertyKey, entries: Mapping[str, Entry]) -> set[str]:
        """The names of the files that belong to the property."""
        check = PropertyCheck(self.context, self._version, key, entries)
        fields = check.read()
        if fields is None:
            return check.possible_names()
        self._described[key.path] = fields
        return check.run(fields, self._lengths(key.axes))

    def _check_unused(self, axes: tuple[str, ...], path: str, name: str, used: set[str]) -> None:
        sink = self.context.sink(f"{path}/{name}")
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

    def _lengths(self, axes: tuple[str, ...]) -> list[int] | None:
        """The lengths of axes; None where one cannot be told."""
        if self._unknown_axes & set(axes):
            return None
        return [self.context.layout.axis_length(axis) for axis in axes]

    # metadata.json.

    def _check_metadata(self) -> None:
        sink = self.context.sink(METADATA)
        try:
            self.context.layout.archive.open(self.context.layout.path(METADATA)).close()
        except NotFound:
            return
        except (Corrupt, OSError) as error:
            sink.error(error)
            return
        self.context.counts.files += 1
        found = self.context.read_json(METADATA, sink, MAX_METADATA_BYTES)
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


def _lines(source: Content) -> Iterator[bytes]:
    rest = b""
    for block in file_blocks(source):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _repeated(source: Content) -> list[bytes]:
    """Some of the lines that occur more than once; keeps a hash of each line, and compares only those that agree."""
    hashes = np.fromiter(map(hash, _lines(source)), np.int64)
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
