"""Places and data sets to mount.

One data set is made with what the real ones lack: all six compressions, odd grids and names, an empty axis, a script.
"""

from __future__ import annotations

import io
import json
import math
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from dafmount.shard.writer import write_shard
from mounts import LIMIT_S, is_mounted, write_daf

N_CELLS = 20_011
N_GENES = 37
SCRIPT = b'#!/bin/sh\necho "$(wc -l < axes/gene.txt) genes"\n'


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    """An empty directory to mount on; whatever the test leaves there is unmounted."""
    place = tmp_path / "mnt"
    place.mkdir()
    yield place
    while is_mounted(place):
        subprocess.run(["fusermount3", "-uz", place], check=True, timeout=LIMIT_S)


@pytest.fixture
def daf(tmp_path: Path) -> Path:
    """A small flat data set."""
    return write_daf(tmp_path / "small.daf")


class Packing(NamedTuple):
    chunk_shape: tuple[int, ...]
    compression: str


class Component(NamedTuple):
    """A payload: numbers, column-major, or strings."""

    eltype: str
    shape: tuple[int, ...]
    data: bytes | list[bytes]
    packing: Packing | None = None

    @property
    def plain(self) -> dict[str, Any]:
        return {"format": "dense", "eltype": self.eltype}


def numbers(values: np.ndarray[Any, Any], packing: Packing | None = None) -> Component:
    """Numbers whose dimensions are reversed, so that C order is column-major."""
    name = values.dtype.name
    eltype = name.capitalize() if name[0] != "u" else f"UI{name[2:]}"
    return Component(eltype, values.shape[::-1], values.tobytes(), packing)


def strings(values: Sequence[str], packing: Packing | None = None) -> Component:
    return Component("String", (len(values),), [value.encode() for value in values], packing)


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `flat.daf`, and `packed.daf` and `packed.daf.zip` (by `zip -r`) that a mount must show like it."""
    place = tmp_path_factory.mktemp("made")
    for path, data in plain_files().items():
        for root in ("flat.daf", "packed.daf"):
            write(place / root / path, data)
            if path.startswith("tools/"):
                (place / root / path).chmod(0o755)
    for path, component in dense_properties().items():
        suffix = ".txt" if component.eltype == "String" else ".data"
        packed = write_component(place, f"{path}{suffix}", f"{path}.zip", component)
        write_descriptors(place, path, component.plain, packed)
    for path, components in sparse_properties().items():
        flat_parts, packed_parts = {}, {}
        for key, component in components.items():
            suffix = ".nztxt" if component.eltype == "String" else f".{key}"
            packed = write_component(place, f"{path}{suffix}", f"{path}.{key}.zip", component)
            flat_parts[key], packed_parts[key] = [
                {**descriptor, "n_elements": component.shape[0]} for descriptor in (component.plain, packed)
            ]
        write_descriptors(place, path, {"format": "sparse", **flat_parts}, {"format": "sparse", **packed_parts})
    subprocess.run(["zip", "-qr", "packed.daf.zip", "packed.daf"], cwd=place, check=True, timeout=60)
    return place


def write_component(place: Path, flat_path: str, packed_path: str, component: Component) -> dict[str, Any]:
    """Write a payload flat, and packed where it has a packing; the packed descriptor."""
    is_text = isinstance(component.data, list)
    flat = b"".join(line + b"\n" for line in component.data) if isinstance(component.data, list) else component.data
    write(place / "flat.daf" / flat_path, flat)
    if component.packing is None:
        write(place / "packed.daf" / flat_path, flat)
        return component.plain
    chunk_shape, compression = component.packing
    itemsize = None if is_text else len(flat) // math.prod(component.shape)
    shard = io.BytesIO()
    write_shard(shard, component.data, component.shape, chunk_shape, itemsize, compression, 5)
    write(place / "packed.daf" / packed_path, shard.getvalue())
    return component.plain | {
        "packed_format": "indexed+zipped",
        "chunk_shape": list(chunk_shape),
        "compression": compression,
        "compression_level": 5,
        "index_location": "start",
    }


def write_descriptors(place: Path, path: str, flat: dict[str, Any], packed: dict[str, Any]) -> None:
    for root, descriptor in (("flat.daf", flat), ("packed.daf", packed)):
        write(place / root / f"{path}.json", json.dumps(descriptor, separators=(",", ":")).encode() + b"\n")


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def plain_files() -> dict[str, bytes]:
    """What is the same in both."""
    return {
        "daf.json": b'{"version":[1,1]}\n',
        "axes/cell.txt": "".join(f"cell {cell}\n" for cell in range(N_CELLS)).encode(),
        "axes/gene.txt": "".join(
            f"g\N{LATIN SMALL LETTER E WITH ACUTE}ne-{gene}\n" for gene in range(N_GENES)
        ).encode(),
        "axes/nothing.txt": b"",
        "scalars/a b.json": b'{"type":"Float64","value":0.5}\n',
        "tools/count.sh": SCRIPT,
        "notes.txt": b"Passed through.\n" * 10_000,
    }


def dense_properties() -> dict[str, Component]:
    random = np.random.default_rng(7)
    steps = np.arange(N_CELLS * N_GENES).reshape(N_GENES, N_CELLS)
    return {
        "matrices/cell/gene/fraction": numbers(
            random.random(steps.shape, "f4"), Packing((3_000, 4), "blosc_zstd_bitshuffle")
        ),
        "matrices/cell/gene/counts": numbers((steps % 251).astype("<i2"), Packing((4_096, 1), "zstd_bitshuffle")),
        "matrices/gene/cell/counts": numbers((steps.T % 251).astype("<i2"), Packing((N_GENES, 500), "gzip")),
        "matrices/gene/gene/near": numbers((steps[:, :N_GENES] // 7).astype("<u8"), Packing((5, 7), "gzip_shuffle")),
        "vectors/cell/f64": numbers(random.standard_normal(N_CELLS), Packing((1_000,), "blosc_lz4_bitshuffle")),
        "vectors/cell/label": strings(
            [f"type {cell % 17} \u03b1" * (cell % 3) for cell in range(N_CELLS)],
            Packing((512,), "zstd"),
        ),
        "vectors/cell/is_odd": Component(
            "Bool", (N_CELLS,), (np.arange(N_CELLS) % 2).astype("u1").tobytes(), Packing((8_192,), "gzip_shuffle")
        ),
        "vectors/cell/part.zip": numbers(np.arange(N_CELLS, dtype="<i8")),
        "vectors/gene/with a blank": numbers(np.arange(N_GENES, dtype="<i4"), Packing((N_GENES,), "zstd")),
        "vectors/nothing/none": numbers(np.zeros(0), None),
    }


def sparse_properties() -> dict[str, dict[str, Component]]:
    columns, rows = np.nonzero(np.random.default_rng(8).random((N_GENES, N_CELLS)) < 0.1)
    starts = np.concatenate(([1], 1 + np.bincount(columns, minlength=N_GENES).cumsum()))
    markers = np.arange(1, N_GENES + 1, 3, dtype="<u4")
    return {
        "matrices/cell/gene/UMIs": {
            "colptr": numbers(starts.astype("<u4")),
            "rowval": numbers((rows + 1).astype("<u4"), Packing((2_048,), "blosc_zstd_bitshuffle")),
            "nzval": numbers((rows % 9 + 1).astype("u1"), Packing((8_192,), "gzip")),
        },
        "vectors/gene/is_marker": {"nzind": numbers(markers, Packing((4,), "zstd"))},
        "vectors/gene/alias": {
            "nzind": numbers(markers),
            "nzval": strings([f"alias-{gene}" for gene in markers], Packing((5,), "blosc_lz4_bitshuffle")),
        },
    }
