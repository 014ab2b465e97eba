"""What extended attributes say of the files of properties, against data sets written by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from dafmount.errors import CorruptDescriptor
from dafmount.source.local import LocalDirectory
from dafmount.tree.build import Style, build_tree
from dafmount.tree.cache import ChunkCache
from dafmount.tree.nodes import Described, Directory, File, Node

N_CELLS, N_GENES = 5, 3


def write(place: Path, path: str, data: bytes | object) -> None:
    target = place / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())


@pytest.fixture
def daf(tmp_path: Path) -> Path:
    """Flat properties of every form, one legacy among them, and a file that belongs to none."""
    place = tmp_path / "small.daf"
    write(place, "daf.json", {"version": [1, 1]})
    write(place, "axes/cell.txt", b"".join(b"cell%d\n" % cell for cell in range(N_CELLS)))
    write(place, "axes/gene.txt", b"".join(b"gene%d\n" % gene for gene in range(N_GENES)))
    write(place, "vectors/cell/age.json", {"format": "dense", "eltype": "UInt8"})
    write(place, "vectors/cell/age.data", bytes(N_CELLS))
    write(place, "vectors/cell/name.json", {"format": "dense", "eltype": "String"})
    write(place, "vectors/cell/name.txt", b"a\nb\nc\nd\ne\n")
    write(place, "matrices/cell/gene/UMIs.json", {"format": "dense", "eltype": "Float32"})
    write(place, "matrices/cell/gene/UMIs.data", np.zeros(N_CELLS * N_GENES, "<f4").tobytes())
    indices = {"format": "dense", "eltype": "UInt32", "n_elements": 2}
    names = indices | {"eltype": "String"}
    write(place, "vectors/gene/alias.json", {"format": "sparse", "nzind": indices, "nzval": names})
    write(place, "vectors/gene/alias.nzind", np.array([1, 3], "<u4").tobytes())
    write(place, "vectors/gene/alias.nztxt", b"x\ny\n")
    write(place, "vectors/gene/marker.json", {"format": "sparse", "nzind": indices})
    write(place, "vectors/gene/marker.nzind", np.array([1, 3], "<u4").tobytes())
    write(place, "vectors/gene/old.json", {"format": "sparse", "eltype": "String", "indtype": "Int64"})
    write(place, "vectors/gene/old.nzind", np.array([2, 3, 1], "<i8").tobytes())
    write(place, "vectors/gene/old.nztxt", b"x\ny\nz\n")
    write(place, "vectors/gene/bad.json", b"{")
    write(place, "vectors/gene/bad.data", b"123")
    write(place, "vectors/gene/stray.data", b"no property")
    write(place, "vectors/gene/notes.txt.bak", b"no property")
    return place


def node(daf: Path, path: str) -> File:
    found: Node = build_tree(LocalDirectory(daf), "", Style(ChunkCache(1 << 20)))
    for name in path.split("/"):
        assert isinstance(found, Directory)
        found = found.children()[name]
    assert isinstance(found, File)
    return found


def attributes(daf: Path, path: str) -> dict[str, str]:
    """The attributes of a file, without the common prefix."""
    file = node(daf, path)
    assert isinstance(file.opener, Described)
    values: Mapping[str, bytes] = file.opener.attributes(file)
    assert sorted(values) == sorted(file.opener.attribute_names(file))
    return {name.removeprefix("user.daf."): value.decode() for name, value in values.items()}


def payload(eltype: str, shape: str, layout: str, stored: int, dtype: str | None = None) -> dict[str, str]:
    found = {"eltype": eltype, "shape": shape, "layout": layout, "compression": "none", "stored_bytes": str(stored)}
    return found if dtype is None else found | {"dtype": dtype, "order": "F"}


FLAT = {
    "vectors/cell/age.data": payload("UInt8", "[5]", "dense", 5, "|u1"),
    "vectors/cell/name.txt": payload("String", "[5]", "dense", 10),
    "matrices/cell/gene/UMIs.data": payload("Float32", "[5,3]", "dense", 60, "<f4"),
    "vectors/gene/alias.nzind": payload("UInt32", "[2]", "sparse", 8, "<u4"),
    "vectors/gene/alias.nztxt": payload("String", "[2]", "sparse", 4),
    "vectors/gene/old.nzind": payload("Int64", "[3]", "sparse", 24, "<i8"),
    "vectors/gene/old.nztxt": payload("String", "[3]", "sparse", 6),
    "vectors/cell/age.json": {"eltype": "UInt8", "shape": "[5]", "layout": "dense"},
    "matrices/cell/gene/UMIs.json": {"eltype": "Float32", "shape": "[5,3]", "layout": "dense"},
    "vectors/gene/alias.json": {"eltype": "String", "shape": "[3]", "layout": "sparse"},
    "vectors/gene/marker.json": {"eltype": "Bool", "shape": "[3]", "layout": "sparse"},
}


@pytest.mark.parametrize("path", FLAT)
def test_a_flat_file_is_described_by_its_descriptor(path: str, daf: Path) -> None:
    assert attributes(daf, path) == FLAT[path]


@pytest.mark.parametrize("path", ["vectors/gene/stray.data", "vectors/gene/notes.txt.bak", "axes/cell.txt", "daf.json"])
def test_files_that_belong_to_no_property_are_not_described(path: str, daf: Path) -> None:
    assert not isinstance(node(daf, path).opener, Described)


def test_a_damaged_descriptor_is_told_when_a_value_is_asked_for_and_not_before(daf: Path) -> None:
    for path in ("vectors/gene/bad.data", "vectors/gene/bad.json"):
        file = node(daf, path)
        assert isinstance(file.opener, Described)
        assert "user.daf.shape" in file.opener.attribute_names(file)
        with pytest.raises(CorruptDescriptor, match=r"bad\.json"):
            file.opener.attributes(file)


def test_listing_names_reads_no_axis(daf: Path) -> None:
    file = node(daf, "matrices/cell/gene/UMIs.data")
    assert isinstance(file.opener, Described)
    (daf / "axes" / "cell.txt").unlink()
    assert len(file.opener.attribute_names(file)) == 7
    with pytest.raises(CorruptDescriptor, match=r"axes/cell\.txt"):
        file.opener.attributes(file)


@pytest.mark.parametrize("codec", ["bl", "bz", "gz", "zs"])
def test_packed_files_tell_how_the_archive_keeps_them(codec: str, corpus: Path) -> None:
    packed = corpus / "julia" / "fpk" / f"{codec}.files"
    for shown, shard, key in (
        ("vectors/cell/label.txt", "vectors/cell/label.zip", None),
        ("vectors/cell/score.data", "vectors/cell/score.zip", None),
        ("matrices/cell/gene/dense.data", "matrices/cell/gene/dense.zip", None),
        ("matrices/cell/gene/sparse.rowval", "matrices/cell/gene/sparse.rowval.zip", "rowval"),
    ):
        descriptor = json.loads((packed / shown).with_suffix(".json").read_text())
        component = descriptor if key is None else descriptor[key]
        found = attributes(packed, shown)
        assert found["eltype"] == component["eltype"]
        assert found["compression"] == component["compression"]
        assert json.loads(found["chunk_shape"]) == component["chunk_shape"]
        assert int(found["stored_bytes"]) == (packed / shard).stat().st_size
        assert found["layout"] == descriptor["format"]
