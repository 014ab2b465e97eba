"""A Daf in a directory on a web server, which cannot be listed: daf.json and metadata.json name everything in it.

Owns what the descriptors in metadata.json say of files: their names, their sizes, and the contents of all that are JSON
(HttpDaf documentation of DataAxesFormats.jl). Knows nothing of requests. An archive of this kind is a snapshot of
metadata.json; threads may share it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from json.decoder import JSONDecoder
from typing import TYPE_CHECKING

from dafmount.daf.catalog import DENSE, Component, Descriptor
from dafmount.daf.descriptor import MAX_ELEMENTS, minify, parse_descriptor, parse_json
from dafmount.daf.eltype import itemsize
from dafmount.daf.files_layout import MARKER, MAX_DESCRIPTOR_BYTES, METADATA
from dafmount.errors import Corrupt, CorruptDescriptor, DafmountError, NotADaf, NotFound
from dafmount.source.base import ByteSource, Entry, Stamp
from dafmount.source.names import clean, shown
from dafmount.source.zip_entries import MemorySource

if TYPE_CHECKING:
    from dafmount.source.http import HttpDirectory

log = logging.getLogger(__name__)

MAX_METADATA_BYTES = 256 << 20
"""Some hundred bytes a property; more than a million of them."""

_SPACE = " \t\r\n"
_PARTS = {"axes": 2, "scalars": 2, "vectors": 3, "matrices": 4}
"""How many parts the paths of each section have."""


class ListedDaf:
    """The files of a Daf on a web server as an archive, listed by its metadata.json."""

    def __init__(self, directory: HttpDirectory) -> None:
        """Fetches daf.json and metadata.json; raises NotADaf where either is missing, or CorruptDescriptor."""
        self._directory = directory
        marker = _fetch(directory, MARKER, MAX_DESCRIPTOR_BYTES, "it has no daf.json")
        metadata = _fetch(
            directory,
            METADATA,
            MAX_METADATA_BYTES,
            "it has no metadata.json, without which nothing in it can be found over HTTP; FilesDaf of "
            "DataAxesFormats.jl writes one when it opens the directory, and so does dafpack",
        )
        self.listed = metadata[1]
        """The state of metadata.json from which this was listed; None where later states could not be compared."""
        self._mtime_ns = (self.listed is not None and self.listed.mtime_ns) or time.time_ns()
        self._contents: dict[str, bytes] = {MARKER: marker[0]}
        """Of the files that are here already."""
        self._sizes: dict[str, int | None] = {MARKER: len(marker[0])}
        self._children: dict[str, dict[str, bool]] = {"": {MARKER: False}}
        """Directory -> name -> whether that is a directory."""
        self.axis_lengths: Mapping[str, int] = {}
        """Entries of each axis."""
        self._index(metadata[0])

    @property
    def name(self) -> str:
        """The URL without secrets."""
        return self._directory.name

    @property
    def mtime_ns(self) -> int:
        """The time of metadata.json."""
        return self._mtime_ns

    def listdir(self, path: str) -> list[Entry]:
        """The entries of a directory in the order of metadata.json; raises NotFound."""
        children = self._children.get(path)
        if children is None:
            raise NotFound(f"{self.name}: {shown(path)}: no such directory")
        return [
            Entry(name, True, 0, self._mtime_ns)
            if is_directory
            else Entry(name, False, self._sizes[f"{path}/{name}" if path else name], self._mtime_ns)
            for name, is_directory in children.items()
        ]

    def open(self, path: str) -> ByteSource:
        """A file; asks the server nothing yet. Raises NotFound for what metadata.json does not name."""
        content = self._contents.get(path)
        if content is not None:
            return MemorySource(f"{self.name}/{shown(path)}", content)
        if path not in self._sizes:
            raise NotFound(f"{self.name}: {shown(path)}: metadata.json names no such file")
        return self._directory.open(path, self._sizes[path])

    def open_nowait(self, path: str) -> ByteSource:
        """As `open`, which waits for nothing."""
        return self.open(path)

    def read_small(self, path: str, limit_bytes: int) -> bytes:
        """The whole of a file; raises Corrupt where it is larger than `limit_bytes`."""
        content = self._contents.get(path)
        if content is None:
            return self._directory.read_small(path, limit_bytes)
        if len(content) > limit_bytes:
            raise Corrupt(f"{self.name}/{shown(path)}: {len(content)} bytes, expected at most {limit_bytes}")
        return content

    def expect(self, paths: Sequence[str]) -> None:
        """Nothing: metadata.json holds what is small."""

    def stamp(self, path: str = "") -> Stamp:
        """The present state of a file, or of metadata.json for a directory, asked anew."""
        return self._directory.stamp(path if path in self._sizes else METADATA)

    def close(self) -> None:
        """Ends all requests."""
        self._directory.close()

    # Making the list.

    def _index(self, raw: bytes) -> None:
        where = f"{self.name}/{METADATA}"
        axis_lengths: dict[str, int] = {}
        properties: list[tuple[str, bytes]] = []
        for path, value in _members(raw, where):
            section, *rest = path.split("/")
            if _PARTS.get(section) != 1 + len(rest) or clean(path.encode()) != path.encode():
                log.warning("%s: left out %s, which is no path of an axis or property", where, shown(path))
            elif section == "axes":
                try:
                    axis_lengths[rest[0]] = _axis_length(value, f"{where}: {shown(path)}")
                except DafmountError as error:
                    log.error("%s", error)
                self._add(f"{path}.txt", None)
            else:
                self._add_content(f"{path}.json", minify(value) + b"\n")
                if section != "scalars":
                    properties.append((path, value))
        self.axis_lengths = axis_lengths
        for path, value in properties:
            axes = path.split("/")[1:-1]
            try:
                descriptor = parse_descriptor(value, len(axes), f"{where}: {shown(path)}")
            except DafmountError as error:
                log.error("its files are not shown, for its descriptor cannot be used: %s", error)
                continue
            self._add_files(path, axes, descriptor)

    def _add_files(self, path: str, axes: list[str], descriptor: Descriptor) -> None:
        for component in descriptor.components:
            if descriptor.is_legacy and component.key == "nzval" and component.eltype == "Bool":
                continue  # version 1.0 has no such file
            if component.packing is not None:
                self._add(path + component.packed_suffix, None)
            else:
                self._add(path + component.flat_suffix, self._flat_size(component, axes))

    def _flat_size(self, component: Component, axes: list[str]) -> int | None:
        """Bytes of a numeric flat file; None where only the server can tell."""
        width = itemsize(component.eltype, self.name)
        if width is None:
            return None
        if component.key != DENSE:
            return None if component.n_elements is None else component.n_elements * width
        size = width
        for axis in axes:
            if axis not in self.axis_lengths:
                return None
            size *= self.axis_lengths[axis]
        return size

    def _add_content(self, path: str, content: bytes) -> None:
        self._add(path, len(content))
        self._contents[path] = content

    def _add(self, path: str, size: int | None) -> None:
        self._sizes[path] = size
        directory, _, name = path.rpartition("/")
        self._children.setdefault(directory, {})[name] = False
        while directory:
            above, _, name = directory.rpartition("/")
            self._children.setdefault(above, {})[name] = True
            directory = above


def _fetch(directory: HttpDirectory, name: str, limit_bytes: int, missing: str) -> tuple[bytes, Stamp | None]:
    try:
        return directory.fetch(name, limit_bytes)
    except NotFound as error:
        raise NotADaf(f"{directory.name}: not a Daf: {missing}") from error


def _members(raw: bytes, where: str) -> Iterator[tuple[str, bytes]]:
    """The keys and, as they are written, the values of a JSON object; of equal keys the last."""
    parse_json(raw, where)
    text = raw.decode("utf-8-sig")
    decoder = JSONDecoder()
    members: dict[str, bytes] = {}
    at = _after_space(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        start = _after_space(text, _after_space(text, at) + 1)
        _, at = decoder.raw_decode(text, start)
        members[key] = text[start:at].encode("utf-8")
        at = _after_space(text, at)
        if text[at] == ",":
            at = _after_space(text, at + 1)
    yield from members.items()


def _after_space(text: str, at: int) -> int:
    while text[at] in _SPACE:
        at += 1
    return at


def _axis_length(value: bytes, where: str) -> int:
    n_entries = parse_json(value, where).get("n_entries")
    if not isinstance(n_entries, int) or isinstance(n_entries, bool) or not 0 <= n_entries <= MAX_ELEMENTS:
        raise CorruptDescriptor(f"{where}: n_entries is {json.dumps(n_entries)}, expected a count")
    return n_entries
