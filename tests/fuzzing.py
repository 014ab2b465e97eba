"""Damaged data sets, read as a mount reads them. Shared by the suite and by scripts/fuzz.

The property: whatever the bytes are, reading everything raises only this package's errors and those of the system, and
each file that is served has the bytes of the intact data set. Truth comes from the flat bytes the seeds are made of.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dafmount.daf.http_layout import ListedDaf
from dafmount.errors import DafmountError
from dafmount.shard import codecs
from dafmount.shard.codecs import CODECS
from dafmount.shard.writer import write_shard
from dafmount.source.http_settings import HttpSettings
from dafmount.source.resolve import resolve
from dafmount.source.spool import Spool
from dafmount.tree.build import Style, build_tree
from dafmount.tree.cache import ChunkCache
from dafmount.tree.nodes import Directory, File, NodeTable

N_CELLS = 600
N_GENES = 7
PIECE_BYTES = 128 * 1024
MAX_READ_BYTES = 4 << 20
"""Of a file that claims more, only the beginning and the end are read."""

MAX_CHUNK_BYTES = 1 << 20

MADE_UP = ("metadata.json",)
"""Files that leave out what cannot be read, and so may have less than the truth."""

SPLICES = (
    b"\0", b"\1", b"\xff", b"\x7f", b"\0" * 4, b"\xff" * 4, b"\xff" * 8, b"\0" * 30, b"PK\1\2", b"PK\3\4", b"PK\5\6",
    b"PK\6\6", b"PK\6\7", b"/../", b"\x02\x01\x13\x08", b"(\xb5/\xfd", b"\x1f\x8b\x08",
)  # fmt: skip


class Seed(NamedTuple):
    """An intact data set: the files of its tree as stored, and what must be shown of it."""

    name: str
    stored: Mapping[str, bytes]
    truth: Mapping[str, bytes]


def make_seed(compression: str, n_cells: int = N_CELLS, *, start: int = 0) -> Seed:
    """A data set with dense, sparse, Bool and String properties packed with one compression; `start` makes another."""
    choose = np.random.default_rng(5 + start)
    stored = {
        "daf.json": b'{"version":[1,1]}\n',
        "axes/cell.txt": b"".join(b"cell-%d\n" % cell for cell in range(n_cells)),
        "axes/gene.txt": b"".join(b"gene-%d\n" % gene for gene in range(N_GENES)),
        "scalars/organism.json": b'{"type":"String","value":"human"}\n',
        "notes.txt": b"as it is\n" * 50,
    }
    truth = dict(stored)

    def add(path: str, eltype: str, flat: bytes | list[bytes], shape: Sequence[int], chunks: Sequence[int]) -> None:
        descriptor = {"format": "dense", "eltype": eltype}
        stored[f"{path}.zip"], packing = _shard(flat, shape, chunks, compression)
        stored[f"{path}.json"] = _json(descriptor | packing)
        truth[f"{path}.json"] = _json(descriptor)
        if isinstance(flat, bytes):
            truth[f"{path}.data"] = flat
        else:
            truth[f"{path}.txt"] = b"".join(line + b"\n" for line in flat)

    add("vectors/cell/age", "Int32", np.arange(start, start + n_cells, dtype="<i4").tobytes(), [n_cells], [128])
    add("vectors/cell/ok", "Bool", (np.arange(n_cells) % 3 == 0).tobytes(), [n_cells], [200])
    add("vectors/cell/type", "String", [b"type %d" % ((cell + start) % 9) for cell in range(n_cells)], [n_cells], [100])
    fractions = choose.random((N_GENES, n_cells), "f4").tobytes()
    add("matrices/cell/gene/fraction", "Float32", fractions, [n_cells, N_GENES], [250, 2])
    counts = choose.poisson(3, (N_GENES, n_cells)).astype("<i4").tobytes()
    add("matrices/cell/gene/count", "Int32", counts, [n_cells, N_GENES], [300, 1])
    indices = np.arange(1, n_cells, 7, dtype="<u4")
    part = {"format": "dense", "eltype": "UInt32", "n_elements": len(indices)}
    stored["vectors/cell/marked.nzind.zip"], packing = _shard(indices.tobytes(), [len(indices)], [32], compression)
    stored["vectors/cell/marked.json"] = _json({"format": "sparse", "nzind": part | packing})
    truth["vectors/cell/marked.json"] = _json({"format": "sparse", "nzind": part})
    truth["vectors/cell/marked.nzind"] = indices.tobytes()
    return Seed(compression, stored, truth)


def _shard(
    flat: bytes | list[bytes], shape: Sequence[int], chunks: Sequence[int], compression: str
) -> tuple[bytes, dict[str, Any]]:
    n = int(np.prod(shape))
    out = io.BytesIO()
    write_shard(out, flat, shape, chunks, len(flat) // n if isinstance(flat, bytes) else None, compression, 5)
    return out.getvalue(), {
        "packed_format": "indexed+zipped",
        "chunk_shape": list(chunks),
        "compression": compression,
        "compression_level": 5,
        "index_location": "start",
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def seeds() -> list[Seed]:
    """One for each compression."""
    return [make_seed(compression) for compression in CODECS]


def as_archive(stored: Mapping[str, bytes], method: int) -> bytes:
    """A ZIP archive of stored or compressed entries."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in stored.items():
            archive.writestr(name, data)
    return out.getvalue()


def damaged(data: bytes, choose: random.Random) -> bytes:
    """The bytes with a few altered, cut out, doubled or cut off; the ends, where directories lie, more often."""
    out = bytearray(data)
    for _ in range(choose.choice((1, 1, 1, 2, 4))):
        if not out:
            break
        at = _place(len(out), choose)
        match choose.randrange(8):
            case 0:
                del out[at : at + choose.choice((1, 4, 16, 1000))]
            case 1:
                out[at:at] = out[max(0, at - 64) : at]
            case 2 if choose.random() < 0.3:
                del out[at:]
            case 3 | 4:
                out[at] ^= 1 << choose.randrange(8)
            case _:
                splice = choose.choice(SPLICES)
                out[at : at + len(splice)] = splice
    return bytes(out)


def _place(length: int, choose: random.Random) -> int:
    where = choose.random()
    if where < 0.3:
        return max(0, length - 1 - choose.randrange(min(length, 200)))
    if where < 0.5:
        return choose.randrange(min(length, 200))
    return choose.randrange(length)


def check_chunk(compression: str, itemsize: int | None, choose: random.Random) -> None:
    """Decodes a damaged chunk in every way: its bytes or our error, and not a byte outside of the room given for it."""
    raw = choose.randbytes(choose.randrange(64)) * choose.randrange(1, 200)
    payload, crc, stated = codecs.encode_chunk(compression, choose.randrange(1, 10), itemsize, raw)
    bad = damaged(payload, choose)
    decoder = codecs.make_decoder(compression, itemsize, None, True, "x")
    if decoder.zip_method == codecs.METHOD_STORED:
        stated = len(bad)
    believed = decoder.zip_method == codecs.METHOD_STORED and choose.random() < 0.5
    if believed:  # as by somebody who means it
        crc = zlib.crc32(bad)
    expected = None if itemsize is None else len(raw)
    found = []
    with contextlib.suppress(DafmountError):
        found.append(decoder.decode(bad, decoder.zip_method, crc, stated, expected, MAX_CHUNK_BYTES, "x"))
    if expected is not None:
        out = bytearray(b"\xaa" * (expected + 200))
        with contextlib.suppress(DafmountError):
            decoder.decode_into(bad, out, 100, decoder.zip_method, crc, stated, expected, "x")
            found.append(out[100 : 100 + expected])
        assert out[:100] == out[100 + expected :] == b"\xaa" * 100, f"{compression}: written outside of the chunk"
    for data in found:
        assert believed or data == raw, f"{compression}: {len(data)} wrong bytes"
        assert len(data) <= MAX_CHUNK_BYTES if expected is None else len(data) == expected


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**32, 2**53, 2**60, 2**63, 2**64, 1e300, "", "x", "UInt8", "String", "Float64",
    "zipped", "gzip", "zstd", "sparse", [], [0], [1], [2**40], [1, 1], [2**20, 2**20], [2**60, 2**60], {}, {"nzind": 3},
)  # fmt: skip


def odd_descriptor(raw: bytes, choose: random.Random) -> bytes:
    """A descriptor with a value replaced by one that makes no sense there, or not even JSON."""
    if choose.random() < 0.2:
        return damaged(raw, choose)
    value = json.loads(raw)
    inner = value
    if choose.random() < 0.5:
        inner = choose.choice([value, *(part for part in value.values() if isinstance(part, dict))])
    inner[choose.choice(list(inner))] = choose.choice(ODD_VALUES)
    return json.dumps(value).encode()


def served(
    source: Path | str, spool: Spool, verify: str = "auto", layout: str = "1.1", http: HttpSettings | None = None
) -> Iterator[tuple[str, bytes | None]]:
    """Path and bytes of every file that a mount would show; None for one that cannot be read, or only in part.

    Any error but this package's, or one of the system, comes out.
    """
    try:
        resolved = resolve(str(source), spool=spool, verify=verify, http=http, list_directory=ListedDaf)
    except (DafmountError, OSError) as error:
        _check_message(error)
        return
    try:
        root = build_tree(resolved.archive, resolved.root, Style(ChunkCache(1 << 20), layout, verify=verify != "off"))
        table = NodeTable(root)
        for file in _files(root):
            yield file.path, _read(file, table)
    finally:
        resolved.archive.close()


def _files(directory: Directory) -> Iterator[File]:
    try:
        children = directory.children()
    except (DafmountError, OSError) as error:
        _check_message(error)
        return
    for node in list(children.values()):
        if isinstance(node, File):
            yield node
        else:
            yield from _files(node)


def _read(file: File, table: NodeTable) -> bytes | None:
    table.number(file)
    try:
        content = file.opener.open(file)
        size = content.size
        assert file.size in (None, size), f"{file.path}: shown with {file.size} bytes, has {size}"
        parts = []
        for offset in range(0, min(size, MAX_READ_BYTES), PIECE_BYTES):
            length = min(PIECE_BYTES, size - offset)
            parts.append(bytes(content.read(offset, length)))
            assert len(parts[-1]) == length, f"{file.path}: {len(parts[-1])} bytes, expected {length}"
        if size > MAX_READ_BYTES:
            content.read(size - 1000, 1000)
            return None
        content.close()
    except (DafmountError, OSError) as error:
        _check_message(error)
        return None
    return b"".join(parts)


def _check_message(error: Exception) -> None:
    assert "\n" not in str(error), error


def check_truth(seed: Seed, path: str, found: bytes) -> None:
    """Fails for bytes that are not those of the intact data set under any name: names are not covered by checksums."""
    if path.rpartition("/")[2] in MADE_UP:
        json.loads(found)
        return
    expected = seed.truth.get(path)
    assert found == expected or found in seed.truth.values() or found in seed.stored.values(), (
        f"{seed.name}: {path} is served with {len(found)} wrong bytes, such as {found[:80]!r}"
    )
