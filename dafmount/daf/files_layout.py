"""Reads what a Daf contains from any archive in the FilesDaf layout, piece by piece as it is asked for.

Owns the names of the layout (FilesDaf documentation: axes/, scalars/, vectors/, matrices/) and what their files mean.
Does not know how anything is shown. One object is a snapshot: descriptors and axis lengths once read are remembered.
Threads may share it; two that ask for the same thing at once may both read it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from dafmount.daf.catalog import DENSE, Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import SPARSE_KEYS, minify, parse_descriptor, parse_json, parse_version
from dafmount.errors import Corrupt, CorruptDescriptor, DafmountError, NotFound, SourceFault
from dafmount.source.base import Archive, ByteSource

log = logging.getLogger(__name__)

MARKER = "daf.json"
METADATA = "metadata.json"
SECTIONS = ("axes", "scalars", "vectors", "matrices")

MAX_DESCRIPTOR_BYTES = 1 << 20
"""A descriptor is a few hundred bytes; a scalar's may hold a long text."""

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackedComponent:
    """A component that lies in a shard."""

    key: PropertyKey
    component: Component
    shard_name: str
    """The shard's file name within the property's directory."""

    @property
    def flat_name(self) -> str:
        """The name under which flat readers look for it."""
        return self.key.name + self.component.flat_suffix


class FilesLayout:
    """One Daf, rooted at a directory of an archive."""

    def __init__(self, archive: Archive, root: str, axis_lengths: Mapping[str, int] | None = None) -> None:
        """`axis_lengths` are trusted where given, which saves counting the lines of the axes."""
        self.archive = archive
        self.root = root
        self._lengths: dict[str, int] = dict(axis_lengths or {})
        self._axes: tuple[str, ...] | None = None

    def path(self, *parts: str) -> str:
        """The archive's path of something below the root of this Daf."""
        return "/".join([self.root, *parts] if self.root else parts)

    def where(self, path: str) -> str:
        """How messages call a file of this Daf."""
        return f"{self.archive.name}: {self.path(path)}"

    def version(self) -> tuple[int, int]:
        """The version in daf.json; raises UnsupportedFormat or CorruptDescriptor."""
        raw = self.archive.read_small(self.path(MARKER), MAX_DESCRIPTOR_BYTES)
        return parse_version(raw, self.where(MARKER))

    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        if self._axes is None:
            self._axes = tuple(name for name in self._names("axes", ".txt") if name)
        return self._axes

    def scalars(self) -> Iterator[str]:
        """The names of the scalars."""
        return self._names("scalars", ".json")

    def properties(self) -> Iterator[PropertyKey]:
        """Every vector, then every matrix, whether or not its descriptor can be read."""
        for axis in self._directories("vectors"):
            for name in self._names(f"vectors/{axis}", ".json"):
                yield PropertyKey((axis,), name)
        for rows in self._directories("matrices"):
            for columns in self._directories(f"matrices/{rows}"):
                for name in self._names(f"matrices/{rows}/{columns}", ".json"):
                    yield PropertyKey((rows, columns), name)

    def names(self, axes: Sequence[str]) -> Iterator[str]:
        """The names of the vectors of one axis, or of the matrices of two."""
        return self._names("/".join(["vectors" if len(axes) == 1 else "matrices", *axes]), ".json")

    def axis_length(self, axis: str) -> int:
        """The number of entries of an axis: the lines of its file, a last one without its newline included."""
        if axis not in self._lengths:
            path = f"axes/{axis}.txt"
            try:
                source = self.archive.open(self.path(path))
            except NotFound as error:
                raise CorruptDescriptor(f"{self.where(path)}: there is no such axis file") from error
            try:
                self._lengths[axis] = count_lines(source)
            finally:
                source.close()
        return self._lengths[axis]

    def knows_lengths(self, axes: Iterable[str]) -> bool:
        """Whether `axis_length` answers at once for all of these."""
        return all(axis in self._lengths for axis in axes)

    def shape(self, key: PropertyKey, component: Component) -> tuple[int, ...]:
        """The shape of a component in elements: `[n]`, or `[n_rows, n_columns]` for a dense matrix."""
        if component.key == DENSE:
            return tuple(self.axis_length(axis) for axis in key.axes)
        if component.n_elements is None:
            raise CorruptDescriptor(f"{self.where(key.path)}: {component.key} has no n_elements")
        return (component.n_elements,)

    def raw_descriptor(self, key: PropertyKey) -> bytes:
        """The bytes of a property's descriptor."""
        return self.archive.read_small(self.path(key.path + ".json"), MAX_DESCRIPTOR_BYTES)

    def raw_descriptor_nowait(self, key: PropertyKey) -> bytes | None:
        """As `raw_descriptor`, or None where it would have to wait or is too large."""
        source = self.archive.open_nowait(self.path(key.path + ".json"))
        if source is None:
            return None
        try:
            return source.read_nowait(0, source.size) if source.size <= MAX_DESCRIPTOR_BYTES else None
        finally:
            source.close()

    def descriptor(self, key: PropertyKey) -> tuple[bytes, Descriptor]:
        """A property's descriptor, as bytes and as a value; raises CorruptDescriptor or UnsupportedFormat."""
        raw = self.raw_descriptor(key)
        return raw, parse_descriptor(raw, len(key.axes), self.where(key.path + ".json"))

    def packed_components(self, axes: Sequence[str], present: Set[str]) -> dict[str, PackedComponent]:
        """Which of the file names present in a property's directory are shards: shard name -> what it holds.

        Only a descriptor makes a file a shard, never its suffix. A descriptor that cannot be read is logged; its files
        stay what they are.
        """
        shards = [name for name in present if name[-4:] == ".zip"]
        self._expect(axes, shards, present)
        found: dict[str, PackedComponent] = {}
        descriptors: dict[str, Descriptor | None] = {}
        for shard in shards:
            for name, component_key in _shard_candidates(shard, len(axes)):
                if name + ".json" not in present:
                    continue
                key = PropertyKey(tuple(axes), name)
                if name not in descriptors:
                    descriptors[name] = self._descriptor_or_log(key)
                match = _packed(descriptors[name], component_key)
                if match is not None:
                    found[shard] = PackedComponent(key, match, shard)
                    break
        return found

    def expect_descriptors(self) -> None:
        """All of them will be read soon."""
        self.archive.expect([self.path(key.path + ".json") for key in self.properties()])

    def metadata_entries(self) -> Iterator[tuple[str, bytes]]:
        """Path and minified JSON of everything that metadata.json lists; axes first.

        Vectors and matrices come with their descriptor as stored. What cannot be read is logged and left out.
        """
        for axis in self.axes():
            try:
                yield f"axes/{axis}", b'{"format":"axis","n_entries":%d}' % self.axis_length(axis)
            except SourceFault:
                raise  # what is left out now would be missing for ever
            except DafmountError as error:
                log.error("left out of metadata.json: %s", error)
        scalars = list(self.scalars())
        self.archive.expect([self.path(f"scalars/{name}.json") for name in scalars])
        for name in scalars:
            path = f"scalars/{name}"
            try:
                raw = self.archive.read_small(self.path(path + ".json"), MAX_DESCRIPTOR_BYTES)
                parse_json(raw, self.where(path + ".json"))
                yield path, minify(raw)
            except SourceFault:
                raise  # what is left out now would be missing for ever
            except DafmountError as error:
                log.error("left out of metadata.json: %s", error)

    def _expect(self, axes: Sequence[str], shards: Sequence[str], present: Set[str]) -> None:
        """The descriptors of what may be packed among the names of a directory will be read soon."""
        named = {name for shard in shards for name, _ in _shard_candidates(shard, len(axes))}
        keys = [PropertyKey(tuple(axes), name) for name in sorted(named) if name + ".json" in present]
        if len(keys) > 1:
            self.archive.expect([self.path(key.path + ".json") for key in keys])

    def _descriptor_or_log(self, key: PropertyKey) -> Descriptor | None:
        try:
            return self.descriptor(key)[1]
        except SourceFault:
            raise  # what is left out now would be missing for ever
        except DafmountError as error:
            # Reading the descriptor says the same as an error, to whoever reads it.
            log.debug("shown as stored, for its descriptor cannot be used: %s", error)
            return None

    def _names(self, path: str, suffix: str) -> Iterator[str]:
        for name, is_directory in self._listing(path):
            if not is_directory and name.endswith(suffix):
                yield name.removesuffix(suffix)

    def _directories(self, path: str) -> Iterator[str]:
        for name, is_directory in self._listing(path):
            if is_directory:
                yield name

    def _listing(self, path: str) -> list[tuple[str, bool]]:
        try:
            return [(entry.name, entry.is_directory) for entry in self.archive.listdir(self.path(path))]
        except NotFound:
            return []


def count_lines(source: ByteSource) -> int:
    """The lines of a text, read block by block."""
    size = source.size
    lines = 0
    last = b"\n"
    for offset in range(0, size, _BLOCK_BYTES):
        block = source.read(offset, min(_BLOCK_BYTES, size - offset))
        lines += block.count(b"\n")
        last = block[-1:]
    if size and not last:
        raise Corrupt(f"{source.name}: ended before its size of {size} bytes")
    return lines + (last != b"\n")


def _shard_candidates(shard: str, n_axes: int) -> Iterator[tuple[str, str]]:
    stem = shard.removesuffix(".zip")
    yield stem, DENSE
    name, dot, key = stem.rpartition(".")
    if dot and key in SPARSE_KEYS[n_axes]:
        yield name, key


def _packed(descriptor: Descriptor | None, component_key: str) -> Component | None:
    if descriptor is None:
        return None
    for component in descriptor.components:
        if component.key == component_key and component.packing is not None:
            return component
    return None
