"""The two shuffle filters that stand alone before a compressor: by bytes and by bits.

Owns the transforms of numcodecs' Shuffle and of the bitshuffle library. Pure functions; threads may share them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_TARGET_BLOCK_BYTES = 8192  # bitshuffle_core.h, BSHUF_TARGET_BLOCK_SIZE_B
_BLOCK_MULTIPLE = 8  # BSHUF_BLOCKED_MULT
_MIN_BLOCK_ITEMS = 128  # BSHUF_MIN_RECOMMEND_BLOCK


def shuffle(data: bytes, itemsize: int) -> bytes:
    """First bytes of all items, then second bytes, and so on. Bytes beyond the last whole item stay as they are."""
    whole = len(data) - len(data) % itemsize
    return np.frombuffer(data, np.uint8, whole).reshape(-1, itemsize).T.tobytes() + data[whole:]


def unshuffle(data: bytes, itemsize: int) -> bytes:
    """Undo `shuffle`."""
    whole = len(data) - len(data) % itemsize
    return np.frombuffer(data, np.uint8, whole).reshape(itemsize, -1).T.tobytes() + data[whole:]


def bitshuffle(data: bytes, itemsize: int) -> bytes:
    """The bitshuffle library's transform in blocks of its default size; the last `n mod 8` items stay as they are."""
    return _by_blocks(data, itemsize, _bit_planes)


def bitunshuffle(data: bytes, itemsize: int) -> bytes:
    """Undo `bitshuffle`."""
    return _by_blocks(data, itemsize, items_of_bit_planes)


def is_one_block(n_bytes: int, itemsize: int) -> bool:
    """Whether `bitshuffle` takes so many bytes as one block and leaves none as it is."""
    return n_bytes % (_BLOCK_MULTIPLE * itemsize) == 0 and n_bytes <= _block_items(itemsize) * itemsize


def _block_items(itemsize: int) -> int:
    return max(_MIN_BLOCK_ITEMS, _TARGET_BLOCK_BYTES // itemsize // _BLOCK_MULTIPLE * _BLOCK_MULTIPLE)


def _by_blocks(data: bytes, itemsize: int, transform: Callable[[NDArray[np.uint8], int], bytes]) -> bytes:
    n_items = len(data) // itemsize
    done = (n_items - n_items % _BLOCK_MULTIPLE) * itemsize
    values = np.frombuffer(data, np.uint8, done)
    step = _block_items(itemsize) * itemsize
    parts = [transform(values[at : at + step], itemsize) for at in range(0, done, step)]
    return b"".join((*parts, data[done:]))


def _bit_planes(block: NDArray[np.uint8], itemsize: int) -> bytes:
    bits = np.unpackbits(block.reshape(-1, itemsize), axis=1, bitorder="little")
    return np.packbits(bits.T, axis=1, bitorder="little").tobytes()


def items_of_bit_planes(block: NDArray[np.uint8], itemsize: int) -> bytes:
    """The items, a multiple of 8, whose bits are stored as one plane for each bit of an item."""
    bits = np.unpackbits(block.reshape(8 * itemsize, -1), axis=1, bitorder="little")
    return np.packbits(bits.T, axis=1, bitorder="little").tobytes()
