"""Chunks of strings: the `vlen-utf8` codec of Zarr on one side, lines of text on the other.

Owns that conversion; must not know where chunks come from, and never decodes text. Pure functions; threads may share
them.

Facts: numcodecs' VLenUTF8: u32 count, then for each string u32 byte length and the bytes, all little-endian. The count
is the full chunk's: strings beyond the property's end are "". No string holds a newline ("FilesFormat documentation").
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from dafmount.errors import CorruptShard

_U32 = struct.Struct("<I")
_NEWLINE = 10


def text_bytes(raw_bytes: int, count: int, n_valid: int, where: str) -> int:
    """Bytes of the first `n_valid` strings as lines, given the size of a raw chunk of `count` strings.

    Holds for any chunk that `decode_strings` accepts, so that sizes are known without decoding. Raises CorruptShard.
    """
    size = raw_bytes - 4 - 4 * count
    if size < 0:
        raise CorruptShard(
            f"{where}: a chunk of {count} strings has {raw_bytes} bytes, expected at least {4 + 4 * count}"
        )
    return size + n_valid


def decode_strings(raw: bytes | bytearray | memoryview, count: int, n_valid: int, where: str) -> bytes:
    """The first `n_valid` of the `count` strings of a raw chunk, each followed by a newline.

    Raises CorruptShard where count or lengths do not match the chunk, padding is not empty, or a string has a newline.
    """
    least = 4 + 4 * count
    if len(raw) < least:
        raise CorruptShard(f"{where}: a chunk of {count} strings has {len(raw)} bytes, expected at least {least}")
    (found,) = _U32.unpack_from(raw)
    if found != count:
        raise CorruptShard(f"{where}: the chunk has {found} strings, expected {count}")
    stop = len(raw) - 4 * (count - n_valid)
    if stop < len(raw) and np.frombuffer(raw, np.uint8, offset=stop).any():
        raise CorruptShard(f"{where}: the {count - n_valid} strings beyond the property's end are not empty")
    if n_valid == 0:
        if stop != 4:
            raise CorruptShard(f"{where}: {stop - 4} bytes follow the last string, expected none")
        return b""
    lines = _lines_of_short_strings(raw, n_valid, stop)
    if lines is None:
        lines = _lines_one_by_one(raw, n_valid, stop, where)
    if lines.count(b"\n") != n_valid:
        raise CorruptShard(f"{where}: a string holds a newline, expected none")
    return lines


def _lines_of_short_strings(raw: bytes | bytearray | memoryview, n: int, stop: int) -> bytes | None:
    """All lines at once where each string has 1 to 255 bytes and none that is NUL, else None.

    Then the three upper bytes of a length are the only zeros, so that the lengths are found without walking from one to
    the next. That each length leads to the next one is checked: a guess that fails costs time, never a wrong byte.
    """
    data = np.frombuffer(raw, np.uint8, stop - 4, 4)
    zeros = np.flatnonzero(data == 0)
    if len(zeros) != 3 * n:
        return None
    starts = zeros[::3] - 1
    lengths = data[starts]
    after = starts + lengths + 4
    if (
        starts[0] != 0
        or after[-1] != len(data)
        or (after[:-1] != starts[1:]).any()
        or (zeros[2::3] != starts + 3).any()
    ):
        return None
    lines = np.empty(len(data), np.uint8)
    lines[:-1] = data[1:]
    lines[-1] = _NEWLINE  # of the last line; the others take the place of the length that follows them
    lines[starts[1:] - 1] = _NEWLINE
    keep = np.ones(len(data), np.bool_)
    keep[zeros - 1] = False
    return lines[keep].tobytes()


def _lines_one_by_one(raw: bytes | bytearray | memoryview, n: int, stop: int, where: str) -> bytes:
    data = bytes(raw[:stop])
    unpack = _U32.unpack_from
    lines: list[bytes] = []
    at = 4
    for k in range(n):
        if at + 4 > stop:
            raise CorruptShard(f"{where}: string {k} begins at {at}, but the strings end at {stop}")
        end = at + 4 + unpack(data, at)[0]
        if end > stop:
            raise CorruptShard(
                f"{where}: string {k} claims {end - at - 4} bytes at {at}, but the strings end at {stop}"
            )
        lines.append(data[at + 4 : end])
        at = end
    if at != stop:
        raise CorruptShard(f"{where}: {stop - at} bytes follow the last string, expected none")
    lines.append(b"")
    return b"\n".join(lines)


def encode_strings(lines: Sequence[bytes], count: int) -> bytes:
    """A raw chunk of `count` strings: `lines` (without their newlines), then empty ones. At most `count` lines."""
    if len(lines) > count:
        raise ValueError(f"{len(lines)} lines do not fit a chunk of {count}")
    parts = [_U32.pack(count)]
    for line in lines:
        parts.append(_U32.pack(len(line)))
        parts.append(line)
    parts.append(bytes(4 * (count - len(lines))))
    return b"".join(parts)
