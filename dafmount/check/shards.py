"""Everything there is in one shard, read once: end records, directory, index, headers, `codec.json`, chunks, padding.

Owns what a sound shard must be beyond what a reader needs. Must not know Daf's names. Blocks of chunks are checked in
threads (see blocks.py); findings are reported by the thread that asked.

Facts: "PackedFormat documentation" for the layout of the shard and its padding; PKWARE's APPNOTE 6.3 for the records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from functools import partial

import google_crc32c
import numpy as np

from dafmount.check.blocks import (
    READ_ERRORS,
    Block,
    OpenedShard,
    Outcome,
    Shard,
    absent_chunks,
    check_block,
    header_faults,
    index_pairs,
    name_bytes,
)
from dafmount.check.findings import Sink
from dafmount.check.values import ValueCheck
from dafmount.check.work import Work
from dafmount.daf.catalog import Packing
from dafmount.daf.eltype import NUMERIC
from dafmount.errors import CorruptShard, UnsupportedFormat
from dafmount.shard import codecs, directory
from dafmount.shard.names import GZIP_NAME

_INDEX_BLOCK = 1 << 16
_FREE = frozenset({"blocksize", "typesize"})
"""What codec.json says of the compressor that decoding does not depend on."""

_BYTES: dict[str, object] = {"name": "bytes", "configuration": {}}


def check_shard(shard: Shard, sink: Sink, work: Work, values: ValueCheck | None, *, quick: bool) -> None:
    """Report what is wrong with a shard; `values` is fed the values of a shard of one dimension.

    With `quick` no chunk is read.
    """
    try:
        opened = _open(shard, sink, keeps_values=values is not None, quick=quick)
    except READ_ERRORS as error:
        sink.error(error)
        return
    for outcome in work.ordered(partial(check_block, opened), _blocks(opened)):
        for chunk, message in outcome.faults:
            sink.error(message, chunk)
        work.advance(outcome.read_bytes)
        if values is not None and not quick:
            _feed(shard, outcome, values)
    if values is not None and not quick:
        values.finish()


def _feed(shard: Shard, outcome: Outcome, values: ValueCheck) -> None:
    """The values of the chunks that could be read, without padding."""
    per_chunk, n_values = shard.grid.chunk_count, shard.grid.shape[0]
    numbers = np.frombuffer(outcome.raw, NUMERIC[shard.eltype])
    edges = np.flatnonzero(np.diff(outcome.is_good.astype(np.int8), prepend=0, append=0))
    for start, stop in edges.reshape(-1, 2).tolist():
        position = (outcome.block.first + start) * per_chunk
        last = min((outcome.block.first + stop) * per_chunk, n_values)
        values.feed(position, numbers[start * per_chunk :][: last - position])


# The shard as a whole.


def _open(shard: Shard, sink: Sink, *, keeps_values: bool, quick: bool) -> OpenedShard:
    """Reads the tail, the index's checksum and codec.json; raises where that leaves nothing to go by."""
    source, name, n_chunks = shard.source, shard.name, shard.grid.n_chunks
    codec = codecs.find_codec(shard.packing.compression, name)
    if shard.packing.compression_level is not None:
        _check_level(shard.packing, sink)
    tail_bytes = min(directory.TAIL_BYTES, source.size)
    end = directory.parse_end(source.read(source.size - tail_bytes, tail_bytes), source.size, name)
    counts = _present_counts(shard, sink)
    n_present = n_chunks if counts is None else sum(counts)
    is_stored = codec.zip_method == codecs.METHOD_STORED
    n_listed = _listed(end.n_entries, n_chunks, n_present, is_stored)
    first = source.read(end.directory_offset, min(4096, end.directory_bytes))
    stride = directory.parse_stride(first, end, n_listed, name)
    has_gzip_names = shard.is_gzip and (shard.is_indexed or first[46:48] == GZIP_NAME[:2])
    expected = name_bytes(shard.grid, is_gzip_name=has_gzip_names)
    if n_listed and stride.name_bytes != expected:
        sink.error(f"its directory gives chunks names of {stride.name_bytes} bytes, expected {expected}")
    text = _read_codec_json(shard, end, stride, n_listed, sink)
    if text is None and is_stored and n_chunks:
        sink.warning("has no codec.json, without which other programs cannot decode its chunks")
    needs_text = codecs.needs_codec_json(shard.packing.compression, shard.itemsize)
    decoder = codecs.make_decoder(shard.packing.compression, shard.itemsize, text if needs_text else None, True, name)
    if counts is None or n_listed != n_present:
        counts = [min(shard.block_chunks, n_chunks - at) for at in range(0, n_chunks, shard.block_chunks)]
    return OpenedShard(shard, end, stride, decoder, n_listed, counts, has_gzip_names, keeps_values, quick)


def _check_level(packing: Packing, sink: Sink) -> None:
    try:
        codecs.check_level(packing.compression, packing.compression_level or 0)
    except UnsupportedFormat as error:
        sink.error(error)


def _listed(n_entries: int, n_chunks: int, n_present: int, is_stored: bool) -> int:
    """How many of the directory's entries are chunks: all, or those that the index does not call absent."""
    for n in (n_present, n_chunks):
        if n_entries == n + is_stored:
            return n
    return n_present if n_entries in (n_present, n_present + 1) else n_chunks


def _present_counts(shard: Shard, sink: Sink) -> list[int] | None:
    """How many chunks of each block the Zarr index calls present; None without an index. Checks its CRC-32C."""
    if not shard.is_indexed:
        return None
    n_chunks, source = shard.grid.n_chunks, shard.source
    length = directory.index_bytes(n_chunks)
    if length > source.size:
        raise CorruptShard(f"{shard.name}: {source.size} bytes cannot hold the Zarr index of {n_chunks} chunks")
    counts: list[int] = []
    crc = 0
    step = shard.block_chunks * max(1, _INDEX_BLOCK // shard.block_chunks)
    for first in range(0, n_chunks, step):
        n = min(step, n_chunks - first)
        block = source.read(first * directory.INDEX_ENTRY_BYTES, n * directory.INDEX_ENTRY_BYTES)
        crc = google_crc32c.extend(crc, block)
        is_present = ~absent_chunks(index_pairs(block))
        starts = np.arange(0, n, shard.block_chunks)
        counts += np.add.reduceat(is_present, starts, dtype=np.int64).tolist()
    stated = int.from_bytes(
        source.read(length - directory.INDEX_CHECKSUM_BYTES, directory.INDEX_CHECKSUM_BYTES), "little"
    )
    if crc != stated:
        sink.error(f"the Zarr index has CRC-32C {crc:#010x}, expected {stated:#010x}")
    return counts


def _blocks(opened: OpenedShard) -> Iterator[Block]:
    n_chunks, step = opened.shard.grid.n_chunks, opened.shard.block_chunks
    entry = 0
    for first, n_entries in zip(range(0, n_chunks, step), opened.present_counts, strict=True):
        yield Block(first, min(step, n_chunks - first), entry, n_entries)
        entry += n_entries


# codec.json.


def _read_codec_json(
    shard: Shard, end: directory.End, stride: directory.Stride, n_listed: int, sink: Sink
) -> bytes | None:
    """The text of codec.json, where there is one, found right or reported."""
    place = directory.codec_json_entry_range(end, stride, n_listed)
    if place is None:
        return None
    block = shard.source.read(*place)
    entry = directory.parse_codec_json_entry(block, end, shard.name)
    lengths = sum(struct.unpack_from("<HHH", block, 28))
    if place[1] != directory.CENTRAL_ENTRY_BYTES + lengths:
        sink.error(f"the directory ends with {place[1]} bytes, expected the {46 + lengths} of codec.json's entry")
    header = shard.source.read(entry.header_offset, min(entry.header_hint, end.directory_offset - entry.header_offset))
    skip = directory.data_start(header, 0, f"{shard.name}: codec.json")
    for fault in header_faults(header, block, "codec.json"):
        sink.error(fault)
    if entry.header_offset + skip + entry.stored_bytes > end.directory_offset:
        raise CorruptShard(f"codec.json has {entry.stored_bytes} bytes, more than there are before the directory")
    text = shard.source.read(entry.header_offset + skip, entry.stored_bytes)
    if codecs.crc32(text) != entry.crc:
        sink.error(f"codec.json: CRC-32 {codecs.crc32(text):#010x}, expected {entry.crc:#010x}")
    else:
        _check_codec_json(shard, text, sink)
    return text


def _check_codec_json(shard: Shard, text: bytes, sink: Sink) -> None:
    """Whether the text says what the descriptor says."""
    packing = shard.packing
    level = packing.compression_level or 0
    expected = codecs.codec_list(packing.compression, level, shard.itemsize)
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        sink.error(f"codec.json is no JSON: {error}")
        return
    if not isinstance(found, list) or len(found) != len(expected):
        sink.error(f"codec.json says {text.decode('utf-8', 'replace')[:200]}, expected {json.dumps(expected)}")
        return
    for at, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        # dafr calls strings `bytes` too.
        accepted = [wanted] if at or shard.itemsize else [wanted, _BYTES]
        if not any(_agrees(one, codec) for codec in accepted):
            sink.error(f"codec.json says {json.dumps(one)[:200]}, expected {json.dumps(wanted)}")


def _agrees(found: object, wanted: dict[str, object]) -> bool:
    if isinstance(found, str):
        return found == wanted["name"] and not wanted["configuration"]
    if not isinstance(found, dict) or found.get("name") != wanted["name"]:
        return False
    configuration, expected = found.get("configuration", {}), wanted["configuration"]
    assert isinstance(expected, dict)
    if not isinstance(configuration, dict):
        return False
    return all(configuration.get(key) == value for key, value in expected.items() if key not in _FREE)
