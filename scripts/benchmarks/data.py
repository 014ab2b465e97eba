"""The data that is measured, made once and kept in a directory: flat files, shards, archives.

Counts are what single-cell data is like: most of a gene's cells have none. Fractions are what they become when divided
by each cell's total. Everything is the same each time.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dafmount.shard import codecs
from dafmount.shard.grid import make_grid
from dafmount.shard.writer import ShardWriter, split_flat

LEVEL = 5
ITEM_BYTES = 4
VERSION = b'{"version":[1,1]}\n'


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is made and how often it is measured."""

    name: str
    n_rows: int
    n_columns: dict[str, int]
    chunk_rows: int
    n_vectors: int
    n_small_reads: int
    rounds: int
    n_random: int
    n_faults: int
    """Few enough that the kernel's reading around one seldom answers another."""
    zarr_share: int
    """zarr-python reads one part of so many."""


FULL = Scale("full", 65536, {"counts": 2048, "fractions": 1024}, 2048, 50_000, 10_000, 5, 2000, 500, 16)
QUICK = Scale("quick", 8192, {"counts": 64, "fractions": 32}, 2048, 500, 100, 2, 100, 20, 2)
LARGE_FACTOR = 10
ELTYPES = {"counts": "Int32", "fractions": "Float32"}


class Chunk(NamedTuple):
    """One chunk as it lies in a shard."""

    payload: bytes
    crc: int
    raw_bytes: int


class Data:
    """What lies in the directory; each thing is made when it is first asked for."""

    def __init__(self, place: Path, scale: Scale) -> None:
        self.scale = scale
        self.place = place / scale.name
        self.place.mkdir(parents=True, exist_ok=True)

    def flat(self, matrix: str) -> Path:
        """The flat matrix on the disk's own file system, column-major."""
        path = self.place / f"{matrix}.data"
        if not path.exists():
            with _made(path) as new, new.open("wb") as stream:
                for columns in self._columns(matrix):
                    stream.write(columns.tobytes())
        return path

    def shard(self, matrix: str, compression: str) -> Path:
        """The matrix as a shard."""
        path = self.place / f"{matrix}.{compression}.shard"
        if not path.exists():
            self._write_shard(path, matrix, compression, self._encoded(matrix, compression), 1)
        return path

    def payloads(self, matrix: str, compression: str) -> list[bytes]:
        """The compressed chunks of a shard, in order, without their headers."""
        data = self.shard(matrix, compression).read_bytes()
        n_chunks = self._grid(self.scale.n_columns[matrix])
        skip, trailer = (10, 8) if compression == "gzip" else (0, 0)
        pairs = np.frombuffer(data, "<u8", 2 * n_chunks).reshape(-1, 2).tolist()
        return [data[start + skip : start + length - trailer] for start, length in pairs]

    def packed_archive(self, matrix: str, compression: str, copies: int = 1) -> Path:
        """A ZipDaf with the packed matrix, stored; `copies` of it under names that end in a number."""
        path = self.place / f"{matrix}.{compression}{'' if copies == 1 else f'.{copies}'}.daf.zip"
        if not path.exists():
            with self._archive(path, matrix, self.scale.n_columns[matrix]) as archive:
                for copy in range(1, copies + 1):
                    self._add_packed(archive, f"{matrix}{copy}", compression, self.shard(matrix, compression))
        return path

    def flat_archive(self, matrix: str) -> Path:
        """A ZipDaf with the flat matrix, stored."""
        path = self.place / f"{matrix}.flat.daf.zip"
        if not path.exists():
            with self._archive(path, matrix, self.scale.n_columns[matrix]) as archive:
                self._add_flat(archive, f"{matrix}1", self.flat(matrix), 1)
        return path

    def large_packed_archive(self, matrix: str, compression: str) -> Path:
        """As `packed_archive`, with ten times as many columns (the same ones again and again)."""
        path = self.place / f"{matrix}.{compression}.large.daf.zip"
        if not path.exists():
            shard = self.place / "large.shard"
            chunks = [Chunk(*chunk) for chunk in self._encoded(matrix, compression)]
            self._write_shard(
                shard, matrix, compression, (c for _ in range(LARGE_FACTOR) for c in chunks), LARGE_FACTOR
            )
            with self._archive(path, matrix, LARGE_FACTOR * self.scale.n_columns[matrix]) as archive:
                self._add_packed(archive, f"{matrix}1", compression, shard)
            shard.unlink()
        return path

    def large_flat_archive(self, matrix: str) -> Path:
        """As `flat_archive`, with ten times as many columns."""
        path = self.place / f"{matrix}.flat.large.daf.zip"
        if not path.exists():
            with self._archive(path, matrix, LARGE_FACTOR * self.scale.n_columns[matrix]) as archive:
                self._add_flat(archive, f"{matrix}1", self.flat(matrix), LARGE_FACTOR)
        return path

    def flat_directory(self, matrix: str) -> Path:
        """A FilesDaf directory with the flat matrix, as a web server would show it."""
        path = self.place / f"{matrix}.flat.daf"
        if not (path / "metadata.json").exists():
            descriptor = {"format": "dense", "eltype": ELTYPES[matrix]}
            lengths = {"cell": self.scale.n_rows, "gene": self.scale.n_columns[matrix]}
            file = path / matrix_path(matrix)
            file.parent.mkdir(parents=True, exist_ok=True)
            (path / "axes").mkdir(exist_ok=True)
            (path / "daf.json").write_bytes(VERSION)
            for axis, length in lengths.items():
                (path / "axes" / f"{axis}.txt").write_text(names(axis, length))
            file.with_suffix(".json").write_text(json_line(descriptor))
            file.unlink(missing_ok=True)
            file.hardlink_to(self.flat(matrix))
            known: dict[str, Any] = {
                f"axes/{axis}": {"format": "axis", "n_entries": length} for axis, length in lengths.items()
            }
            known[matrix_path(matrix).removesuffix(".data")] = descriptor
            (path / "metadata.json").write_text(json.dumps(known))
        return path

    def many_archive(self) -> Path:
        """A ZipDaf with very many small vectors, two names each, in one directory."""
        path = self.place / "many.daf.zip"
        if not path.exists():
            n_entries = 10
            descriptor = json_line({"format": "dense", "eltype": "Float32"})
            with _made(path) as new, zipfile.ZipFile(new, "w") as archive:
                archive.writestr("daf.json", VERSION)
                archive.writestr("axes/cell.txt", names("cell", n_entries))
                for k in range(self.scale.n_vectors):
                    values = np.arange(k, k + n_entries, dtype="<f4")
                    archive.writestr(f"vectors/cell/property-{k:06}.json", descriptor)
                    archive.writestr(f"vectors/cell/property-{k:06}.data", values.tobytes())
        return path

    def small_archive(self) -> Path:
        """A ZipDaf with one short packed vector."""
        path = self.place / "small.daf.zip"
        if not path.exists():
            with (
                _made(path) as new,
                zipfile.ZipFile(new, "w") as archive,
                (self.place / "small.shard").open("w+b") as out,
            ):
                archive.writestr("daf.json", VERSION)
                archive.writestr("axes/cell.txt", names("cell", 1000))
                writer = ShardWriter(out, (1000,), (512,), ITEM_BYTES, "blosc_zstd_bitshuffle", LEVEL)
                for raw in split_flat(np.arange(1000, dtype="<i4").tobytes(), writer.grid):
                    writer.append(raw)
                writer.finish()
                out.seek(0)
                archive.writestr("vectors/cell/age.json", json_line(_packed("Int32", (512,), "blosc_zstd_bitshuffle")))
                archive.writestr("vectors/cell/age.zip", out.read())
            (self.place / "small.shard").unlink()
        return path

    def zarr_array(self, matrix: str, compression: str) -> Path:
        """A Zarr v3 array whose only shard is the matrix's."""
        path = self.place / f"{matrix}.{compression}.zarr"
        if not path.exists():
            n_rows, n_columns = self.scale.n_rows, self.scale.n_columns[matrix]
            codec_list = json.loads(codecs.codec_json_text(compression, LEVEL, ITEM_BYTES))
            sharding = {
                "chunk_shape": [1, self.scale.chunk_rows],
                "codecs": codec_list,
                "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
                "index_location": "start",
            }
            array = {
                "zarr_format": 3,
                "node_type": "array",
                "shape": [n_columns, n_rows],
                "data_type": {"counts": "int32", "fractions": "float32"}[matrix],
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [n_columns, n_rows]}},
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
                "fill_value": 0,
                "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            }
            (path / "c" / "0").mkdir(parents=True)
            os.link(self.shard(matrix, compression), path / "c" / "0" / "0")
            (path / "zarr.json").write_text(json.dumps(array))
        return path

    def _grid(self, n_columns: int) -> int:
        return -(-self.scale.n_rows // self.scale.chunk_rows) * n_columns

    def _columns(self, matrix: str) -> Iterator[NDArray[Any]]:
        """Some columns at a time, each a row of the arrays."""
        n_rows, n_columns = self.scale.n_rows, self.scale.n_columns[matrix]
        say(f"making {matrix}, {n_rows * n_columns * ITEM_BYTES >> 20} MiB")
        random = np.random.default_rng(1)
        depth = random.lognormal(0, 0.4, n_rows)  # cells are sequenced more or less deeply
        for first in range(0, n_columns, 32):
            mean = random.exponential(0.4, min(32, n_columns - first))
            counts = random.poisson(np.outer(mean, depth))
            yield counts.astype("<i4") if matrix == "counts" else (counts / (1000 * depth)).astype("<f4")

    def _encoded(self, matrix: str, compression: str) -> Iterator[tuple[bytes, int, int]]:
        grid = make_grid(
            (self.scale.n_rows, self.scale.n_columns[matrix]), (self.scale.chunk_rows, 1), ITEM_BYTES, 1 << 30, matrix
        )
        flat = memoryview(np.memmap(self.flat(matrix), np.uint8, "r"))  # type: ignore[arg-type]
        say(f"packing {matrix} as {compression}")
        for raw in split_flat(flat, grid):
            yield codecs.encode_chunk(compression, LEVEL, ITEM_BYTES, raw)

    def _write_shard(
        self, path: Path, matrix: str, compression: str, chunks: Iterator[tuple[bytes, int, int]], factor: int
    ) -> None:
        shape = (self.scale.n_rows, factor * self.scale.n_columns[matrix])
        with _made(path) as new, new.open("w+b") as stream:
            writer = ShardWriter(stream, shape, (self.scale.chunk_rows, 1), ITEM_BYTES, compression, LEVEL)
            for chunk in chunks:
                writer.append_encoded(*chunk)
            writer.finish()

    @contextmanager
    def _archive(self, path: Path, matrix: str, n_columns: int) -> Iterator[zipfile.ZipFile]:
        with _made(path) as new, zipfile.ZipFile(new, "w") as archive:
            archive.writestr("daf.json", VERSION)
            archive.writestr("axes/cell.txt", names("cell", self.scale.n_rows))
            archive.writestr("axes/gene.txt", names("gene", n_columns))
            yield archive

    def _add_packed(self, archive: zipfile.ZipFile, name: str, compression: str, shard: Path) -> None:
        descriptor = _packed(ELTYPES[name.rstrip("0123456789")], (self.scale.chunk_rows, 1), compression)
        archive.writestr(f"matrices/cell/gene/{name}.json", json_line(descriptor))
        archive.write(shard, f"matrices/cell/gene/{name}.zip")

    def _add_flat(self, archive: zipfile.ZipFile, name: str, flat: Path, times: int) -> None:
        descriptor = {"format": "dense", "eltype": ELTYPES[name.rstrip("0123456789")]}
        archive.writestr(f"matrices/cell/gene/{name}.json", json_line(descriptor))
        with archive.open(f"matrices/cell/gene/{name}.data", "w", force_zip64=True) as target:
            for _ in range(times):
                with flat.open("rb") as stream:
                    shutil.copyfileobj(stream, target, 1 << 20)


def matrix_path(matrix: str, copy: int = 1) -> str:
    """Where a mount shows the flat matrix."""
    return f"matrices/cell/gene/{matrix}{copy}.data"


def names(axis: str, n_entries: int) -> str:
    """The file of an axis."""
    return "".join(f"{axis}-{k}\n" for k in range(n_entries))


def json_line(value: dict[str, Any]) -> str:
    """A descriptor."""
    return json.dumps(value, separators=(",", ":")) + "\n"


def say(message: str) -> None:
    """Progress, apart from the results."""
    print(f"bench: {message}", file=sys.stderr, flush=True)


def _packed(eltype: str, chunk_shape: Sequence[int], compression: str) -> dict[str, Any]:
    return {
        "format": "dense",
        "eltype": eltype,
        "packed_format": "indexed+zipped",
        "chunk_shape": list(chunk_shape),
        "compression": compression,
        "compression_level": LEVEL,
        "index_location": "start",
    }


@contextmanager
def _made(path: Path) -> Iterator[Path]:
    """A file that appears under its name only when it is whole and on the disk."""
    new = path.with_name(path.name + ".new")
    yield new
    with new.open("rb") as stream:
        os.fsync(stream.fileno())
    new.rename(path)
