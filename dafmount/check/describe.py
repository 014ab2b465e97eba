"""What a Daf and its shards consist of, without reading what they hold.

Owns the values that dafinfo prints. Must not know how they are printed. Reads descriptors, sizes and the directories of
shards; a damaged property has a `problem` and costs nothing else.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dafmount.daf.catalog import DENSE, Component, Descriptor, PropertyKey
from dafmount.daf.descriptor import JSON, parse_json
from dafmount.daf.eltype import itemsize
from dafmount.daf.files_layout import MAX_DESCRIPTOR_BYTES, FilesLayout
from dafmount.daf.sources import open_source
from dafmount.errors import CorruptShard, DafmountError, NotADaf, NotFound
from dafmount.shard import codecs, directory
from dafmount.shard.names import GZIP_NAME
from dafmount.source.base import ByteSource
from dafmount.source.local import LocalFile
from dafmount.source.names import shown
from dafmount.source.resolve import DAF_JSON, Resolved, daf_roots
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from dafmount.tree.build import Style, packed_content
from dafmount.tree.cache import ChunkCache

_BLOCK_ENTRIES = 4096
_SUFFIXES = (".json", ".zip", ".data", ".txt", ".nztxt")
_COMPONENT_SUFFIXES = (".nzind", ".nzval", ".colptr", ".rowval")


@dataclass(frozen=True, slots=True)
class AxisInfo:
    """An axis."""

    name: str
    n_entries: int | None
    """None where its file cannot be read."""


@dataclass(frozen=True, slots=True)
class ScalarInfo:
    """A scalar, as its file says."""

    name: str
    type: JSON
    value: JSON


@dataclass(frozen=True, slots=True)
class ComponentInfo:
    """One payload file."""

    file: str
    """Its path within the data set."""
    key: str
    """`nzind`, `nzval`, `colptr`, `rowval`; '' where the property is dense."""
    eltype: str
    shape: tuple[int, ...]
    compression: str | None
    """None where it is flat."""
    compression_level: int | None
    chunk_shape: tuple[int, ...] | None
    n_chunks: int
    stored_bytes: int
    flat_bytes: int


@dataclass(frozen=True, slots=True)
class PropertyInfo:
    """A vector or matrix."""

    path: str
    layout: str
    """`dense` or `sparse`; '' where the descriptor cannot be read."""
    eltype: str
    shape: tuple[int, ...]
    components: tuple[ComponentInfo, ...]
    problem: str | None = None
    """Why nothing more is known."""

    @property
    def stored_bytes(self) -> int:
        """Of all its files."""
        return sum(component.stored_bytes for component in self.components)

    @property
    def flat_bytes(self) -> int:
        """Of all its files if they were flat."""
        return sum(component.flat_bytes for component in self.components)

    @property
    def n_chunks(self) -> int:
        """Of all its files."""
        return sum(component.n_chunks for component in self.components)

    @property
    def n_values(self) -> int | None:
        """Values that a sparse property stores."""
        indices = [c for c in self.components if c.key in ("nzind", "rowval")]
        return indices[0].shape[0] if indices else None


@dataclass(frozen=True, slots=True)
class DatasetInfo:
    """One Daf."""

    name: str
    version: tuple[int, int]
    axes: tuple[AxisInfo, ...]
    scalars: tuple[ScalarInfo, ...]
    properties: tuple[PropertyInfo, ...]


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A shard, as its own bytes tell, and its descriptor where there is one."""

    name: str
    eltype: str | None
    shape: tuple[int, ...] | None
    chunk_shape: tuple[int, ...] | None
    grid_shape: tuple[int, ...] | None
    """Chunks along each dimension, rows first; None where neither descriptor nor names tell."""
    n_chunks: int
    compression: str | None
    compression_level: int | None
    zip_method: int | None
    """None where there are no chunks."""
    codec_json: str | None
    pipeline: list[JSON] | None
    """The codecs of a chunk in the words of Zarr, from codec.json or, without one, from the descriptor."""
    has_index: bool
    shard_bytes: int
    stored_bytes: int
    """Of all chunks, without headers and directory."""
    min_chunk_bytes: int
    max_chunk_bytes: int
    flat_bytes: int | None


def describe(source: str, *, spool: Path | None = None) -> list[DatasetInfo]:
    """Every data set of a source. Raises what keeps it from being read."""
    with _Opened(source, spool) as opened:
        return [opened.dataset(root) for root in opened.roots]


def describe_paths(source: str, paths: Sequence[str], *, spool: Path | None = None) -> list[PropertyInfo | ShardInfo]:
    """What single paths within a data set are: a property, and then each of its shards; or one shard.

    Raises NotFound, also where the source holds several data sets.
    """
    with _Opened(source, spool) as opened:
        if len(opened.roots) != 1:
            raise NotFound(f"{shown(source)}: several data sets, name one of them after '#/'")
        layout = FilesLayout(opened.archive, opened.roots[0])
        return [info for path in paths for info in opened.path_infos(layout, path)]


def describe_shard_file(path: str) -> list[PropertyInfo | ShardInfo]:
    """A shard that is a file: with all that its descriptor tells where it lies in a Daf, else as it is.

    Raises NotADaf where it is no shard.
    """
    inside = _place_in_daf(path)
    if inside is not None:
        root, within = inside
        try:
            return describe_paths(root, [within])
        except NotFound:
            pass  # no descriptor speaks of it
    file = LocalFile(path, path)
    try:
        return [describe_shard(file, shown(path), None, None)]
    except CorruptShard as error:
        raise NotADaf(f"{shown(path)}: neither a Daf nor a packed shard: {error}") from error
    finally:
        file.close()


def _place_in_daf(path: str) -> tuple[str, str] | None:
    """The Daf directory that holds a file, and the file's path in it."""
    parts = os.path.abspath(path).split(os.sep)
    for depth in (3, 4):  # vectors/cell/x.zip, matrices/cell/gene/x.zip
        root, within = os.sep.join(parts[:-depth]), parts[-depth:]
        if within and within[0] == ("vectors", "matrices")[depth - 3] and os.path.isfile(f"{root}/{DAF_JSON}"):
            return root, "/".join(within)
    return None


class _Opened:
    """A source, opened for the time of a description."""

    def __init__(self, source: str, spool: Path | None) -> None:
        self._resolved: Resolved = open_source(source, spool=Spool(spool, 4 << 30))
        self.archive = self._resolved.archive
        self._style = Style(ChunkCache(1 << 24))
        self._numbers = count(1)

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *exc: object) -> None:
        self.archive.close()

    @property
    def roots(self) -> list[str]:
        """The directories that are data sets."""
        if self._resolved.is_daf or not isinstance(self.archive, ZipArchive):
            return [self._resolved.root]
        return daf_roots(self.archive)

    def dataset(self, root: str) -> DatasetInfo:
        """All about one data set."""
        layout = FilesLayout(self.archive, root)
        name = self._resolved.display
        if not self._resolved.is_daf:
            name += f"#/{root}"
        return DatasetInfo(
            name,
            layout.version(),
            tuple(_axis(layout, axis) for axis in layout.axes()),
            tuple(_scalar(layout, scalar) for scalar in layout.scalars()),
            tuple(self.property(layout, key) for key in layout.properties()),
        )

    def property(self, layout: FilesLayout, key: PropertyKey) -> PropertyInfo:
        """All about one property; what is wrong with it is its `problem`."""
        try:
            descriptor = layout.descriptor(key)[1]
            shape = tuple(layout.axis_length(axis) for axis in key.axes)
        except (DafmountError, OSError) as error:
            return PropertyInfo(key.path, "", "", (), (), str(error))
        eltype = descriptor.components[-1].eltype if descriptor.layout == "dense" or _has_values(descriptor) else "Bool"
        components: list[ComponentInfo] = []
        problem = None
        for component in descriptor.components:
            try:
                found = self._component(layout, key, component)
            except (DafmountError, OSError) as error:
                problem = problem or str(error)
            else:
                components += [found] if found is not None else []
        return PropertyInfo(key.path, descriptor.layout, eltype, shape, tuple(components), problem)

    def _component(self, layout: FilesLayout, key: PropertyKey, component: Component) -> ComponentInfo | None:
        """None where a component is not stored because all its values are true."""
        packing = component.packing
        path = key.path + (component.packed_suffix if packing else component.flat_suffix)
        try:
            source = self.archive.open(layout.path(path))
        except NotFound:
            if component.eltype == "Bool" and component.key == "nzval" and component.n_elements is None:
                return None
            raise
        try:
            stored = flat = source.size
            shape = _shape(layout, key, component, stored)
            n_chunks = 0
            if packing is not None:
                content = packed_content(source, shape, component, self._style, next(self._numbers))
                flat = content.size
                n_chunks = math.prod(-(-n // size) for n, size in zip(shape, packing.chunk_shape, strict=True))
        finally:
            source.close()
        return ComponentInfo(
            path,
            component.key,
            component.eltype,
            shape,
            packing.compression if packing else None,
            packing.compression_level if packing else None,
            packing.chunk_shape if packing else None,
            n_chunks,
            stored,
            flat,
        )

    def path_infos(self, layout: FilesLayout, path: str) -> Iterator[PropertyInfo | ShardInfo]:
        """A property with its shards, or one shard of it; `path` is as in metadata.json, or a file's."""
        wanted = path.strip("/")
        key = _key_of(layout, wanted)
        if key is None:
            raise NotFound(
                f"{shown(self.archive.name)}: no property {shown(path)!r}; dafinfo without it lists them all"
            )
        descriptor = layout.descriptor(key)[1]
        is_file = wanted not in (key.path, f"{key.path}.json")
        if not is_file:
            yield self.property(layout, key)
        for component in descriptor.components:
            file = key.path + (component.packed_suffix if component.packing else component.flat_suffix)
            if component.packing is not None and (not is_file or file == wanted):
                source = self.archive.open(layout.path(file))
                try:
                    shape = _shape(layout, key, component, source.size)
                    yield describe_shard(source, file, component, shape)
                finally:
                    source.close()


def _has_values(descriptor: Descriptor) -> bool:
    return descriptor.components[-1].key == "nzval"


def _shape(layout: FilesLayout, key: PropertyKey, component: Component, file_bytes: int) -> tuple[int, ...]:
    """The shape; where version 1.0 leaves it to the file to tell the number of values, from the file's size."""
    if component.key == DENSE or component.n_elements is not None:
        return layout.shape(key, component)
    width = itemsize(component.eltype, key.path)
    return (file_bytes // width,) if width else (0,)


def _key_of(layout: FilesLayout, path: str) -> PropertyKey | None:
    """The property that is called so, or that a file of this name belongs to."""
    names = [path]
    for suffix in _SUFFIXES:
        if path.endswith(suffix):
            names.append(path.removesuffix(suffix))
    names += [name.removesuffix(key) for name in names for key in _COMPONENT_SUFFIXES if name.endswith(key)]
    for name in names:
        section, *axes, last = name.split("/")
        if len(axes) == {"vectors": 1, "matrices": 2}.get(section, 0):
            key = PropertyKey(tuple(axes), last)
            try:
                layout.raw_descriptor(key)
            except NotFound:
                continue
            return key
    return None


def _axis(layout: FilesLayout, axis: str) -> AxisInfo:
    try:
        return AxisInfo(axis, layout.axis_length(axis))
    except (DafmountError, OSError):
        return AxisInfo(axis, None)


def _scalar(layout: FilesLayout, name: str) -> ScalarInfo:
    path = f"scalars/{name}.json"
    try:
        raw = layout.archive.read_small(layout.path(path), MAX_DESCRIPTOR_BYTES)
        fields = parse_json(raw, layout.where(path))
        return ScalarInfo(name, fields.get("type"), fields.get("value"))
    except (DafmountError, OSError):
        return ScalarInfo(name, None, None)


# Shards.


class _Sizes(NamedTuple):
    """Stored bytes of the chunks."""

    total: int
    least: int
    most: int
    method: int | None


def describe_shard(
    source: ByteSource, name: str, component: Component | None, shape: tuple[int, ...] | None
) -> ShardInfo:
    """A shard; `component` and `shape` are what the descriptor says, None without one. Raises CorruptShard."""
    size = source.size
    tail_bytes = min(directory.TAIL_BYTES, size)
    end = directory.parse_end(source.read(size - tail_bytes, tail_bytes), size, name)
    stride, n_listed = _stride(source, end, name)
    sizes = _chunk_sizes(source, end, stride, n_listed, name)
    text = _codec_json(source, end, stride, n_listed, name)
    packing = component.packing if component is not None else None
    grid_shape = _grid_from_names(source, end, stride, n_listed, name)
    flat = None
    n_chunks = n_listed
    if packing is not None and shape is not None and component is not None:
        grid_shape = tuple(-(-n // length) for n, length in zip(shape, packing.chunk_shape, strict=True))
        n_chunks = math.prod(grid_shape)
        width = itemsize(component.eltype, name)
        flat = math.prod(shape) * width if width is not None else None
    compression = packing.compression if packing else _guess(sizes.method, text)
    pipeline = _pipeline(text)
    if pipeline is None and packing is not None and component is not None:
        width = itemsize(component.eltype, name)
        pipeline = json.loads(codecs.codec_json_text(packing.compression, packing.compression_level or 0, width))
    return ShardInfo(
        name,
        component.eltype if component else None,
        shape,
        packing.chunk_shape if packing else None,
        grid_shape,
        n_chunks,
        compression,
        packing.compression_level if packing else None,
        sizes.method,
        text,
        pipeline,
        _has_index(source, n_chunks),
        size,
        sizes.total,
        sizes.least,
        sizes.most,
        flat,
    )


def _stride(source: ByteSource, end: directory.End, name: str) -> tuple[directory.Stride, int]:
    """The form of the directory's entries, and how many of them are chunks."""
    first = source.read(end.directory_offset, min(4096, end.directory_bytes))
    n = end.n_entries
    if n and _last_name(source, end) == b"codec.json":
        n -= 1
    return directory.parse_stride(first, end, n, name), n


def _last_name(source: ByteSource, end: directory.End) -> bytes:
    """The last name of the directory if it can be codec.json, whose entry has 84 bytes."""
    length = min(end.directory_bytes, directory.CENTRAL_ENTRY_BYTES + 10 + 28)
    entry = source.read(end.directory_offset + end.directory_bytes - length, length)
    return entry[directory.CENTRAL_ENTRY_BYTES : directory.CENTRAL_ENTRY_BYTES + 10]


def _chunk_sizes(source: ByteSource, end: directory.End, stride: directory.Stride, n: int, name: str) -> _Sizes:
    total, least, most, method = 0, 0, 0, None
    for first in range(0, n, _BLOCK_ENTRIES):
        count = min(_BLOCK_ENTRIES, n - first)
        data = source.read(end.directory_offset + first * stride.entry_bytes, count * stride.entry_bytes)
        chunks = directory.parse_entries(data, stride, first, count, name)
        smallest = int(chunks.stored_bytes.min())
        least = smallest if not first else min(least, smallest)
        most = max(most, int(chunks.stored_bytes.max()))
        total += int(chunks.stored_bytes.sum())
        method = int(chunks.method[0])
    return _Sizes(total, least, most, method)


def _codec_json(source: ByteSource, end: directory.End, stride: directory.Stride, n: int, name: str) -> str | None:
    place = directory.codec_json_entry_range(end, stride, n)
    if place is None:
        return None
    entry = directory.parse_codec_json_entry(source.read(*place), end, name)
    header = source.read(entry.header_offset, min(entry.header_hint, end.directory_offset - entry.header_offset))
    start = entry.header_offset + directory.data_start(header, 0, name)
    return source.read(start, entry.stored_bytes).decode("utf-8", "replace")


def _pipeline(text: str | None) -> list[JSON] | None:
    try:
        listed = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) else None


def _guess(method: int | None, text: str | None) -> str | None:
    """The compression, from what the shard itself says."""
    named = {codec.zip_method: name for name, codec in codecs.CODECS.items() if codec.zip_method}
    if method in named:
        return named[method]
    for name in codecs.CODECS:
        pipeline = _pipeline(codecs.codec_json_text(name, 1, 1).decode())
        if _gist(pipeline) == _gist(_pipeline(text)) is not None:
            return name
    return None


def _gist(pipeline: list[JSON] | None) -> list[object] | None:
    """The names of the codecs after the first, and the compressor within blosc."""
    if pipeline is None or not all(isinstance(codec, dict) for codec in pipeline):
        return None
    gist: list[object] = []
    for codec in pipeline[1:]:
        configuration = codec.get("configuration") if isinstance(codec, dict) else None
        cname = configuration.get("cname") if isinstance(configuration, dict) else None
        gist.append((codec.get("name") if isinstance(codec, dict) else None, cname))
    return gist


def _grid_from_names(
    source: ByteSource, end: directory.End, stride: directory.Stride, n: int, name: str
) -> tuple[int, ...] | None:
    """Chunks along each dimension, from the name of the last one; None where gzip's names do not tell.

    Raises CorruptShard for a name that no chunk has.
    """
    if not n:
        return None
    at = end.directory_offset + (n - 1) * stride.entry_bytes + directory.CENTRAL_ENTRY_BYTES
    last = source.read(at, stride.name_bytes)
    if last.startswith(GZIP_NAME[:4]):
        return None
    first, *blocks = last.split(b"/")
    grid = tuple(int(block) + 1 for block in reversed(blocks) if block.isdigit())
    if first != b"c" or not grid or len(grid) != len(blocks):
        raise CorruptShard(f"{name}: its last entry is called {last[:64]!r}, expected a chunk's name such as c/0")
    return grid if math.prod(grid) == n else None


def _has_index(source: ByteSource, n_chunks: int) -> bool:
    """Whether a Zarr index leads the shard: its first chunk then does not."""
    length = directory.index_bytes(n_chunks)
    if length > source.size:
        return False
    offsets = np.frombuffer(source.read(0, min(length, 4)), np.uint8)
    return offsets.tobytes() != b"PK\x03\x04"
