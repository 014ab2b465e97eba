"""What is packed, how, and into which chunks: upstream's rules and settings.

Owns the names, defaults and limits of the settings and the rule that says which components stay flat. Pure; knows no
files.

Facts: PackedFormat documentation (`DAF_PACKED_TARGET_CHUNK_KB`, `DAF_PACKED_COMPRESSION`,
`DAF_PACKED_COMPRESSION_LEVEL`), and shards that DataAxesFormats.jl and dafr wrote.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dafmount.errors import UnsupportedFormat, UsageError
from dafmount.shard import codecs

TARGET_VARIABLE = "DAF_PACKED_TARGET_CHUNK_KB"
COMPRESSION_VARIABLE = "DAF_PACKED_COMPRESSION"
LEVEL_VARIABLE = "DAF_PACKED_COMPRESSION_LEVEL"

TARGET_KB = 8
COMPRESSION = "blosc_zstd_bitshuffle"
LEVEL = 5

MAX_TARGET_KB = 256 * 1024
"""Readers refuse larger chunks."""

STRING_BYTES = 16
"""What a string counts when chunks are sized, however long it is."""


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How components are packed."""

    target_chunk_bytes: int
    """Raw bytes of a chunk; a column that is smaller stays flat."""
    compression: str
    level: int

    def chunk_shape(self, shape: Sequence[int], itemsize: int | None) -> tuple[int, ...] | None:
        """Values of a chunk in each dimension, rows first, or None where a component of `shape` stays flat.

        It does where one column has less than `target_chunk_bytes`, or where there are no values. `itemsize` is None
        for strings. Chunks never span columns.
        """
        width = STRING_BYTES if itemsize is None else itemsize
        if 0 in shape or shape[0] * width < self.target_chunk_bytes:
            return None
        rows = min(self.target_chunk_bytes // width, shape[0])
        return (rows,) if len(shape) == 1 else (rows, 1)


def make_settings(
    environment: Mapping[str, str],
    target_chunk_kb: int | None = None,
    compression: str | None = None,
    level: int | None = None,
) -> PackSettings:
    """Checked settings: what is given, else the environment's, else upstream's defaults. Raises UsageError."""
    if target_chunk_kb is None:
        target_chunk_kb = _number(environment, TARGET_VARIABLE, TARGET_KB)
    if level is None:
        level = _number(environment, LEVEL_VARIABLE, LEVEL)
    compression = compression or environment.get(COMPRESSION_VARIABLE) or COMPRESSION
    if not 1 <= target_chunk_kb <= MAX_TARGET_KB:
        raise UsageError(f"target chunk of {target_chunk_kb} KB, expected 1 to {MAX_TARGET_KB}")
    try:
        codecs.check_level(compression, level)
    except UnsupportedFormat as error:
        raise UsageError(str(error)) from error
    return PackSettings(target_chunk_kb * 1024, compression, level)


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(f"{name}={text!r} is no whole number")
    return int(text)


@dataclass(frozen=True, slots=True)
class Selection:
    """Which scalars, vectors and matrices are written: shell patterns on paths such as `vectors/cell/age`."""

    include: tuple[str, ...] = ()
    """Empty: everything."""
    exclude: tuple[str, ...] = ()

    def holds(self, path: str) -> bool:
        """Whether the property is written; what is excluded is not, even when it is included."""
        included = not self.include or _matches(path, self.include)
        return included and not _matches(path, self.exclude)

    def check_used(self, paths: Sequence[str]) -> None:
        """Raises UsageError for a pattern that matches none of `paths`: it is misspelt more often than not."""
        for pattern in (*self.include, *self.exclude):
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise UsageError(f"pattern {pattern!r} matches no property; they are called like vectors/cell/age")


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
