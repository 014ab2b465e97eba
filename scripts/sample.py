"""Writes a small packed data set, the same each time: sample.py ARCHIVE.daf.zip

400 cells and 60 genes with a dense and a sparse matrix and the cells' types, each in chunks of its own.
"""

from __future__ import annotations

import io
import json
import random
import sys
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np

from dafmount.shard.writer import write_shard

N_CELLS = 400
N_GENES = 60
CELL_TYPES = ("Astrocyte", "Microglia", "Neuron", "Oligodendrocyte")
COMPRESSION = "blosc_zstd_bitshuffle"
LEVEL = 5


def main(archive: str) -> None:
    """Write the archive."""
    random_numbers = np.random.default_rng(1)
    counts = random_numbers.poisson(3, (N_GENES, N_CELLS)).astype("<u4")  # a gene's cells side by side: column-major
    spliced = counts * (random_numbers.random(counts.shape) < 0.1).astype("<u4")
    types = random.Random(1).choices(CELL_TYPES, k=N_CELLS)
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("daf.json", json_line({"version": [1, 1]}))
        stream.writestr("axes/cell.txt", "".join(f"cell-{cell:03}\n" for cell in range(1, N_CELLS + 1)))
        stream.writestr("axes/gene.txt", "".join(f"GENE{gene}\n" for gene in range(1, N_GENES + 1)))
        stream.writestr("scalars/organism.json", json_line({"type": "String", "value": "human"}))
        write_dense(stream, "vectors/cell/type", "String", [name.encode() for name in types], (N_CELLS,), (128,))
        write_dense(stream, "matrices/cell/gene/UMIs", "UInt32", counts.tobytes(), (N_CELLS, N_GENES), (256, 1))
        write_sparse(stream, "matrices/cell/gene/spliced", spliced)


def write_dense(
    stream: zipfile.ZipFile,
    path: str,
    eltype: str,
    flat: bytes | Sequence[bytes],
    shape: Sequence[int],
    chunk_shape: Sequence[int],
) -> None:
    descriptor = write_component(stream, f"{path}.zip", {"format": "dense", "eltype": eltype}, flat, shape, chunk_shape)
    stream.writestr(f"{path}.json", json_line(descriptor))


def write_sparse(stream: zipfile.ZipFile, path: str, values: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
    """A matrix with its columns in rows, as compressed sparse columns with 1-based indices."""
    columns, rows = values.nonzero()
    starts = np.concatenate(([0], np.bincount(columns, minlength=len(values)).cumsum()))
    descriptor: dict[str, Any] = {"format": "sparse"}
    for name, part in (("colptr", starts + 1), ("rowval", rows + 1), ("nzval", values[columns, rows])):
        plain = {"format": "dense", "eltype": "UInt32", "n_elements": len(part)}
        descriptor[name] = write_component(
            stream, f"{path}.{name}.zip", plain, part.astype("<u4").tobytes(), (len(part),), (512,)
        )
    stream.writestr(f"{path}.json", json_line(descriptor))


def write_component(
    stream: zipfile.ZipFile,
    path: str,
    plain: dict[str, Any],
    flat: bytes | Sequence[bytes],
    shape: Sequence[int],
    chunk_shape: Sequence[int],
) -> dict[str, Any]:
    """Write the shard of one component, which is of 4-byte numbers or of strings; its descriptor."""
    shard = io.BytesIO()
    write_shard(shard, flat, shape, chunk_shape, 4 if isinstance(flat, bytes) else None, COMPRESSION, LEVEL)
    stream.writestr(path, shard.getvalue())
    return plain | {
        "packed_format": "indexed+zipped",
        "chunk_shape": list(chunk_shape),
        "compression": COMPRESSION,
        "compression_level": LEVEL,
        "index_location": "start",
    }


def json_line(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
