"""What a descriptor must say beyond what a reader needs: no key that nobody knows, values that suit their types.

Pure; must not know files. Facts: FilesFormat and PackedFormat documentation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from dafmount.daf.catalog import Descriptor
from dafmount.daf.descriptor import JSON, PACKED_KEYS
from dafmount.daf.eltype import NUMERIC, STRINGS

_DENSE_KEYS = frozenset({"format", "eltype"})
_LEGACY_KEYS = frozenset({"format", "eltype", "indtype"})
_FLOAT_WORDS = frozenset({"NaN", "Inf", "-Inf", "Infinity", "-Infinity"})
"""What JSON has no numbers for."""


def descriptor_faults(fields: Mapping[str, JSON], descriptor: Descriptor) -> Iterator[str]:
    """What is wrong with a descriptor that could be read as `descriptor`."""
    if descriptor.layout == "dense":
        yield from _component_faults(fields, "", with_count=False)
        return
    if descriptor.is_legacy:
        yield from _unknown(fields, _LEGACY_KEYS, "")
        yield from _index_type(fields.get("indtype"), "indtype")
        return
    keys = [component.key for component in descriptor.components]
    yield from _unknown(fields, {"format", *keys}, "")
    for key in keys:
        inner = fields[key]
        if isinstance(inner, dict):
            yield from _component_faults(inner, f"{key}: ", with_count=True)
            if inner.get("format") != "dense":
                yield f'{key}: "format" is {json.dumps(inner.get("format"))}, expected "dense"'
            if key != "nzval":
                yield from _index_type(inner.get("eltype"), f"{key}: eltype")


def scalar_faults(fields: Mapping[str, JSON]) -> Iterator[str]:
    """What is wrong with a scalar's JSON."""
    yield from _unknown(fields, {"type", "value"}, "")
    if "value" not in fields:
        yield 'no "value"'
        return
    kind, value = fields.get("type"), fields["value"]
    if not isinstance(kind, str) or (kind not in NUMERIC and kind not in STRINGS):
        yield f'"type" is {json.dumps(kind)}, expected one of {", ".join([*NUMERIC, "String"])}'
    elif not _suits(kind, value):
        yield f'"value" is {json.dumps(value)[:100]}, expected a {kind}'


def _component_faults(fields: Mapping[str, JSON], where: str, *, with_count: bool) -> Iterator[str]:
    known = _DENSE_KEYS | {"n_elements"} if with_count else _DENSE_KEYS
    if "packed_format" not in fields:
        yield from _unknown(fields, known, where)
        return
    yield from _unknown(fields, known | PACKED_KEYS, where)
    level = fields.get("compression_level")
    if not isinstance(level, int) or isinstance(level, bool):
        yield f'{where}"compression_level" is {json.dumps(level)}, expected a level'
    if fields["packed_format"] == "indexed+zipped" and "index_location" not in fields:
        yield f'{where}no "index_location", expected "start"'


def _unknown(fields: Mapping[str, JSON], known: frozenset[str] | set[str], where: str) -> Iterator[str]:
    for key in fields:
        if key not in known:
            yield f"{where}unknown key {json.dumps(key)}, expected {', '.join(sorted(known))}"


def _index_type(eltype: JSON, where: str) -> Iterator[str]:
    if not isinstance(eltype, str) or "Int" not in eltype:
        yield f"{where} is {json.dumps(eltype)}, expected a type of integers"


def _suits(kind: str, value: JSON) -> bool:
    if kind in STRINGS:
        return isinstance(value, str)
    if kind == "Bool":
        return value in (0, 1)
    if kind.startswith("Float"):
        return (
            (isinstance(value, int | float) and not isinstance(value, bool)) or value is None or value in _FLOAT_WORDS
        )
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    bits = 8 * int(NUMERIC[kind][2:])
    return 0 <= value < 1 << bits if kind.startswith("U") else -1 << bits - 1 <= value < 1 << bits - 1
