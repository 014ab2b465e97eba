"""What an archive looks like when mounted: every Daf in it flat, everything else as it is.

Owns which names are shown, what stands behind each, and what is made up: flat descriptors, metadata.json, daf.json of
the layout asked for, and the directories that every Daf has even when they are empty. Must not know FUSE. Directories
are built when first entered, so that an archive of many data sets costs no more than the one that is looked at.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dafmount.daf.catalog import DENSE, Component, PropertyKey
from dafmount.daf.descriptor import compact_json, flat_json, legacy_json, minify, parse_descriptor
from dafmount.daf.eltype import itemsize
from dafmount.daf.files_layout import MARKER, METADATA, SECTIONS, FilesLayout, PackedComponent
from dafmount.daf.http_layout import ListedDaf
from dafmount.errors import DafmountError, NotFound, SourceChanged, SourceFault
from dafmount.shard.grid import Grid, make_grid
from dafmount.source.ahead import Ahead
from dafmount.source.base import Archive, ByteSource, Entry, Stamp
from dafmount.tree import attributes
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import ShardReader, ShardSpec
from dafmount.tree.content import Content, Literal, PackedNumbers, PackedText
from dafmount.tree.decoders import Decoders, Store
from dafmount.tree.far import FarFile, far_content
from dafmount.tree.nodes import Directory, File, Loader, Node, join
from dafmount.tree.watched import Watched

log = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 256 << 20
"""A raw chunk that claims more is refused, unless the cache is larger; writers use 8 KiB."""


@dataclass(frozen=True, slots=True)
class Style:
    """How data sets are shown, and what their contents share."""

    cache: ChunkCache
    layout: str = "1.1"
    shards: bool = False
    verify: bool = True
    decoders: Decoders | None = None

    @property
    def max_chunk_bytes(self) -> int:
        """The largest raw chunk that is decoded."""
        return max(MAX_CHUNK_BYTES, self.cache.limit_bytes)


def build_tree(archive: Archive, root: str, style: Style) -> Directory:
    """The tree of a data set, or of several in one archive, below the archive's directory `root`."""
    return Directory("", None, archive.mtime_ns, Plain(archive, root, style).load)


class Plain:
    """A directory of the archive shown as it is, unless it turns out to be a Daf."""

    def __init__(self, archive: Archive, path: str, style: Style) -> None:
        self._archive = archive
        self._path = path
        self._style = style

    def load(self, directory: Directory) -> dict[str, Node]:
        """The children; raises NotFound, or for a Daf of another version UnsupportedFormat."""
        entries = self._archive.listdir(self._path)
        if any(entry.name == MARKER and not entry.is_directory for entry in entries):
            return DafTree(self._archive, self._path, self._style).load(directory, entries)
        return {entry.name: self.node(entry, directory) for entry in entries}

    def node(self, entry: Entry, directory: Directory) -> Node:
        """An entry as it is."""
        if entry.is_directory:
            below = Plain(self._archive, join(self._path, entry.name), self._style)
            return Directory(entry.name, directory, entry.mtime_ns, below.load)
        return File(entry.name, directory, entry.size, entry.mtime_ns, self, entry.is_executable, entry.identity)

    def open(self, file: File) -> Content:
        """The bytes of a file of this directory; raises SourceChanged where they are others than when it was listed."""
        path = join(self._path, file.name)
        source = self._archive.open(path)
        try:
            check_unchanged(self._archive, path, file.identity)
        except BaseException:
            source.close()
            raise
        return FarFile(source) if isinstance(source, Ahead) else source

    def open_nowait(self, file: File) -> Content | None:
        """As `open`, or None where it would have to wait; archives whose entries change one by one always do."""
        source = self._archive.open_nowait(join(self._path, file.name))
        return FarFile(source) if isinstance(source, Ahead) else source


class DafTree:
    """One Daf, shown flat."""

    def __init__(self, archive: Archive, root: str, style: Style) -> None:
        self.archive = archive
        self.style = style
        # Counting the lines of an axis would fetch all of it.
        source = archive.archive if isinstance(archive, Watched) else archive
        lengths = source.axis_lengths if isinstance(source, ListedDaf) else None
        self.layout = FilesLayout(archive, root, lengths)
        self._is_legacy = style.layout == "1.0"
        self._axis_identities: dict[str, Hashable] | None = None

    def load(self, directory: Directory, entries: Iterable[Entry]) -> dict[str, Node]:
        """The root's children; raises UnsupportedFormat or CorruptDescriptor for its daf.json."""
        version = self.layout.version()
        wanted = (1, 0) if self._is_legacy else (1, 1)
        plain = Plain(self.archive, self.layout.root, self.style)
        children: dict[str, Node] = {}
        for entry in entries:
            children[entry.name] = plain.node(entry, directory)
        if version != wanted:
            self._replace(children, MARKER, directory, compact_json({"version": list(wanted)}))
        # Made from everything else, so that it is another one whenever anything is.
        metadata = MetadataOpener(self, directory)
        children[METADATA] = File(METADATA, directory, None, self.archive.mtime_ns, metadata, identity=object())
        sections: dict[str, Loader] = {
            "axes": self._load_stored("axes"),
            "scalars": self._load_stored("scalars"),
            "vectors": self._load_vectors,
            "matrices": self._load_matrices,
        }
        for name in SECTIONS:
            self._section(children, directory, name, sections[name])
        return children

    def descriptor_nodes(self, root: Directory) -> Iterator[tuple[PropertyKey, File]]:
        """Every vector's, then every matrix's descriptor file, as shown."""
        vectors, matrices = root.children()["vectors"], root.children()["matrices"]
        directories = [*_directories(vectors)]
        for rows in _directories(matrices):
            directories.extend(_directories(rows))
        for directory in directories:
            for file in directory.children().values():
                if isinstance(file, File) and isinstance(file.opener, DescriptorOpener):
                    yield file.opener.key(file), file

    def shown_descriptor(self, key: PropertyKey, *, is_packed: bool) -> bytes:
        """A descriptor as the mount shows it: without packing, in the layout asked for."""
        return self._shown(key, self.layout.raw_descriptor(key), is_packed=is_packed)

    def shown_descriptor_nowait(self, key: PropertyKey, *, is_packed: bool) -> bytes | None:
        """As `shown_descriptor`, or None where it would have to wait."""
        raw = self.layout.raw_descriptor_nowait(key)
        return None if raw is None else self._shown(key, raw, is_packed=is_packed)

    def _shown(self, key: PropertyKey, raw: bytes, *, is_packed: bool) -> bytes:
        where = self.layout.where(key.path + ".json")
        descriptor = parse_descriptor(raw, len(key.axes), where)
        if self._is_legacy:
            return legacy_json(raw, descriptor, where)
        return flat_json(raw, descriptor, where) if is_packed else raw

    def _section(self, children: dict[str, Node], directory: Directory, name: str, loader: Loader) -> None:
        present = children.get(name)
        mtime_ns = present.mtime_ns if isinstance(present, Directory) else self.archive.mtime_ns
        children[name] = Directory(name, directory, mtime_ns, loader)

    def shape_identity(self, axes: tuple[str, ...]) -> tuple[Hashable, ...]:
        """What the shape of a property depends on beside its descriptor: the entries of the files of its axes."""
        if self._axis_identities is None:
            self._axis_identities = {
                entry.name: (entry.size, entry.identity or entry.mtime_ns) for entry in self._entries("axes")
            }
        return tuple(self._axis_identities.get(f"{axis}.txt") for axis in axes)

    def _replace(self, children: dict[str, Node], name: str, directory: Directory, data: bytes) -> None:
        children[name] = File(name, directory, len(data), children[name].mtime_ns, Made(data), identity=data)

    def _load_stored(self, path: str) -> Loader:
        plain = Plain(self.archive, self.layout.path(path), self.style)

        def load(directory: Directory) -> dict[str, Node]:
            return {entry.name: plain.node(entry, directory) for entry in self._entries(path)}

        return load

    def _load_vectors(self, directory: Directory) -> dict[str, Node]:
        return self._load_axes("vectors", directory, lambda axis: PropertyDirectory(self, (axis,)).load)

    def _load_matrices(self, directory: Directory) -> dict[str, Node]:
        return self._load_axes("matrices", directory, self._load_rows)

    def _load_rows(self, rows: str) -> Loader:
        def load(directory: Directory) -> dict[str, Node]:
            return self._load_axes(
                f"matrices/{rows}", directory, lambda columns: PropertyDirectory(self, (rows, columns)).load
            )

        return load

    def _load_axes(self, path: str, directory: Directory, loader: _LoaderOfAxis) -> dict[str, Node]:
        """A directory of one directory for each axis, those that the archive lost included."""
        plain = Plain(self.archive, self.layout.path(path), self.style)
        children: dict[str, Node] = {}
        for entry in self._entries(path):
            if entry.is_directory:
                children[entry.name] = Directory(entry.name, directory, entry.mtime_ns, loader(entry.name))
            else:
                children[entry.name] = plain.node(entry, directory)
        for axis in self.layout.axes():
            if axis not in children:
                children[axis] = Directory(axis, directory, self.archive.mtime_ns, loader(axis))
        return children

    def _entries(self, path: str) -> list[Entry]:
        try:
            return self.archive.listdir(self.layout.path(path))
        except NotFound:
            return []


class _LoaderOfAxis(Protocol):
    def __call__(self, axis: str, /) -> Loader: ...


class PropertyDirectory:
    """A directory of vectors or matrices: shards appear as their flat files."""

    def __init__(self, tree: DafTree, axes: tuple[str, ...]) -> None:
        self._tree = tree
        self._axes = axes
        self._path = "/".join(["vectors" if len(axes) == 1 else "matrices", *axes])

    def load(self, directory: Directory) -> dict[str, Node]:
        """The children; what a shard cannot tell now (a damaged axis, say) is told when its file is used."""
        tree, layout = self._tree, self._tree.layout
        try:
            entries = tree.archive.listdir(layout.path(self._path))
        except NotFound:
            return {}
        names = {entry.name for entry in entries if not entry.is_directory}
        packed = layout.packed_components(self._axes, names)
        flat_of_packed = {component.key.name for component in packed.values()}
        plain = Plain(tree.archive, layout.path(self._path), tree.style)
        payloads = attributes.FlatPayloads(layout, self._axes, plain)
        stored = DescriptorOpener(tree, self._axes, is_packed=False)
        rewritten = DescriptorOpener(tree, self._axes, is_packed=True)
        children: dict[str, Node] = {}
        flat: dict[str, Node] = {}
        is_legacy = tree.style.layout == "1.0"
        holds = payloads.holds
        for entry in entries:
            name, is_directory, stored_size, mtime_ns, is_executable, stored_identity = entry
            if is_directory:
                children[name] = plain.node(entry, directory)
            elif name in packed:
                component = packed[name]
                shown = component.flat_name
                opener = PackedOpener(tree, component, layout.path(f"{self._path}/{name}"), stored_identity)
                size, identity = opener.size_if_cheap(), opener.identity(self._axes)
                flat[shown] = File(shown, directory, size, mtime_ns, opener, identity=identity)
                if tree.style.shards:
                    children[name] = plain.node(entry, directory)
                else:
                    children[shown] = flat[shown]
            elif name[-5:] == ".json":
                is_packed = name[:-5] in flat_of_packed
                size = None if is_packed or is_legacy else stored_size
                identity = known(stored_identity, is_packed)
                descriptor = rewritten if is_packed else stored
                children[name] = File(name, directory, size, mtime_ns, descriptor, False, identity)
            else:
                as_stored = payloads if holds(name, names) else plain
                children[name] = File(
                    name, directory, stored_size, mtime_ns, as_stored, is_executable, stored_identity
                )
        children.update(flat)
        return children


class Made:
    """A file of bytes that were made up."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def open(self, file: File) -> Content:
        """The bytes."""
        return Literal(self._data)

    def open_nowait(self, file: File) -> Content | None:
        """The bytes."""
        return Literal(self._data)


class DescriptorOpener:
    """The descriptors of one directory."""

    def __init__(self, tree: DafTree, axes: tuple[str, ...], *, is_packed: bool) -> None:
        self._tree = tree
        self._axes = axes
        self._is_packed = is_packed

    def key(self, file: File) -> PropertyKey:
        """Which property a file describes."""
        return PropertyKey(self._axes, file.name.removesuffix(".json"))

    def open(self, file: File) -> Content:
        """The descriptor as shown; raises CorruptDescriptor or UnsupportedFormat, or SourceChanged as `Plain.open`."""
        key = self.key(file)
        shown = self._tree.shown_descriptor(key, is_packed=self._is_packed)
        if isinstance(file.identity, tuple):
            check_unchanged(self._tree.archive, self._tree.layout.path(key.path + ".json"), file.identity[0])
        return Literal(shown)

    def open_nowait(self, file: File) -> Content | None:
        """As `open`, or None where it would have to wait."""
        shown = self._tree.shown_descriptor_nowait(self.key(file), is_packed=self._is_packed)
        return None if shown is None else Literal(shown)

    def attribute_names(self, file: File) -> Sequence[str]:
        """See `Described`."""
        return attributes.descriptor_names()

    def attributes(self, file: File) -> Mapping[str, bytes]:
        """See `Described`."""
        return attributes.descriptor_values(self._tree.layout, self.key(file))


class MetadataOpener:
    """metadata.json, made to match what the mount shows."""

    def __init__(self, tree: DafTree, root: Directory) -> None:
        self._tree = tree
        self._root = root

    def open(self, file: File) -> Content:
        """Reads every descriptor; what cannot be read is logged and left out."""
        parts = []
        for path, value in self._entries():
            parts.append(compact_json(path).rstrip(b"\n") + b":" + value)
        return Literal(b"{" + b",".join(parts) + b"}")

    def open_nowait(self, file: File) -> Content | None:
        """None: there is much to read."""
        return None

    def _entries(self) -> Iterator[tuple[str, bytes]]:
        self._tree.layout.expect_descriptors()
        yield from self._tree.layout.metadata_entries()
        for key, descriptor in self._tree.descriptor_nodes(self._root):
            try:
                content = descriptor.opener.open(descriptor)
                yield key.path, minify(bytes(content.read(0, content.size)))
            except SourceChanged:
                raise
            except SourceFault:
                raise  # what is left out now would be missing for ever
            except DafmountError as error:
                log.error("left out of metadata.json: %s", error)


class PackedOpener:
    """The flat form of one shard."""

    def __init__(self, tree: DafTree, packed: PackedComponent, path: str, stored: Hashable) -> None:
        self._tree = tree
        self._packed = packed
        self._path = path
        self._stored = stored
        self._attributes = attributes.PackedAttributes(tree.layout, packed, path)

    def identity(self, axes: tuple[str, ...]) -> Hashable:
        """What its bytes depend on: the shard, its descriptor, and the axes."""
        return known(self._stored, self._packed.component, self._tree.shape_identity(axes))

    def size_if_cheap(self) -> int | None:
        """Bytes of a numeric component, from its shape; None for strings, or where the shape cannot be told."""
        component = self._packed.component
        try:
            width = itemsize(component.eltype, self._path)
            return None if width is None else math.prod(self._tree.layout.shape(self._packed.key, component)) * width
        except (DafmountError, OSError):
            return None

    def open(self, file: File) -> Content:
        """The flat bytes; raises what the descriptor and the archive let expect, or SourceChanged as `Plain.open`."""
        source = self._tree.archive.open(self._path)
        try:
            check_unchanged(self._tree.archive, self._path, self._stored)
            return self._open(source, file)
        except BaseException:
            source.close()
            raise

    def open_nowait(self, file: File) -> Content | None:
        """As `open`, or None where it would have to wait, or the lines of an axis must be counted."""
        if self._packed.component.key == DENSE and not self._tree.layout.knows_lengths(self._packed.key.axes):
            return None
        source = self._tree.archive.open_nowait(self._path)
        if source is None:
            return None
        try:
            return self._open(source, file)
        except BaseException:
            source.close()
            raise

    def attribute_names(self, file: File) -> Sequence[str]:
        """See `Described`."""
        return self._attributes.names()

    def attributes(self, file: File) -> Mapping[str, bytes]:
        """See `Described`."""
        return self._attributes.values()

    def _open(self, source: ByteSource, file: File) -> Content:
        shape, style = self._tree.layout.shape(self._packed.key, self._packed.component), self._tree.style
        store = style.decoders.store_for(file) if style.decoders is not None else None
        return packed_content(source, shape, self._packed.component, style, file.serial, store)


def packed_content(
    source: ByteSource,
    shape: tuple[int, ...],
    component: Component,
    style: Style,
    number: int,
    store: Store | None = None,
) -> Content:
    """The flat bytes of a packed component, given its shard; `number` tells its chunks from others' in the cache, and
    `store` gives them to the kernel.

    Closing the content closes `source`. Raises CorruptDescriptor or UnsupportedFormat.
    """
    grid, reader = open_shard(source, shape, component, style)
    if isinstance(source, Ahead):
        return far_content(source, grid, reader.spec, style.cache, number)
    if reader.spec.itemsize is None:
        return PackedText(grid, reader, style.cache, number)
    return PackedNumbers(grid, reader, style.cache, number, decoders=style.decoders, store=store)


def open_shard(
    source: ByteSource, shape: tuple[int, ...], component: Component, style: Style
) -> tuple[Grid, ShardReader]:
    """How a packed component is cut into chunks, and the reader of these; raises CorruptDescriptor."""
    packing = component.packing
    assert packing is not None
    width = itemsize(component.eltype, source.name)
    grid = make_grid(shape, packing.chunk_shape, width or 1, style.max_chunk_bytes, source.name)
    chunk_bytes = None if width is None else grid.chunk_bytes
    spec = ShardSpec(grid.n_chunks, packing, width, chunk_bytes, style.max_chunk_bytes, style.verify)
    return grid, ShardReader(source, spec, source.name)


def known(identity: Hashable, *more: Hashable) -> Hashable:
    """An identity with more in it; None stays None."""
    return None if identity is None else (identity, *more)


def check_unchanged(archive: Archive, path: str, identity: Hashable) -> None:
    """Raises SourceChanged where an entry with a state of its own is not as it was when its directory was listed."""
    if isinstance(identity, Stamp) and archive.stamp(path) != identity:
        raise SourceChanged(f"{archive.name}: {path}: changed since its directory was listed")


def _directories(node: Node) -> Iterator[Directory]:
    if isinstance(node, Directory):
        for child in node.children().values():
            if isinstance(child, Directory):
                yield child
