"""Small data sets in every codec and form, and what a reader sees of them. Imported by tests; owns no fixtures."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dafmount.check.findings import Finding
from dafmount.check.run import check
from dafmount.daf.eltype import NUMERIC
from dafmount.errors import DafmountError
from dafmount.shard.codecs import CODECS
from dafmount.shard.writer import write_shard
from dafmount.source.resolve import resolve
from dafmount.source.spool import Spool
from dafmount.tree.build import Style, build_tree
from dafmount.tree.cache import ChunkCache
from dafmount.tree.nodes import Directory, File

N_CELLS = 41
N_GENES = 7
LEVEL = 3

Files = dict[str, bytes]


def compact(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def packed_keys(chunk_shape: Sequence[int], compression: str) -> dict[str, Any]:
    return {
        "packed_format": "indexed+zipped",
        "chunk_shape": list(chunk_shape),
        "compression": compression,
        "compression_level": LEVEL,
        "index_location": "start",
    }


def shard(
    flat: bytes | list[bytes], shape: Sequence[int], chunk: Sequence[int], eltype: str, compression: str
) -> bytes:
    out = io.BytesIO()
    width = None if eltype == "String" else int(NUMERIC[eltype][2:])
    write_shard(out, flat, shape, chunk, width, compression, LEVEL)
    return out.getvalue()


def sample(compression: str) -> Files:
    """A data set with packed properties of every kind; path -> bytes. It has a metadata.json."""
    random = np.random.default_rng(7)
    files: Files = {
        "daf.json": compact({"version": [1, 1]}),
        "axes/cell.txt": b"".join(b"cell-%d\n" % n for n in range(N_CELLS)),
        "axes/gene.txt": b"".join(b"gene-%d\n" % n for n in range(N_GENES)),
        "scalars/title.json": compact({"type": "String", "value": "tiny é"}),
        "scalars/n.json": compact({"type": "Int8", "value": -3}),
    }
    counts = random.poisson(2, (N_GENES, N_CELLS)).astype("<u4")
    dense: list[tuple[str, str, Any, tuple[int, ...], tuple[int, ...]]] = [
        ("vectors/cell/age", "Int32", random.integers(0, 9, N_CELLS).astype("<i4"), (N_CELLS,), (16,)),
        ("vectors/cell/is_ok", "Bool", random.random(N_CELLS) < 0.5, (N_CELLS,), (16,)),
        ("matrices/cell/gene/UMIs", "UInt32", counts, (N_CELLS, N_GENES), (32, 1)),
        ("matrices/cell/gene/blocks", "UInt32", counts, (N_CELLS, N_GENES), (16, 3)),
    ]
    for path, eltype, values, shape, chunk in dense:
        files[f"{path}.json"] = compact({"format": "dense", "eltype": eltype, **packed_keys(chunk, compression)})
        files[f"{path}.zip"] = shard(values.tobytes(), shape, chunk, eltype, compression)
    labels = [b"type-%d \xc3\xa9" % (n % 5) for n in range(N_CELLS)]
    keys = packed_keys((16,), compression)
    files["vectors/cell/label.json"] = compact({"format": "dense", "eltype": "String", **keys})
    files["vectors/cell/label.zip"] = shard(labels, (N_CELLS,), (16,), "String", compression)
    names = [b"%d" % n for n in range(N_CELLS * N_GENES)]
    keys = packed_keys((16, 2), compression)
    files["matrices/cell/gene/names.json"] = compact({"format": "dense", "eltype": "String", **keys})
    files["matrices/cell/gene/names.zip"] = shard(names, (N_CELLS, N_GENES), (16, 2), "String", compression)
    files["vectors/gene/mean.json"] = compact({"format": "dense", "eltype": "Float64"})
    files["vectors/gene/mean.data"] = counts.mean(axis=1).astype("<f8").tobytes()
    add_sparse(files, counts * (counts > 3), compression)
    nzind = np.flatnonzero(random.random(N_CELLS) < 0.3).astype("<u4") + 1
    files["vectors/cell/doublet.json"] = compact(
        {"format": "sparse", "nzind": {"format": "dense", "eltype": "UInt32", "n_elements": len(nzind)}}
    )
    files["vectors/cell/doublet.nzind"] = nzind.astype("<u4").tobytes()
    files["metadata.json"] = metadata(files)
    return files


def add_sparse(files: Files, values: np.ndarray[Any, Any], compression: str) -> None:
    columns, rows = values.nonzero()
    starts = np.concatenate(([0], np.bincount(columns, minlength=len(values)).cumsum()))
    descriptor: dict[str, Any] = {"format": "sparse"}
    for name, part in (("colptr", starts + 1), ("rowval", rows + 1), ("nzval", values[columns, rows])):
        descriptor[name] = {
            "format": "dense", "eltype": "UInt32", "n_elements": len(part), **packed_keys((16,), compression)
        }  # fmt: skip
        flat = part.astype("<u4").tobytes()
        files[f"matrices/cell/gene/spliced.{name}.zip"] = shard(flat, (len(part),), (16,), "UInt32", compression)
    files["matrices/cell/gene/spliced.json"] = compact(descriptor)


def metadata(files: Mapping[str, bytes]) -> bytes:
    listed: dict[str, Any] = {}
    for path, data in files.items():
        section = path.partition("/")[0]
        if section == "axes":
            listed[path.removesuffix(".txt")] = {"format": "axis", "n_entries": data.count(b"\n")}
        elif path.endswith(".json") and section in ("scalars", "vectors", "matrices"):
            listed[path.removesuffix(".json")] = json.loads(data)
    return compact(listed).rstrip(b"\n")


def write_directory(files: Mapping[str, bytes], place: Path) -> Path:
    for path, data in files.items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(data)
    return place


def zip_bytes(files: Mapping[str, bytes], method: int = zipfile.ZIP_STORED, *, with_directories: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as stream:
        if with_directories:
            for directory in sorted({path.rpartition("/")[0] for path in files} - {""}):
                stream.writestr(f"{directory}/", b"")
        for path, data in files.items():
            stream.writestr(path, data)
    return out.getvalue()


COMPRESSIONS = tuple(CODECS)


def seen(source: str) -> dict[str, bytes] | None:
    """What our reader shows of a source: every file's bytes, every directory as ''; None where anything fails."""
    try:
        resolved = resolve(source, spool=Spool(None, 1 << 28))
        try:
            root = build_tree(resolved.archive, resolved.root, Style(ChunkCache(1 << 22)))
            shown: dict[str, bytes] = {}
            _walk(root, shown)
            return shown
        finally:
            resolved.archive.close()
    except (DafmountError, OSError):
        return None


def _walk(directory: Directory, shown: dict[str, bytes]) -> None:
    for node in directory.children().values():
        if isinstance(node, File):
            content = node.opener.open(node)
            try:
                shown[node.path] = content.read(0, content.size) if content.size else b""
            finally:
                content.close()
        else:
            shown[node.path] = b""
            _walk(node, shown)


def flipped(data: bytes, at: int, mask: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= mask
    return bytes(changed)


def findings(source: Path | str, *, quick: bool = False, jobs: int = 1) -> list[Finding]:
    """All that is found; raises what keeps the source from being read."""
    found: list[Finding] = []
    summary = check(str(source), found.append, quick=quick, jobs=jobs)
    assert summary.errors == sum(finding.severity == "error" for finding in found)
    assert summary.warnings == len(found) - summary.errors
    return found


def is_found_out(source: Path | str) -> bool:
    """Whether a check ends with anything but 'clean'."""
    try:
        return any(finding.severity == "error" for finding in findings(source))
    except (DafmountError, OSError):
        return True
