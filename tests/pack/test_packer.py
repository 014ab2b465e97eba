"""What may be written where, what is selected, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zarr

from dafmount.errors import (
    CorruptDescriptor,
    CorruptShard,
    DafmountError,
    DestinationExists,
    NoRoom,
    NotFound,
    UnsupportedFormat,
    UsageError,
)
from dafmount.pack.settings import Selection
from dafmount.shard import codecs
from packing import assert_same_trees, files, remains, run_pack, run_unpack

DESTINATIONS = ("x.daf", "x.daf.zip", "x.dafs.zip#/group")


def make_daf(place: Path, n_cells: int = 3000, n_genes: int = 4) -> Path:
    """A flat data set with a bit of everything."""
    numbers = np.random.default_rng(3)
    for folder in ("axes", "scalars", "vectors/cell", "vectors/gene", "matrices/cell/gene", "matrices/cell/cell"):
        (place / folder).mkdir(parents=True)
    write = {
        "daf.json": b'{"version":[1,1]}\n',
        "axes/cell.txt": b"".join(b"cell-%d\n" % n for n in range(n_cells)),
        "axes/gene.txt": b"".join(b"gene-%d\n" % n for n in range(n_genes)),
        "scalars/organism.json": b'{"type":"String","value":"human"}\n',
        "vectors/cell/age.json": b'{"format":"dense","eltype":"Float64"}\n',
        "vectors/cell/age.data": numbers.random(n_cells).tobytes(),
        "vectors/cell/type.json": b'{"format":"dense","eltype":"String"}\n',
        "vectors/cell/type.txt": "".join(f"type é{n % 7}\n" * (n % 7 != 3) or "\n" for n in range(n_cells)).encode(),
        "matrices/cell/gene/UMIs.json": b'{"format":"dense","eltype":"UInt16"}\n',
        "matrices/cell/gene/UMIs.data": numbers.poisson(3, n_cells * n_genes).astype("<u2").tobytes(),
        "matrices/cell/gene/note.json": b'{"format":"dense","eltype":"String"}\n',
        "matrices/cell/gene/note.txt": b"".join(b"n%d\n" % (n % 50) for n in range(n_cells * n_genes)),
    }
    for name, data in write.items():
        (place / name).write_bytes(data)
    return place


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """In a directory of its own, so that what is left beside destinations shows."""
    return make_daf(tmp_path / "sources" / "source.daf")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    path = tmp_path / "place"
    path.mkdir()
    return path


READ_BY_ZARR = ("blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip", "gzip_shuffle")
ZARR_TYPES = {"Float64": "float64", "UInt16": "uint16", "String": "string"}


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("compression", READ_BY_ZARR)
def test_zarr_reads_what_is_packed(source: Path, place: Path, compression: str) -> None:
    run_pack(source, place / "x.daf", compression, jobs=2)
    shapes = {
        "vectors/cell/age": (3000,),
        "vectors/cell/type": (3000,),
        "matrices/cell/gene/UMIs": (3000, 4),
        "matrices/cell/gene/note": (3000, 4),
    }
    # 6000 bytes a column stay flat, although there are four.
    assert not (place / "x.daf/matrices/cell/gene/UMIs.zip").exists()
    run_pack(source, place / "y.daf", compression, target_kb=2, jobs=2)
    for path, shape in shapes.items():
        descriptor = json.loads((place / "y.daf" / f"{path}.json").read_text())
        eltype, chunk = descriptor["eltype"], descriptor["chunk_shape"]
        itemsize = {"Float64": 8, "UInt16": 2}.get(eltype)
        folder = place / "zarr" / path
        shard = folder.joinpath("c", *["0"] * len(shape))
        shard.parent.mkdir(parents=True)
        shutil.copy(place / "y.daf" / f"{path}.zip", shard)
        whole = [-(-n // size) * size for n, size in zip(shape, chunk, strict=True)]
        configuration = {
            "chunk_shape": chunk[::-1],
            "codecs": codecs.codec_list(compression, 5, itemsize),
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "start",
        }
        metadata = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": shape[::-1],
            "data_type": ZARR_TYPES[eltype],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": whole[::-1]}},
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": "" if itemsize is None else 0,
            "codecs": [{"name": "sharding_indexed", "configuration": configuration}],
            "attributes": {},
        }
        (folder / "zarr.json").write_text(json.dumps(metadata))
        values = np.asarray(zarr.open_array(folder, mode="r")[:])
        if itemsize is None:
            assert "".join(f"{value}\n" for value in values.ravel()).encode() == (source / f"{path}.txt").read_bytes()
        else:
            assert values.tobytes() == (source / f"{path}.data").read_bytes()


@pytest.mark.parametrize("jobs", [1, 2, 5])
def test_the_number_of_jobs_changes_no_byte(source: Path, place: Path, jobs: int) -> None:
    run_pack(source, place / "one.daf", target_kb=1)
    run_pack(source, place / "x.daf", target_kb=1, jobs=jobs)
    assert_same_trees(place / "one.daf", place / "x.daf")


def test_patterns_choose_properties_and_axes_always_come_along(source: Path, place: Path) -> None:
    run_pack(source, place / "x.daf", selection=Selection(("vectors/*", "scalars/*"), ("*/type",)))
    assert [name for name in files(place / "x.daf") if "zip" not in name] == [
        "axes/cell.txt",
        "axes/gene.txt",
        "daf.json",
        "scalars/organism.json",
        "vectors/cell/age.json",
    ]
    listed = json.loads((place / "x.daf/metadata.json").read_text())
    assert list(listed) == ["axes/cell", "axes/gene", "scalars/organism", "vectors/cell/age"]


def test_files_of_others_are_left_out_and_named(source: Path, place: Path) -> None:
    (source / "README").write_text("mine")
    (source / "vectors/cell/age.bak").write_text("x")
    (source / "metadata.zip").write_text("dafr's")
    listener = run_pack(source, place / "x.daf")
    assert listener.plan is not None
    assert sorted(listener.plan.left_out) == ["README", "vectors/cell/age.bak"]
    assert not (place / "x.daf/README").exists()


def test_directories_are_made_even_where_they_are_empty(source: Path, place: Path) -> None:
    run_unpack(source, place / "x.daf")
    for path in ("vectors/gene", "matrices/gene/cell", "matrices/gene/gene", "matrices/cell/cell"):
        assert list((place / "x.daf" / path).iterdir()) == []
    mask = os.umask(0)
    os.umask(mask)
    assert (place / "x.daf").stat().st_mode & 0o777 == 0o777 & ~mask
    run_pack(source, place / "x.daf.zip")
    assert (place / "x.daf.zip").stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize("name", DESTINATIONS[:2])
def test_what_exists_is_replaced_only_when_asked(source: Path, place: Path, name: str) -> None:
    run_pack(source, place / name)
    before = sorted(place.rglob("*"))
    with pytest.raises(DestinationExists, match="--overwrite"):
        run_unpack(source, place / name)
    assert sorted(place.rglob("*")) == before
    run_pack(source, place / name, "gzip", overwrite=True)
    assert remains(place) == []
    run_unpack(place / name, place / "back.daf")
    run_unpack(source, place / "expected.daf")
    assert_same_trees(place / "back.daf", place / "expected.daf")


def test_overwriting_replaces_data_sets_only(source: Path, place: Path) -> None:
    (place / "home").mkdir()
    (place / "home" / "thesis.txt").write_text("dear")
    (place / "file.daf").write_text("x")
    (place / "folder.daf.zip").mkdir()
    for name in ("home", "file.daf", "folder.daf.zip"):
        with pytest.raises(DestinationExists, match="not replaced"):
            run_pack(source, place / name, overwrite=True)
    assert (place / "home" / "thesis.txt").read_text() == "dear"
    (place / "empty").mkdir()
    run_pack(source, place / "empty", overwrite=True)


@pytest.mark.parametrize("name", DESTINATIONS[:2])
def test_a_data_set_may_be_packed_in_its_own_place(source: Path, place: Path, name: str) -> None:
    run_unpack(source, place / "expected.daf")
    run_unpack(source, place / name)
    run_pack(place / name, place / name, overwrite=True)
    run_unpack(place / name, place / "back.daf")
    assert_same_trees(place / "back.daf", place / "expected.daf")


def test_a_link_is_followed_and_kept(source: Path, place: Path) -> None:
    (place / "real").mkdir()
    (place / "x.daf").symlink_to("real/y.daf")
    run_pack(source, place / "x.daf")
    assert (place / "x.daf").is_symlink()
    assert (place / "real/y.daf/daf.json").exists()


def test_neither_may_lie_in_the_other(source: Path, place: Path) -> None:
    for destination in (source / "x.daf", source / "vectors" / "x.daf.zip", source.parent):
        with pytest.raises((UsageError, DestinationExists)):
            run_pack(source, destination, overwrite=True)
    (source.parent / "daf.json").write_text('{"version":[1,1]}\n')
    with pytest.raises(UsageError, match="lies within"):
        run_pack(source, source.parent, overwrite=True)
    assert (source / "axes/cell.txt").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.zip", r"\.daf\.zip"),
        ("x.dafs.zip", "which group"),
        ("x.dafs.zip#/", "no name for a group"),
        ("x.dafs.zip#/a//b", "no name for a group"),
        ("x.dafs.zip#/../b", "no name for a group"),
        ("x.dafs.zip#/a/vectors", "no name for a group"),
        ("x.daf.zip#/g", "only .dafs.zip"),
        ("", "no path"),
    ],
)
def test_names_that_make_no_sense_are_refused(source: Path, place: Path, name: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run_pack(source, f"{place}/{name}" if name else "")
    with pytest.raises(UsageError, match="cannot be written to"):
        run_pack(source, "https://example.org/x.daf")
    with pytest.raises(NotFound, match="no such directory to write to"):
        run_pack(source, place / "missing" / "x.daf")
    assert list(place.iterdir()) == []


def test_several_data_sets_are_not_one(source: Path, place: Path) -> None:
    run_pack(source, f"{place}/x.dafs.zip#/one")
    run_pack(source, f"{place}/x.dafs.zip#/two")
    with pytest.raises(UsageError, match="one, two"):
        run_pack(place / "x.dafs.zip", place / "y.daf")


def damaged(source: Path) -> Iterator[tuple[str, Callable[[], object], type[DafmountError]]]:
    def write(name: str, data: bytes) -> Callable[[], object]:
        return lambda: (source / name).write_bytes(data)

    text = (source / "vectors/cell/type.txt").read_bytes()
    yield "too short", write("vectors/cell/age.data", bytes(23992)), CorruptDescriptor
    yield "too long", write("vectors/cell/age.data", bytes(24008)), CorruptDescriptor
    yield "missing", (source / "vectors/cell/age.data").unlink, CorruptDescriptor
    yield "a line less", write("vectors/cell/type.txt", text.partition(b"\n")[2]), CorruptDescriptor
    yield "a line more", write("vectors/cell/type.txt", text + b"x\n"), CorruptDescriptor
    yield "no JSON", write("scalars/organism.json", b"{"), CorruptDescriptor
    yield "an unknown type", write("vectors/cell/age.json", b'{"format":"dense","eltype":"Int7"}'), CorruptDescriptor
    yield "no axis", (source / "axes/gene.txt").unlink, CorruptDescriptor
    yield "another version", write("daf.json", b'{"version":[2,0]}'), UnsupportedFormat


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("packed", [True, False])
def test_what_is_damaged_is_not_copied(source: Path, place: Path, name: str, at: int, packed: bool) -> None:
    _, damage, error = list(damaged(source))[at]
    damage()
    with pytest.raises(error):
        run_pack(source, place / name, jobs=2) if packed else run_unpack(source, place / name)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_damaged_chunk_ends_it_and_leaves_nothing(source: Path, place: Path, jobs: int) -> None:
    run_pack(source, place / "bad.daf", "zstd")
    shard = place / "bad.daf/vectors/cell/type.zip"
    data = bytearray(shard.read_bytes())
    first_chunk = int.from_bytes(data[:8], "little")  # the first number of the Zarr index
    data[first_chunk + 20] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptShard, match=r"type\.zip: chunk"):
        run_pack(place / "bad.daf", place / "x.daf", jobs=jobs)
    assert [path.name for path in place.iterdir()] == ["bad.daf"]


def test_a_text_without_a_last_newline_is_whole(source: Path, place: Path) -> None:
    path = source / "vectors/cell/type.txt"
    path.write_bytes(path.read_bytes()[:-1] + b"last")
    run_pack(source, place / "x.daf", target_kb=1)
    run_unpack(place / "x.daf", place / "back.daf")
    assert (place / "back.daf/vectors/cell/type.txt").read_bytes() == path.read_bytes() + b"\n"


def test_long_lines_are_packed(place: Path, tmp_path: Path) -> None:
    source = make_daf(tmp_path / "s.daf", 600, 1)
    text = b"".join(b"x" * (n % 5 * 5000) + b"\n" for n in range(600))
    (source / "vectors/cell/type.txt").write_bytes(text)
    run_pack(source, place / "x.daf", jobs=2)
    run_unpack(place / "x.daf", place / "back.daf")
    assert (place / "back.daf/vectors/cell/type.txt").read_bytes() == text


def test_gzip_s_limit_on_chunks_is_told_before_anything_is_written(place: Path, tmp_path: Path) -> None:
    source = make_daf(tmp_path / "s.daf", 1 << 24, 1)
    for name in ("age", "type"):
        (source / f"vectors/cell/{name}.json").unlink()
    for name in ("UMIs", "note"):
        (source / f"matrices/cell/gene/{name}.json").unlink()
    (source / "axes/gene.txt").write_text("".join(f"g{n}\n" for n in range(1100)))
    (source / "matrices/cell/gene/m.json").write_text('{"format":"dense","eltype":"UInt8"}\n')
    with (source / "matrices/cell/gene/m.data").open("wb") as stream:
        stream.truncate((1 << 24) * 1100)
    with pytest.raises(UnsupportedFormat, match="18022400 chunks, gzip can name 16777216; choose larger chunks"):
        run_pack(source, place / "x.daf", "gzip", target_kb=1)
    assert list(place.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two mebibytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=2M", "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mounting, check=False, capture_output=True).returncode:
        pytest.skip("a small file system can be mounted by root only")
    yield path
    subprocess.run(["umount", path], check=True)


def random_daf(path: Path, n_bytes: int) -> Path:
    """A data set that does not compress."""
    make_daf(path, 10, 1)
    size = n_bytes // 8
    (path / "axes/gene.txt").write_text("".join(f"{n}\n" for n in range(size)))
    (path / "vectors/gene/noise.json").write_text('{"format":"dense","eltype":"UInt64"}\n')
    (path / "vectors/gene/noise.data").write_bytes(np.random.default_rng(1).bytes(size * 8))
    for name in ("UMIs", "note"):
        (path / f"matrices/cell/gene/{name}.json").unlink()
    return path


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_full_disk_leaves_things_as_they_were(
    source: Path, small_disk: Path, tmp_path: Path, name: str, packed: bool, overwrite: bool
) -> None:
    run_pack(source, small_disk / "x.dafs.zip#/old" if "#" in name else small_disk / "old.daf.zip")
    if overwrite and "#" not in name:
        run_pack(source, small_disk / name)
    before = {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()}
    large = random_daf(tmp_path / "large.daf", 3 << 20)
    target_kb = 8 if packed else 1 << 16
    with pytest.raises(NoRoom, match="nothing was written"):
        run_pack(
            large, f"{small_disk}/{name}", target_kb=target_kb, jobs=2, overwrite=overwrite and "#" not in name
        )
    assert {path: path.read_bytes() for path in small_disk.rglob("*") if path.is_file()} == before
    assert remains(small_disk) == []


def test_a_disk_that_fills_up_while_the_archive_grows_leaves_it_as_it_was(
    source: Path, small_disk: Path, tmp_path: Path
) -> None:
    run_pack(source, f"{small_disk}/x.dafs.zip#/old")
    before = (small_disk / "x.dafs.zip").read_bytes()
    large = random_daf(tmp_path / "large.daf", 900 << 10)  # fits beside the archive, but not a second time
    with pytest.raises(NoRoom):
        run_pack(large, f"{small_disk}/x.dafs.zip#/new")
    assert (small_disk / "x.dafs.zip").read_bytes() == before
    assert [path.name for path in small_disk.iterdir()] == ["x.dafs.zip"]
