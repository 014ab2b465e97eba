"""The fixed-stride ZIP directory of a packed shard, and the Zarr index at its start.

Owns where a chunk lies: from bytes of the shard's tail, directory, index and local headers to offsets and sizes that
are checked against the shard's size. Reads nothing itself and must not know what a chunk's bytes mean. Everything here
is a pure function or an immutable value, so threads may share all of it.

Facts: "PackedFormat documentation, Random-access central directory" for the fixed length of the entries; PKWARE's
APPNOTE 6.3 for the records; the Zarr v3 `sharding_indexed` codec (ZEP 2) for the index.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dafmount.errors import CorruptShard, UnsupportedFormat

TAIL_BYTES = 98
"""ZIP64 end record (56), its locator (20) and the end record (22): the last bytes of every shard upstream writes."""

LOCAL_HEADER_BYTES = 30
CENTRAL_ENTRY_BYTES = 46
INDEX_ENTRY_BYTES = 16
INDEX_CHECKSUM_BYTES = 4

_END = struct.Struct("<IHHHHIIH")  # APPNOTE 4.3.16
_END_SIGNATURE = 0x06054B50
_LOCATOR = struct.Struct("<IIQI")  # APPNOTE 4.3.15
_LOCATOR_SIGNATURE = 0x07064B50
_END64 = struct.Struct("<IQHHIIQQQQ")  # APPNOTE 4.3.14
_END64_SIGNATURE = 0x06064B50
_CENTRAL = struct.Struct("<IHHHHHHIIIHHHHHII")  # APPNOTE 4.3.12
_CENTRAL_SIGNATURE = 0x02014B50
_LOCAL_LENGTHS = struct.Struct("<IHHHHHIIIHH")  # APPNOTE 4.3.7
_LOCAL_SIGNATURE = 0x04034B50
_LOCAL_SIGNATURE_BYTES = b"PK\x03\x04"
_EXTRA_HEAD = struct.Struct("<HH")
_U64 = struct.Struct("<Q")
_ZIP64_EXTRA = 0x0001  # APPNOTE 4.5.3
_SENTINEL_32 = 0xFFFFFFFF
_ABSENT = 0xFFFFFFFFFFFFFFFF
_MAX_SIZE = 1 << 62
_CODEC_JSON_NAME = b"codec.json"
_MAX_CODEC_JSON_BYTES = 1 << 16
_NO_PLACE = -1


@dataclass(frozen=True, slots=True)
class End:
    """Where the central directory lies: offset and length in bytes within the shard, and its number of entries."""

    directory_offset: int
    directory_bytes: int
    n_entries: int


@dataclass(frozen=True, slots=True)
class Stride:
    """The one form that all chunk entries of a shard's directory share.

    `zip64_at` is where the ZIP64 extra field begins within an entry, -1 where there is none. `raw_at`, `stored_at` and
    `offset_at` are where its three values lie within an entry, -1 for those that the entry's own 32-bit field holds.
    `limit` is where the chunks' bytes must end. `mask` and `template` (`entry_bytes` long) are the bytes that every
    entry has in common: `entry & mask == template`.
    """

    entry_bytes: int
    name_bytes: int
    extra_bytes: int
    comment_bytes: int
    zip64_at: int
    raw_at: int
    stored_at: int
    offset_at: int
    limit: int
    dtype: np.dtype[np.void]
    mask: NDArray[np.uint8]
    template: NDArray[np.uint8]
    mask_number: int
    template_number: int

    @property
    def header_hint(self) -> int:
        """How many bytes a chunk's local header most likely has at most."""
        return LOCAL_HEADER_BYTES + self.name_bytes + self.extra_bytes


class Chunks(NamedTuple):
    """What the directory says of consecutive chunks, one element of each array a chunk.

    `header_offset` is where the chunk's local header begins. A local header has a length of its own (see `data_start`);
    `header_hint` bytes are enough for all that upstream writes, so that header and data can be read at once.
    """

    method: NDArray[np.uint16]
    crc: NDArray[np.uint32]
    stored_bytes: NDArray[np.int64]
    raw_bytes: NDArray[np.int64]
    header_offset: NDArray[np.int64]
    header_hint: int


class Entry(NamedTuple):
    """What the directory says of one chunk; the fields are those of `Chunks`."""

    method: int
    crc: int
    stored_bytes: int
    raw_bytes: int
    header_offset: int


class CodecJson(NamedTuple):
    """Where the `codec.json` of a shard lies."""

    header_offset: int
    stored_bytes: int
    crc: int
    header_hint: int


class Index(NamedTuple):
    """The Zarr index of a shard: `offset` and `length` in bytes of each chunk, both -1 for a chunk that is absent."""

    offset: NDArray[np.int64]
    length: NDArray[np.int64]


class _Places(NamedTuple):
    """Where in an entry its ZIP64 extra field, and in that the 64-bit values lie; -1 for what is not there."""

    zip64_at: int
    zip64_bytes: int
    raw_at: int
    stored_at: int
    offset_at: int


_NO_PLACES = _Places(_NO_PLACE, 0, _NO_PLACE, _NO_PLACE, _NO_PLACE)


def parse_end(tail: bytes, shard_bytes: int, where: str) -> End:
    """The end records in `tail`, the last `min(TAIL_BYTES, shard_bytes)` bytes of a shard.

    Reads the ZIP64 form that upstream writes, and the plain 22-byte record of a "zipped" shard of other origin; neither
    may be followed by an archive comment. Raises CorruptShard.
    """
    if len(tail) < _END.size:
        raise CorruptShard(
            f"{where}: the shard has {shard_bytes} bytes, fewer than the {_END.size} of a ZIP end record"
        )
    fields = _END.unpack_from(tail, len(tail) - _END.size)
    if fields[0] != _END_SIGNATURE or fields[7] != 0:
        raise CorruptShard(
            f"{where}: found {tail[-_END.size :].hex()} as the last {_END.size} bytes, expected a ZIP end record"
        )
    locator_at = len(tail) - _END.size - _LOCATOR.size
    if locator_at >= 0 and tail[locator_at : locator_at + 4] == _LOCATOR_SIGNATURE.to_bytes(4, "little"):
        return _parse_end64(tail, locator_at, shard_bytes, where)
    _, disk, directory_disk, n_here, n_entries, directory_bytes, directory_offset, _ = fields
    if disk or directory_disk or n_here != n_entries:
        raise CorruptShard(f"{where}: the ZIP end record speaks of several disks, expected one")
    return _checked_end(End(directory_offset, directory_bytes, n_entries), shard_bytes - _END.size, where)


def _parse_end64(tail: bytes, locator_at: int, shard_bytes: int, where: str) -> End:
    record_at = locator_at - _END64.size
    if record_at < 0:
        raise CorruptShard(f"{where}: the shard has {shard_bytes} bytes, too few for its ZIP64 end record")
    record_offset = shard_bytes - len(tail) + record_at
    _, disk, located, n_disks = _LOCATOR.unpack_from(tail, locator_at)
    if located != record_offset or disk or n_disks > 1:
        raise CorruptShard(
            f"{where}: the ZIP64 locator points at {located} on disk {disk} of {n_disks}, "
            f"expected {record_offset} on 0 of 1"
        )
    signature, record_bytes, _, _, disk, directory_disk, n_here, n_entries, directory_bytes, directory_offset = (
        _END64.unpack_from(tail, record_at)
    )
    if signature != _END64_SIGNATURE or record_bytes != _END64.size - 12:
        raise CorruptShard(
            f"{where}: found signature {signature:#010x} and size {record_bytes} at {record_offset}, "
            f"expected a ZIP64 end record ({_END64_SIGNATURE:#010x}, {_END64.size - 12})"
        )
    if disk or directory_disk or n_here != n_entries:
        raise CorruptShard(f"{where}: the ZIP64 end record speaks of several disks, expected one")
    return _checked_end(End(directory_offset, directory_bytes, n_entries), record_offset, where)


def _checked_end(end: End, stop: int, where: str) -> End:
    if end.directory_offset + end.directory_bytes > stop:
        raise CorruptShard(
            f"{where}: the directory claims {end.directory_bytes} bytes at {end.directory_offset}, "
            f"but its end record begins at {stop}"
        )
    if end.n_entries * CENTRAL_ENTRY_BYTES > end.directory_bytes:
        raise CorruptShard(
            f"{where}: the directory claims {end.n_entries} entries in {end.directory_bytes} bytes, "
            f"but each takes at least {CENTRAL_ENTRY_BYTES}"
        )
    return end


def parse_stride(first_entry: bytes, end: End, n_chunks: int, where: str) -> Stride:
    """The form of the directory's entries, from its first `min(4096, end.directory_bytes)` bytes.

    Raises CorruptShard where the directory cannot list `n_chunks` chunks with entries of one length, which may be
    followed by one `codec.json`. A shard with absent chunks lists fewer: see `parse_index`.
    """
    if end.n_entries not in (n_chunks, n_chunks + 1):
        raise CorruptShard(
            f"{where}: the directory lists {end.n_entries} entries, expected one for each of {n_chunks} chunks"
        )
    if n_chunks == 0:
        return _make_stride(0, 0, 0, _NO_PLACES, end.directory_offset)
    if len(first_entry) < CENTRAL_ENTRY_BYTES:
        raise CorruptShard(
            f"{where}: the directory has {len(first_entry)} bytes, expected at least {CENTRAL_ENTRY_BYTES}"
        )
    fields = _CENTRAL.unpack_from(first_entry)
    if fields[0] != _CENTRAL_SIGNATURE:
        raise CorruptShard(f"{where}: entry 0 has signature {fields[0]:#010x}, expected {_CENTRAL_SIGNATURE:#010x}")
    name_bytes, extra_bytes, comment_bytes = fields[10:13]
    entry_bytes = CENTRAL_ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes
    if CENTRAL_ENTRY_BYTES + name_bytes + extra_bytes > len(first_entry):
        raise CorruptShard(f"{where}: entry 0 claims {entry_bytes} bytes of a directory of {end.directory_bytes}")
    rest = end.directory_bytes - n_chunks * entry_bytes
    least = CENTRAL_ENTRY_BYTES if end.n_entries > n_chunks else 0
    if rest < least or (least == 0 and rest > 0):
        raise CorruptShard(
            f"{where}: the directory has {end.directory_bytes} bytes, which {n_chunks} entries of {entry_bytes} "
            f"{'and one more ' if least else ''}do not fill"
        )
    sentinels = tuple(fields[at] == _SENTINEL_32 for at in (9, 8, 16))
    places = _zip64_places(first_entry, name_bytes, extra_bytes, sentinels, where)
    return _make_stride(name_bytes, extra_bytes, comment_bytes, places, end.directory_offset)


def _zip64_places(entry: bytes, name_bytes: int, extra_bytes: int, sentinels: tuple[bool, ...], where: str) -> _Places:
    """Where the 64-bit values of `entry` lie; `sentinels` tells which of raw size, stored size and offset it has."""
    if not any(sentinels):
        return _NO_PLACES
    at = CENTRAL_ENTRY_BYTES + name_bytes
    stop = at + extra_bytes
    while at + _EXTRA_HEAD.size <= stop:
        kind, size = _EXTRA_HEAD.unpack_from(entry, at)
        if kind == _ZIP64_EXTRA:
            break
        at += _EXTRA_HEAD.size + size
    else:
        raise CorruptShard(f"{where}: entry 0 has 32-bit sentinels but no ZIP64 extra field")
    if size < 8 * sum(sentinels) or at + _EXTRA_HEAD.size + size > stop:
        raise CorruptShard(f"{where}: the ZIP64 extra field of entry 0 has {size} bytes, expected {8 * sum(sentinels)}")
    places = []
    value_at = at + _EXTRA_HEAD.size
    for is_sentinel in sentinels:
        places.append(value_at if is_sentinel else _NO_PLACE)
        value_at += 8 * is_sentinel
    return _Places(at, size, *places)


def _make_stride(name_bytes: int, extra_bytes: int, comment_bytes: int, places: _Places, limit: int) -> Stride:
    entry_bytes = CENTRAL_ENTRY_BYTES + name_bytes + extra_bytes + comment_bytes
    zip64_at, zip64_bytes, raw_at, stored_at, offset_at = places
    values = {"raw": (24, raw_at), "stored": (20, stored_at), "offset": (42, offset_at)}
    dtype = np.dtype(
        {
            "names": ["method", "crc", *values],
            "formats": ["<u2", "<u4", *("<u4" if wide_at == _NO_PLACE else "<u8" for _, wide_at in values.values())],
            "offsets": [10, 16, *(at if wide_at == _NO_PLACE else wide_at for at, wide_at in values.values())],
            "itemsize": entry_bytes,
        }
    )
    mask = np.zeros(entry_bytes, np.uint8)
    template = np.zeros(entry_bytes, np.uint8)

    def require(at: int, wanted: bytes) -> None:
        mask[at : at + len(wanted)] = 0xFF
        template[at : at + len(wanted)] = np.frombuffer(wanted, np.uint8)

    require(0, _CENTRAL_SIGNATURE.to_bytes(4, "little"))
    require(28, struct.pack("<HHH", name_bytes, extra_bytes, comment_bytes))
    for at, wide_at in values.values():
        if wide_at != _NO_PLACE:
            require(at, b"\xff\xff\xff\xff")
    if zip64_at != _NO_PLACE:
        require(zip64_at, _EXTRA_HEAD.pack(_ZIP64_EXTRA, zip64_bytes))
    mask.setflags(write=False)
    template.setflags(write=False)
    return Stride(
        entry_bytes,
        name_bytes,
        extra_bytes,
        comment_bytes,
        zip64_at,
        raw_at,
        stored_at,
        offset_at,
        limit,
        dtype,
        mask,
        template,
        int.from_bytes(mask.tobytes(), "little"),
        int.from_bytes(template.tobytes(), "little"),
    )


def parse_entry(block: bytes | memoryview, stride: Stride, chunk: int, where: str) -> Entry:
    """As `parse_entries` for one chunk, whose entry is all of `block`; ten times as fast as an array of one."""
    if len(block) != stride.entry_bytes:
        raise CorruptShard(f"{where}: {len(block)} bytes of the directory, expected an entry of {stride.entry_bytes}")
    if int.from_bytes(block, "little") & stride.mask_number != stride.template_number:
        raise _bad_entry(np.frombuffer(block, np.uint8).reshape(1, -1), stride, chunk, where)
    fields = _CENTRAL.unpack_from(block)
    raw, stored, offset = fields[9], fields[8], fields[16]
    if stride.raw_at != _NO_PLACE:
        (raw,) = _U64.unpack_from(block, stride.raw_at)
    if stride.stored_at != _NO_PLACE:
        (stored,) = _U64.unpack_from(block, stride.stored_at)
    if stride.offset_at != _NO_PLACE:
        (offset,) = _U64.unpack_from(block, stride.offset_at)
    if offset + stored + LOCAL_HEADER_BYTES + stride.name_bytes > stride.limit or raw > _MAX_SIZE:
        raise _outside(chunk, stored, raw, offset, stride, where)
    return Entry(fields[4], fields[7], stored, raw, offset)


def parse_entries(block: bytes | memoryview, stride: Stride, first_chunk: int, n: int, where: str) -> Chunks:
    """What the `n` entries from that of chunk `first_chunk` say; they are the first `n * stride.entry_bytes` of
    `block`.

    Checks signatures, equal lengths, ZIP64 extra fields, and that header and data of each chunk lie before the
    directory. Raises CorruptShard, naming the first bad chunk.
    """
    if len(block) < n * stride.entry_bytes:
        raise CorruptShard(f"{where}: {len(block)} bytes of the directory are too few for {n} entries")
    entries = np.frombuffer(block, np.uint8, n * stride.entry_bytes).reshape(n, stride.entry_bytes)
    if ((entries & stride.mask) != stride.template).any():
        raise _bad_entry(entries, stride, first_chunk, where)
    fields = np.frombuffer(block, stride.dtype, n)
    offset = fields["offset"].astype(np.uint64)
    stored = fields["stored"].astype(np.uint64)
    raw = fields["raw"].astype(np.uint64)
    room = max(0, stride.limit - LOCAL_HEADER_BYTES - stride.name_bytes)
    # offset is at most room where the second test counts, so that room - offset does not wrap around.
    bad = (offset > room) | (stored > np.uint64(room) - offset) | (raw > _MAX_SIZE)
    if bad.any():
        k = int(bad.argmax())
        raise _outside(first_chunk + k, int(stored[k]), int(raw[k]), int(offset[k]), stride, where)
    return Chunks(
        fields["method"].astype(np.uint16),
        fields["crc"].astype(np.uint32),
        stored.view(np.int64),
        raw.view(np.int64),
        offset.view(np.int64),
        stride.header_hint,
    )


def _outside(chunk: int, stored: int, raw: int, offset: int, stride: Stride, where: str) -> CorruptShard:
    return CorruptShard(
        f"{where}: chunk {chunk} claims {stored} bytes ({raw} decoded) at {offset}, expected all before {stride.limit}"
    )


def _bad_entry(entries: NDArray[np.uint8], stride: Stride, first_chunk: int, where: str) -> CorruptShard:
    wrong = (entries & stride.mask) != stride.template
    k = int(wrong.any(axis=1).argmax())
    at = int(wrong[k].argmax())
    return CorruptShard(
        f"{where}: the directory entry of chunk {first_chunk + k} has byte {int(entries[k, at]):#04x} at {at}, "
        f"expected {int(stride.template[at]):#04x} as in the first entry"
    )


def data_start(header: bytes | memoryview, at: int, where: str) -> int:
    """How many bytes after the beginning of its local header, at `header[at]`, a chunk's data begins.

    Raises CorruptShard where there is no local header; one of zeros was never completed by its writer.
    """
    if at < 0 or len(header) - at < LOCAL_HEADER_BYTES:
        raise CorruptShard(f"{where}: {len(header) - at} bytes are too few for a local header of {LOCAL_HEADER_BYTES}")
    fields = _LOCAL_LENGTHS.unpack_from(header, at)
    if fields[0] != _LOCAL_SIGNATURE:
        if not any(header[at : at + LOCAL_HEADER_BYTES]):
            raise CorruptShard(f"{where}: its local header is all zeros: the entry was never completed")
        raise CorruptShard(
            f"{where}: its local header has signature {fields[0]:#010x}, expected {_LOCAL_SIGNATURE:#010x}"
        )
    name_bytes: int = fields[9]
    extra_bytes: int = fields[10]
    return LOCAL_HEADER_BYTES + name_bytes + extra_bytes


def data_starts(
    block: bytes | memoryview, headers: NDArray[np.int64], numbers: Sequence[int], where: str
) -> NDArray[np.int64]:
    """Where in `block` the data of many chunks begins, whose local headers begin at `headers`; see `data_start`.

    Raises CorruptShard, naming the first bad one of the chunks, which have these `numbers`.
    """
    if len(headers) and (int(headers.min()) < 0 or int(headers.max()) + LOCAL_HEADER_BYTES > len(block)):
        raise CorruptShard(f"{where}: a local header lies outside the {len(block)} bytes read")
    data = np.frombuffer(block, np.uint8)
    heads = data[headers[:, None] + _HEADER_COLUMNS]
    wrong = (heads[:, :4] != _HEADER_SIGNATURE).any(axis=1)
    if wrong.any():
        k = int(wrong.argmax())
        data_start(block, int(headers[k]), f"{where}: chunk {numbers[k]}")
    lengths = np.ascontiguousarray(heads[:, 4:]).view("<u2").astype(np.int64)
    starts: NDArray[np.int64] = headers + (LOCAL_HEADER_BYTES + lengths[:, 0] + lengths[:, 1])
    return starts


_HEADER_COLUMNS = np.array([0, 1, 2, 3, 26, 27, 28, 29], np.int64)  # signature, name length, extra length
_HEADER_SIGNATURE = np.frombuffer(_LOCAL_SIGNATURE_BYTES, np.uint8)


def last_entry_range(first_entry: bytes, end: End) -> tuple[int, int] | None:
    """Offset and length in the shard of the last entry up to the end of a `codec.json`'s name; see `is_codec_json`.

    None where the entries before it, which are as long as the first, leave no room for it.
    """
    if len(first_entry) < CENTRAL_ENTRY_BYTES:
        return None
    skipped = (end.n_entries - 1) * (CENTRAL_ENTRY_BYTES + sum(_CENTRAL.unpack_from(first_entry)[10:13]))
    length = CENTRAL_ENTRY_BYTES + len(_CODEC_JSON_NAME)
    if end.n_entries == 0 or skipped + length > end.directory_bytes:
        return None
    return end.directory_offset + skipped, length


def is_codec_json(entry: bytes) -> bool:
    """Whether an entry of the directory, at least the bytes that `last_entry_range` names, is that of `codec.json`."""
    fields = _CENTRAL.unpack_from(entry)
    is_of_its_length = fields[0] == _CENTRAL_SIGNATURE and fields[10] == len(_CODEC_JSON_NAME)
    return is_of_its_length and entry[CENTRAL_ENTRY_BYTES:].startswith(_CODEC_JSON_NAME)


def codec_json_entry_range(end: End, stride: Stride, n_chunks: int) -> tuple[int, int] | None:
    """Offset and length in the shard of the directory's entry after the chunks', None where there is none.

    "PackedFormat documentation, Per-codec ZIP method and self-description": shards of STORED chunks end with it.
    """
    if end.n_entries != n_chunks + 1:
        return None
    skipped = n_chunks * stride.entry_bytes if n_chunks else 0
    return end.directory_offset + skipped, min(end.directory_bytes - skipped, 4096)


def parse_codec_json_entry(block: bytes, end: End, where: str) -> CodecJson:
    """Where `codec.json` lies, from the bytes that `codec_json_entry_range` names. Raises CorruptShard."""
    if len(block) < CENTRAL_ENTRY_BYTES:
        raise CorruptShard(
            f"{where}: the entry after the chunks has {len(block)} bytes, expected {CENTRAL_ENTRY_BYTES}"
        )
    fields = _CENTRAL.unpack_from(block)
    name_bytes, extra_bytes = fields[10], fields[11]
    name = block[CENTRAL_ENTRY_BYTES : CENTRAL_ENTRY_BYTES + name_bytes]
    if fields[0] != _CENTRAL_SIGNATURE or name != _CODEC_JSON_NAME:
        raise CorruptShard(f"{where}: the entry after the chunks is {name[:64]!r}, expected {_CODEC_JSON_NAME!r}")
    if CENTRAL_ENTRY_BYTES + name_bytes + extra_bytes > len(block):
        raise CorruptShard(f"{where}: the entry of codec.json does not fit the directory")
    sizes = [fields[9], fields[8], fields[16]]
    places = _zip64_places(block, name_bytes, extra_bytes, tuple(size == _SENTINEL_32 for size in sizes), where)
    for which, at in enumerate(places[2:]):
        if at != _NO_PLACE:
            sizes[which] = int.from_bytes(block[at : at + 8], "little")
    raw, stored, offset = sizes
    if fields[4] != 0:
        raise UnsupportedFormat(f"{where}: codec.json is compressed with ZIP method {fields[4]}, expected 0")
    if raw != stored or stored > _MAX_CODEC_JSON_BYTES or offset + LOCAL_HEADER_BYTES + stored > end.directory_offset:
        raise CorruptShard(
            f"{where}: codec.json claims {stored} bytes at {offset}, expected at most {_MAX_CODEC_JSON_BYTES} "
            f"before {end.directory_offset}"
        )
    return CodecJson(offset, stored, fields[7], LOCAL_HEADER_BYTES + name_bytes + extra_bytes)


def index_bytes(n_chunks: int) -> int:
    """Length in bytes of the Zarr index at the start of an "indexed+zipped" shard."""
    return n_chunks * INDEX_ENTRY_BYTES + INDEX_CHECKSUM_BYTES


def parse_index(block: bytes, n_chunks: int, shard_bytes: int, where: str) -> Index:
    """The Zarr index, the first `index_bytes(n_chunks)` of an "indexed+zipped" shard, with its CRC-32C checked.

    Needed only where the ZIP directory lists fewer entries than there are chunks: absent ones (2^64-1 twice) have none.
    For gzip a chunk's range is a whole gzip stream. Raises CorruptShard.
    """
    from google_crc32c import value as crc32c  # the fallback alone needs it

    expected = index_bytes(n_chunks)
    if len(block) != expected:
        raise CorruptShard(f"{where}: the Zarr index has {len(block)} bytes, expected {expected}")
    body = block[:-INDEX_CHECKSUM_BYTES]
    stated = int.from_bytes(block[-INDEX_CHECKSUM_BYTES:], "little")
    found = crc32c(body)
    if found != stated:
        raise CorruptShard(f"{where}: the Zarr index has CRC-32C {found:#010x}, expected {stated:#010x}")
    pairs = np.frombuffer(body, "<u8").reshape(n_chunks, 2)
    absent = (pairs == np.uint64(_ABSENT)).all(axis=1)
    offset, length = pairs[:, 0].copy(), pairs[:, 1].copy()
    bad = ~absent & ((offset > shard_bytes) | (length > np.uint64(shard_bytes) - offset))
    if bad.any():
        k = int(bad.argmax())
        raise CorruptShard(
            f"{where}: the Zarr index puts chunk {k} at {int(offset[k])} with {int(length[k])} bytes, "
            f"but the shard has {shard_bytes}"
        )
    offset[absent] = length[absent] = _ABSENT
    return Index(offset.view(np.int64), length.view(np.int64))
