"""Daf element types and the numpy types that hold them.

Owns the table of names. All numbers are little-endian; a Bool is one byte, 0 or 1 (FilesDaf documentation).
"""

from __future__ import annotations

from dafmount.errors import CorruptDescriptor

NUMERIC: dict[str, str] = {
    "Bool": "|b1",
    "Int8": "|i1",
    "Int16": "<i2",
    "Int32": "<i4",
    "Int64": "<i8",
    "UInt8": "|u1",
    "UInt16": "<u2",
    "UInt32": "<u4",
    "UInt64": "<u8",
    "Float32": "<f4",
    "Float64": "<f8",
}
"""Numeric element type -> numpy type string; its last character is the size in bytes."""

STRINGS = frozenset({"String", "string"})
"""Both spellings of the string element type that writers use."""


def is_string(eltype: str) -> bool:
    """Whether values of this type are lines of text."""
    return eltype in STRINGS


def itemsize(eltype: str, where: str) -> int | None:
    """Bytes of one value; None for strings. Raises CorruptDescriptor for a name that Daf does not have."""
    if eltype in STRINGS:
        return None
    try:
        return int(NUMERIC[eltype][2:])
    except KeyError:
        known = ", ".join([*NUMERIC, "String"])
        raise CorruptDescriptor(f"{where}: unknown element type {eltype!r}; known are {known}") from None
