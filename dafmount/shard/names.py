"""The names of a shard's chunks in its ZIP directory.

Owns that one rule, for writing and for checking. Pure; threads may share it.

Facts: "PackedFormat documentation, Dual-format shard layout": names follow Zarr's `c/...` with the dimensions reversed
and each number as wide as the largest; a gzip chunk's name is the ten bytes of a gzip header that ends within itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

GZIP_NAME = b"\x1f\x8b\x08\x01%s\x02\xff"
"""With four base64 characters that count the chunks."""

_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)


def chunk_names(chunks: NDArray[np.int64], grid_shape: Sequence[int], *, is_gzip: bool) -> NDArray[np.uint8]:
    """The names of the chunks of these numbers, a row of bytes each."""
    if is_gzip:
        names = np.empty((len(chunks), 10), np.uint8)
        names[:] = np.frombuffer(GZIP_NAME % b"AAAA", np.uint8)
        for at, shift in enumerate((18, 12, 6, 0)):
            names[:, 4 + at] = _BASE64[chunks >> shift & 63]
        return names
    widths = [len(str(max(0, n - 1))) for n in grid_shape]
    names = np.empty((len(chunks), 1 + sum(1 + width for width in widths)), np.uint8)
    end = names.shape[1]
    names[:, 0] = ord("c")
    rest = chunks
    for n, width in zip(grid_shape, widths, strict=True):
        block, rest = rest % n, rest // n
        for at in range(end - 1, end - 1 - width, -1):
            names[:, at] = ord("0") + block % 10
            block = block // 10
        end -= width + 1
        names[:, end] = ord("/")
    return names
