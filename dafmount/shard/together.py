"""Many chunks decoded by one call of libblosc2.

A Blosc buffer is a header, a list of where its blocks' streams begin, and the streams, which may lie anywhere behind
that. So chunks that are one block each become the blocks of one larger buffer: a header goes before the stored bytes of
a run of chunks, as they lie in the shard, and names the streams in them. Zstandard frames are such streams too, once
the four bytes before each, which belong to its local header, hold its length. What a call costs is then paid once, and
the GIL is given up for a mebibyte at a time instead of for 8 KiB, so that threads can decode beside the requests.

Owns the making of such buffers. The checks of each chunk are the caller's; where the library refuses, the chunks one by
one tell which is bad.

Facts: c-blosc 1.21, README_CHUNK_FORMAT.rst: "bstarts", and the length that precedes each stream.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dafmount.shard import blosc

MAX_RAW_BYTES = 1 << 26
"""More than this is not decoded by one call, whose numbers have 31 bits."""

_LENGTH_BYTES = 4
_LENGTH = np.arange(_LENGTH_BYTES)
_ZSTD_FLAGS = blosc.flags_of("zstd", is_bit_shuffled=False)
_ZSTD_BIT_SHUFFLED_FLAGS = blosc.flags_of("zstd", is_bit_shuffled=True)


@dataclass(frozen=True, slots=True)
class Streams:
    """Chunks that can be decoded together: all of one raw size, one codec and one filter."""

    flags: int
    typesize: int
    starts: NDArray[np.int64]
    """Where in the run's stored bytes the length before each chunk's stream lies."""
    lengths: NDArray[np.int64]
    """Bytes of each stream."""
    has_lengths: bool
    """Whether the lengths are there already."""

    def decode(self, stored: bytes, begin: int, end: int, out: memoryview, chunk_bytes: int) -> bool:
        """Decode the chunks `begin` to `end`, which are in `stored`, one after the other to the beginning of `out`.

        False where that cannot be, or the library refuses; `out` is undefined then.
        """
        lib, raw_bytes = blosc.library(), (end - begin) * chunk_bytes
        if lib is None or raw_bytes > min(MAX_RAW_BYTES, len(out)):
            return False
        buffer = self._joined(stored, begin, end, chunk_bytes)
        n = lib.decompress_ctx(
            blosc.context_of_thread(lib), buffer.ctypes.data, len(buffer), blosc.address_of(out), raw_bytes
        )
        return n == raw_bytes

    def _joined(self, stored: bytes, begin: int, end: int, chunk_bytes: int) -> NDArray[np.uint8]:
        starts, lengths = self.starts[begin:end], self.lengths[begin:end]
        first, stop = int(starts.min()), int((starts + lengths).max()) + _LENGTH_BYTES
        head_bytes = blosc.HEADER_BYTES + 4 * len(starts)
        buffer = np.empty(head_bytes + stop - first, np.uint8)
        buffer[head_bytes:] = np.frombuffer(stored, np.uint8, stop - first, first)
        places = starts + (head_bytes - first)
        buffer[: blosc.HEADER_BYTES] = np.frombuffer(
            blosc.header(self.flags, self.typesize, len(starts) * chunk_bytes, chunk_bytes, len(buffer)), np.uint8
        )
        buffer[blosc.HEADER_BYTES : head_bytes].view("<u4")[:] = places
        if not self.has_lengths:
            buffer[places[:, None] + _LENGTH] = lengths.astype("<u4").view(np.uint8).reshape(-1, _LENGTH_BYTES)
        return buffer


def streams_of_blosc(
    block: bytes, starts: NDArray[np.int64], stored_bytes: NDArray[np.int64], chunk_bytes: int
) -> Streams | None:
    """Blosc buffers at `starts` of `block`, of `stored_bytes` each; None unless all are alike and `simple_chunks`."""
    if not len(starts):
        return None
    data = np.frombuffer(block, np.uint8)
    if not blosc.simple_chunks(data, starts, stored_bytes, chunk_bytes).all():
        return None
    flags, typesizes = data[starts + blosc.FLAGS_AT], data[starts + blosc.TYPESIZE_AT]
    if (flags != flags[0]).any() or (typesizes != typesizes[0]).any():
        return None
    before = blosc.HEADER_BYTES + 4
    flag, typesize = int(flags[0]), int(typesizes[0])
    if not blosc.is_one_stream(flag) and not _are_whole(data, starts + before, starts + stored_bytes, typesize):
        return None
    return Streams(
        flag, typesize, starts + before, stored_bytes - (before + _LENGTH_BYTES), has_lengths=True
    )


def streams_of_zstd(
    starts: NDArray[np.int64], stored_bytes: NDArray[np.int64], chunk_bytes: int, shuffled_itemsize: int = 0
) -> Streams | None:
    """Zstandard frames, one a chunk, each with bytes of its local header before it.

    With `shuffled_itemsize` the raw bytes are bit-shuffled as items of so many bytes.
    """
    # Blosc takes a stream as long as its block for one that is not compressed.
    if not len(starts) or starts.min() < _LENGTH_BYTES or stored_bytes.min() < 1 or stored_bytes.max() >= chunk_bytes:
        return None
    if (starts[1:] - _LENGTH_BYTES < starts[:-1] + stored_bytes[:-1]).any():  # a length would lie in another's bytes
        return None
    flags, typesize = (_ZSTD_BIT_SHUFFLED_FLAGS, shuffled_itemsize) if shuffled_itemsize else (_ZSTD_FLAGS, 1)
    return Streams(flags, typesize, starts - _LENGTH_BYTES, stored_bytes, has_lengths=False)


def _are_whole(
    data: NDArray[np.uint8], starts: NDArray[np.int64], stops: NDArray[np.int64], n_streams: int
) -> bool:
    """Whether the streams of chunks that have one for each byte of an item end where their chunk does, or before.

    The library would follow a longer one into the next chunk, of which it does not know that it is another.
    """
    at = starts
    for _ in range(n_streams):
        if (at + _LENGTH_BYTES > stops).any():
            return False
        at = at + _LENGTH_BYTES + data[at[:, None] + _LENGTH].view("<u4")[:, 0].astype(np.int64)
    return bool((at <= stops).all())
