"""Descriptors: JSON in, values out, and flat JSON again.

Owns the two forms of version 1.0 and 1.1 (FilesDaf documentation). Pure; knows no files. Any JSON layout and key
order is accepted; what is written is compact JSON with one newline, keys in the order in which they were found.
"""

from __future__ import annotations

import json
import re
from typing import TypeAlias

from dafmount.daf.catalog import DENSE, Component, Descriptor, Packing
from dafmount.daf.eltype import itemsize
from dafmount.errors import CorruptDescriptor, UnsupportedFormat

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

PACKED_KEYS = frozenset({"packed_format", "chunk_shape", "compression", "compression_level", "index_location"})
PACKED_FORMATS = frozenset({"indexed+zipped", "zipped"})
SPARSE_KEYS = {1: ("nzind", "nzval"), 2: ("colptr", "rowval", "nzval")}
"""Components of a sparse property by its number of axes, in the order in which writers list them."""

MAX_ELEMENTS = 2**60
"""Larger counts cannot be offsets in a file."""

_JSON_STRING_OR_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+')


def parse_json(raw: bytes, where: str) -> dict[str, JSON]:
    """The JSON object in `raw`; CorruptDescriptor for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CorruptDescriptor(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptDescriptor(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_version(raw: bytes, where: str) -> tuple[int, int]:
    """The version in daf.json. Any major but 1 and any minor above 1 is UnsupportedFormat."""
    version = parse_json(raw, where).get("version")
    match version:
        case [int(major), int(minor)] if not isinstance(major, bool) and not isinstance(minor, bool):
            pass
        case _:
            raise CorruptDescriptor(f"{where}: expected a version such as [1,1], found {json.dumps(version)}")
    if major != 1 or not 0 <= minor <= 1:
        raise UnsupportedFormat(f"{where}: FilesDaf version {major}.{minor}, this release reads 1.0 and 1.1")
    return major, minor


def parse_descriptor(raw: bytes, n_axes: int, where: str) -> Descriptor:
    """The descriptor of a vector (`n_axes` 1) or matrix (2).

    Raises CorruptDescriptor where it contradicts the format, UnsupportedFormat for a packed_format that is not known.
    """
    fields = parse_json(raw, where)
    match fields.get("format"):
        case "dense":
            return Descriptor("dense", (_component(fields, DENSE, n_axes, where),), is_legacy=False)
        case "sparse":
            return _parse_sparse(fields, n_axes, where)
        case other:
            raise CorruptDescriptor(f'{where}: "format" is {json.dumps(other)}, expected "dense" or "sparse"')


def _parse_sparse(fields: dict[str, JSON], n_axes: int, where: str) -> Descriptor:
    keys = SPARSE_KEYS[n_axes]
    if keys[0] not in fields:
        index_type = _eltype(fields, "indtype", where)
        value_type = _eltype(fields, "eltype", where)
        types = [*([index_type] * (len(keys) - 1)), value_type]
        legacy = tuple(Component(key, eltype, None, None) for key, eltype in zip(keys, types, strict=True))
        return Descriptor("sparse", legacy, is_legacy=True)
    components = []
    for key in keys:
        inner = fields.get(key)
        if inner is None and key == "nzval":
            continue
        if not isinstance(inner, dict):
            raise CorruptDescriptor(f'{where}: sparse, but "{key}" is {json.dumps(inner)}, expected an object')
        components.append(_component(inner, key, 1, f"{where}: {key}"))
    return Descriptor("sparse", tuple(components), is_legacy=False)


def _component(fields: dict[str, JSON], key: str, rank: int, where: str) -> Component:
    eltype = _eltype(fields, "eltype", where)
    n_elements = None
    if key != DENSE:
        n_elements = _count(fields.get("n_elements"), "n_elements", where)
    packing = _packing(fields, rank, where) if "packed_format" in fields else None
    return Component(key, eltype, n_elements, packing)


def _packing(fields: dict[str, JSON], rank: int, where: str) -> Packing:
    packed_format = fields["packed_format"]
    if not isinstance(packed_format, str) or packed_format not in PACKED_FORMATS:
        known = ", ".join(sorted(PACKED_FORMATS))
        raise UnsupportedFormat(f"{where}: packed_format {json.dumps(packed_format)}, this release reads {known}")
    location = fields.get("index_location", "start")
    if packed_format == "indexed+zipped" and location != "start":
        raise UnsupportedFormat(f'{where}: index_location {json.dumps(location)}, this release reads "start"')
    shape = fields.get("chunk_shape")
    if not isinstance(shape, list) or len(shape) != rank:
        raise CorruptDescriptor(f"{where}: chunk_shape {json.dumps(shape)}, expected {rank} sizes")
    sizes = tuple(_count(size, "chunk_shape", where) for size in shape)
    if 0 in sizes:
        raise CorruptDescriptor(f"{where}: chunk_shape {json.dumps(shape)}, expected sizes of at least 1")
    compression = fields.get("compression")
    if not isinstance(compression, str):
        raise CorruptDescriptor(f"{where}: compression is {json.dumps(compression)}, expected a codec's name")
    level = fields.get("compression_level")
    return Packing(packed_format, sizes, compression, level if isinstance(level, int) else None)


def _eltype(fields: dict[str, JSON], key: str, where: str) -> str:
    eltype = fields.get(key)
    if not isinstance(eltype, str):
        raise CorruptDescriptor(f'{where}: "{key}" is {json.dumps(eltype)}, expected an element type')
    itemsize(eltype, where)
    return eltype


def _count(value: JSON, key: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_ELEMENTS:
        raise CorruptDescriptor(f"{where}: {key} is {json.dumps(value)}, expected a count")
    return value


def minify(raw: bytes) -> bytes:
    """The same JSON on one line: white space outside strings removed, every other byte as it was."""
    return _JSON_STRING_OR_SPACE.sub(lambda match: match[1] or b"", raw)


def flat_json(raw: bytes, descriptor: Descriptor, where: str) -> bytes:
    """The descriptor of the same property without packing, in the form that flat writers give it."""
    if not descriptor.is_packed:
        return raw
    fields = _without_packing(parse_json(raw, where))
    for component in descriptor.components:
        inner = fields.get(component.key)
        if isinstance(inner, dict):
            fields[component.key] = dict(_without_packing(inner))
    return compact_json(fields)


def _without_packing(fields: dict[str, JSON]) -> dict[str, JSON]:
    return {key: value for key, value in fields.items() if key not in PACKED_KEYS}


def legacy_json(raw: bytes, descriptor: Descriptor, where: str) -> bytes:
    """The flat descriptor in the form of version 1.0.

    A sparse property whose index components have different types cannot be said in 1.0: UnsupportedFormat.
    """
    if descriptor.layout == "dense" or descriptor.is_legacy:
        return flat_json(raw, descriptor, where)
    by_key = {component.key: component.eltype for component in descriptor.components}
    value_type = by_key.pop("nzval", "Bool")
    index_types = sorted(set(by_key.values()))
    if len(index_types) > 1:
        differing = " and ".join(index_types)
        raise UnsupportedFormat(f"{where}: index types {differing} differ, which FilesDaf 1.0 cannot say")
    return compact_json({"format": "sparse", "eltype": value_type, "indtype": index_types[0]})


def compact_json(value: JSON) -> bytes:
    """Compact JSON and one newline, non-ASCII characters as they are."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass") + b"\n"
