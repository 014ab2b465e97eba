"""Shards that DataAxesFormats.jl and dafr wrote: we read them right, and write the same bytes."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import zstandard

from dafmount.shard import codecs, directory, grid, strings, writer

ITEM_BYTES = {"Bool": 1, "String": None} | {
    f"{kind}{bits}": bits // 8
    for kind, sizes in {"Int": (8, 16, 32, 64), "UInt": (8, 16, 32, 64), "Float": (32, 64)}.items()
    for bits in sizes
}
ARCHIVES = [f"julia/fpk/{name}.files" for name in ("bz", "bl", "zs", "gz")] + [
    f"dafr/{name}.daf" for name in ("blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip")
]


class Component(NamedTuple):
    shard: Path
    flat_name: str
    itemsize: int | None
    shape: list[int]
    chunk_shape: list[int]
    compression: str
    level: int

    @property
    def grid(self) -> grid.Grid:
        return grid.make_grid(self.shape, self.chunk_shape, self.itemsize or 1, 1 << 26, self.flat_name)


def packed_components(corpus: Path, archive: str) -> Iterator[Component]:
    root = corpus / archive
    n_entries = {path.stem: path.read_bytes().count(b"\n") for path in root.glob("axes/*.txt")}
    for path in sorted([*root.glob("vectors/*/*.json"), *root.glob("matrices/*/*/*.json")]):
        descriptor = json.loads(path.read_text())
        axes = path.relative_to(root).parts[1:-1]
        dense = descriptor["format"] == "dense"
        parts = {"": descriptor} if dense else {f".{k}": v for k, v in descriptor.items() if isinstance(v, dict)}
        for suffix, part in parts.items():
            if "packed_format" not in part:
                continue
            itemsize = ITEM_BYTES[part["eltype"]]
            flat = suffix or (".data" if itemsize else ".txt")
            yield Component(
                path.with_name(f"{path.stem}{suffix}.zip"),
                f"{path.relative_to(corpus).with_suffix('')}{flat}",
                itemsize,
                [n_entries[axis] for axis in axes] if dense else [part["n_elements"]],
                part["chunk_shape"],
                part["compression"],
                part["compression_level"],
            )


def read_shard(data: bytes, component: Component) -> bytes:
    """All flat bytes, through the ZIP directory."""
    where, shape = component.flat_name, component.grid
    n = shape.n_chunks
    end = directory.parse_end(data[-directory.TAIL_BYTES :], len(data), where)
    entries = data[end.directory_offset :][: end.directory_bytes]
    stride = directory.parse_stride(entries[:4096], end, n, where)
    chunks = directory.parse_entries(entries, stride, 0, n, where)
    starts = directory.data_starts(data, chunks.header_offset, range(1 << 40), where)
    decoder = codecs.make_decoder(component.compression, component.itemsize, None, True, where)
    if component.itemsize is not None:
        run = shape.run(0, shape.size)
        assert run is not None
        out = bytearray(run.buffer_bytes)
        decoder.decode_run(data, starts, chunks, out, run.places, shape.chunk_bytes, str)
        return bytes(out[run.skip : run.skip + shape.size])
    texts = []
    for k in range(n):
        entry = directory.parse_entry(entries[k * stride.entry_bytes : (k + 1) * stride.entry_bytes], stride, k, where)
        payload = data[int(starts[k]) : int(starts[k]) + entry.stored_bytes]
        raw = decoder.decode(payload, entry.method, entry.crc, entry.raw_bytes, None, 1 << 20, where)
        assert decoder.raw_size(payload[:16], len(payload), entry.raw_bytes, where) == len(raw)
        text = strings.decode_strings(raw, shape.chunk_count, shape.valid_count(k), where)
        assert strings.text_bytes(len(raw), shape.chunk_count, shape.valid_count(k), where) == len(text)
        texts.append(text)
    return b"".join(texts)


def write_again(flat: bytes, component: Component) -> bytes:
    out = io.BytesIO()
    source = flat if component.itemsize else flat.split(b"\n")[:-1]
    _, _, itemsize, shape, chunk_shape, compression, level = component
    assert writer.write_shard(out, source, shape, chunk_shape, itemsize, compression, level) == len(out.getvalue())
    return out.getvalue()


@pytest.mark.parametrize("archive", ARCHIVES)
def test_every_packed_component_decodes_to_the_expected_bytes(corpus: Path, archive: str) -> None:
    lines = (corpus / "expected-sha256.txt").read_text().splitlines()
    expected = {line.split(maxsplit=2)[2]: line.split()[0] for line in lines}
    components = list(packed_components(corpus, archive))
    assert components
    for component in components:
        flat = read_shard(component.shard.read_bytes(), component)
        assert hashlib.sha256(flat).hexdigest() == expected[component.flat_name], component.flat_name


@pytest.mark.parametrize(
    "archive", ["julia/fpk/zs.files", "dafr/blosc_zstd_bitshuffle.daf", "dafr/blosc_lz4_bitshuffle.daf"]
)
def test_the_writer_gives_the_same_bytes_as_upstream(corpus: Path, archive: str) -> None:
    for component in packed_components(corpus, archive):
        data = component.shard.read_bytes()
        assert write_again(read_shard(data, component), component) == data, component.flat_name


@pytest.mark.parametrize("archive", ARCHIVES)
def test_the_writer_differs_from_upstream_in_nothing_but_payloads(corpus: Path, archive: str) -> None:
    """Other zlibs and zstds compress otherwise; upstream's Julia calls all values one byte wide to blosc."""
    for component in packed_components(corpus, archive):
        theirs = component.shard.read_bytes()
        ours = write_again(read_shard(theirs, component), component)
        assert frame(ours, component) == frame(theirs, component), component.flat_name


def frame(data: bytes, component: Component) -> tuple[object, ...]:
    """What a shard says apart from its payloads and the numbers that follow from their lengths."""
    n = component.grid.n_chunks
    end = directory.parse_end(data[-directory.TAIL_BYTES :], len(data), "x")
    entries = bytearray(data[end.directory_offset :][: end.directory_bytes])
    stride = directory.parse_stride(bytes(entries[:4096]), end, n, "x")
    chunks = directory.parse_entries(bytes(entries), stride, 0, n, "x")
    stored = component.compression.startswith("blosc")
    headers = []
    gaps = []
    stops = [*chunks.header_offset.tolist()[1:], None]
    starts = directory.data_starts(data, chunks.header_offset, range(1 << 40), "x")
    for k, (header, start, stop) in enumerate(zip(chunks.header_offset.tolist(), starts.tolist(), stops, strict=True)):
        head = bytearray(data[header:start])
        if stored:  # the CRC is of the payload
            head[14:18] = bytes(4)
        if len(head) > 40:
            head[-8:] = bytes(8)
        if component.compression == "gzip":
            head[18:22] = bytes(4)
        headers.append(bytes(head))
        entry = k * stride.entry_bytes
        entries[entry + stride.stored_at : entry + stride.stored_at + 16] = bytes(16)
        if stored:
            entries[entry + 16 : entry + 20] = bytes(4)
            entries[entry + stride.raw_at : entry + stride.raw_at + 8] = bytes(8)
            headers[-1] = headers[-1][:-16] + bytes(16)
        payload_stop = start + int(chunks.stored_bytes[k])
        gaps.append(None if stop is None else data[payload_stop:stop])
    index = np.frombuffer(data[: 16 * n], "<i8").reshape(n, 2) - np.stack((starts, chunks.stored_bytes), axis=1)
    codec_json = directory.codec_json_entry_range(end, stride, n)
    text = b""
    if codec_json is not None:
        found = directory.parse_codec_json_entry(data[codec_json[0] :][: codec_json[1]], end, "x")
        start = found.header_offset + directory.data_start(data, found.header_offset, "x")
        text = data[start : start + found.stored_bytes]
        del entries[n * stride.entry_bytes + 46 + 10 + 20 :]  # its header's offset
    return headers, gaps, bytes(entries), index.tolist(), text, data[-98:-58], data[-22:]


def decoded(decoder: codecs.Decoder, payload: bytes, expected: int | None) -> bytes:
    """A range of the Zarr index: of gzip it is a whole stream."""
    if decoder.zip_method == codecs.METHOD_DEFLATE:
        return gzip.decompress(payload)
    if decoder.zip_method == codecs.METHOD_ZSTD:
        return zstandard.ZstdDecompressor().decompress(payload)
    return bytes(decoder.decode(payload, 0, zlib.crc32(payload), len(payload), expected, 1 << 20, "x"))


def test_the_zarr_index_and_the_zip_directory_name_the_same_bytes(corpus: Path) -> None:
    for archive in ARCHIVES:
        for component in packed_components(corpus, archive):
            data = component.shard.read_bytes()
            n = component.grid.n_chunks
            index = directory.parse_index(data[: directory.index_bytes(n)], n, len(data), "x")
            decoder = codecs.make_decoder(component.compression, component.itemsize, None, True, "x")
            expected = component.grid.chunk_bytes if component.itemsize else None
            flat = []
            for offset, length in zip(index.offset.tolist(), index.length.tolist(), strict=True):
                flat.append(decoded(decoder, data[offset : offset + length], expected))
            if component.itemsize:
                whole = component.grid.pieces(0, component.grid.size)
                joined = b"".join(flat[piece.chunk][piece.start : piece.stop] for piece in whole)
                assert joined == read_shard(data, component)
            if n > 100:
                break
