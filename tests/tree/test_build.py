"""What a mounted data set looks like, without mounting it."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dafmount.errors import CorruptDescriptor, DafmountError, UnsupportedFormat
from dafmount.shard.writer import write_shard
from dafmount.source.resolve import resolve
from dafmount.source.spool import Spool
from dafmount.tree.build import Style, build_tree
from dafmount.tree.cache import ChunkCache
from dafmount.tree.nodes import Directory, File, NodeTable

PACKED = {
    "format": "dense",
    "eltype": "Int32",
    "packed_format": "indexed+zipped",
    "chunk_shape": [100],
    "compression": "gzip",
    "compression_level": 5,
    "index_location": "start",
}
VALUES = np.arange(1000, dtype="<i4") * 7


class Shown:
    """A tree that is read as a mount would read it."""

    def __init__(self, source: Path | str, layout: str = "1.1", shards: bool = False) -> None:
        resolved = resolve(str(source), spool=Spool())
        style = Style(ChunkCache(1 << 20), layout, shards)
        self.root = build_tree(resolved.archive, resolved.root, style)
        self.table = NodeTable(self.root)

    def node(self, path: str) -> Directory | File:
        node: Directory | File = self.root
        for name in path.split("/") if path else ():
            assert isinstance(node, Directory)
            node = node.children()[name]
        return node

    def names(self, path: str = "") -> list[str]:
        directory = self.node(path)
        assert isinstance(directory, Directory)
        return sorted(directory.children())

    def read(self, path: str) -> bytes:
        file = self.node(path)
        assert isinstance(file, File)
        self.table.number(file)
        content = file.opener.open(file)
        data = bytes(content.read(0, content.size))
        assert file.size in (None, len(data))
        content.close()
        return data


@pytest.fixture
def daf(tmp_path: Path) -> Callable[..., Path]:
    """Makes a FilesDaf directory of an axis `cell` of 1000 entries and the files given."""

    def make(files: dict[str, bytes | str | dict[str, object]], version: str = "[1,1]") -> Path:
        root = tmp_path / "x.daf"
        given = {"daf.json": f'{{"version":{version}}}\n', "axes/cell.txt": "".join(f"c{i}\n" for i in range(1000))}
        for name, value in {**given, **files}.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(value, dict):
                value = json.dumps(value)
            path.write_bytes(value.encode() if isinstance(value, str) else value)
        return root

    return make


def shard(compression: str = "gzip") -> bytes:
    out = io.BytesIO()
    write_shard(out, VALUES.tobytes(), (1000,), (100,), 4, compression, 5)
    return out.getvalue()


def test_a_packed_vector_is_shown_flat_and_described_so(daf: Callable[..., Path]) -> None:
    shown = Shown(daf({"vectors/cell/age.json": PACKED, "vectors/cell/age.zip": shard()}))
    assert shown.names("vectors/cell") == ["age.data", "age.json"]
    assert shown.read("vectors/cell/age.data") == VALUES.tobytes()
    assert shown.read("vectors/cell/age.json") == b'{"format":"dense","eltype":"Int32"}\n'


def test_shards_are_shown_beside_the_flat_files_on_request(daf: Callable[..., Path]) -> None:
    data = shard()
    shown = Shown(daf({"vectors/cell/age.json": PACKED, "vectors/cell/age.zip": data}), shards=True)
    assert shown.names("vectors/cell") == ["age.data", "age.json", "age.zip"]
    assert shown.read("vectors/cell/age.zip") == data


def test_a_shard_without_an_index_made_by_zipfile_is_read(daf: Callable[..., Path]) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as stream:
        for chunk in range(10):
            stream.writestr(f"c/{chunk}", VALUES[100 * chunk : 100 * chunk + 100].tobytes())
    described = {**PACKED, "packed_format": "zipped"}
    shown = Shown(daf({"vectors/cell/age.json": described, "vectors/cell/age.zip": out.getvalue()}))
    assert shown.read("vectors/cell/age.data") == VALUES.tobytes()


def test_only_a_descriptor_makes_a_zip_a_shard(daf: Callable[..., Path]) -> None:
    files = {
        "metadata.zip": b"no shard",
        "vectors/cell/loose.zip": b"no descriptor",
        "vectors/cell/flat.json": '{"format":"dense","eltype":"Int8"}',
        "vectors/cell/flat.data": bytes(1000),
        "vectors/cell/flat.zip": b"the descriptor says flat",
        "vectors/cell/x.zip.json": '{"format":"dense","eltype":"Int8"}',
        "vectors/cell/x.zip.data": bytes(1000),
    }
    shown = Shown(daf(files))
    assert shown.names("vectors/cell") == sorted(Path(name).name for name in files if name != "metadata.zip")
    for name, data in files.items():
        assert shown.read(name) == (data.encode() if isinstance(data, str) else data)


def test_components_are_packed_one_by_one(daf: Callable[..., Path]) -> None:
    index = {**PACKED, "n_elements": 1000}
    flat = {"format": "dense", "eltype": "Int8", "n_elements": 1000}
    shown = Shown(
        daf(
            {
                "vectors/cell/s.json": {"format": "sparse", "nzind": index, "nzval": flat},
                "vectors/cell/s.nzind.zip": shard(),
                "vectors/cell/s.nzval": bytes(1000),
            }
        )
    )
    assert shown.names("vectors/cell") == ["s.json", "s.nzind", "s.nzval"]
    assert shown.read("vectors/cell/s.nzind") == VALUES.tobytes()
    assert json.loads(shown.read("vectors/cell/s.json"))["nzind"] == {**flat, "eltype": "Int32"}


def test_every_axis_and_pair_of_axes_has_a_directory(daf: Callable[..., Path]) -> None:
    shown = Shown(daf({"axes/gene.txt": "g\n", "vectors/extra/note.txt": "kept"}))
    assert shown.names("vectors") == ["cell", "extra", "gene"]
    assert {rows: shown.names(f"matrices/{rows}") for rows in shown.names("matrices")} == {
        "cell": ["cell", "gene"],
        "gene": ["cell", "gene"],
    }
    assert shown.names("matrices/gene/gene") == []
    assert shown.names("scalars") == []
    assert shown.read("vectors/extra/note.txt") == b"kept"


def test_metadata_lists_what_is_shown_whatever_the_source_says(daf: Callable[..., Path]) -> None:
    shown = Shown(
        daf(
            {
                "metadata.json": '{"vectors/cell/gone":{}}',
                "scalars/pi.json": '{"type": "Float64",\n "value": 3.10}\n',
                "vectors/cell/age.json": PACKED,
                "vectors/cell/age.zip": shard(),
            }
        )
    )
    assert shown.read("metadata.json") == (
        b'{"axes/cell":{"format":"axis","n_entries":1000},"scalars/pi":{"type":"Float64","value":3.10},'
        b'"vectors/cell/age":{"format":"dense","eltype":"Int32"}}'
    )


def test_a_damaged_descriptor_costs_its_own_files_only(daf: Callable[..., Path]) -> None:
    shown = Shown(
        daf(
            {
                "vectors/cell/bad.json": "{",
                "vectors/cell/bad.zip": b"?",
                "vectors/cell/age.json": PACKED,
                "vectors/cell/age.zip": shard(),
            }
        )
    )
    assert shown.names("vectors/cell") == ["age.data", "age.json", "bad.json", "bad.zip"]
    with pytest.raises(CorruptDescriptor, match=r"bad\.json"):
        shown.read("vectors/cell/bad.json")
    assert "vectors/cell/bad" not in json.loads(shown.read("metadata.json"))
    assert shown.read("vectors/cell/age.data") == VALUES.tobytes()


def test_claims_of_a_descriptor_are_checked_before_memory_is_taken(daf: Callable[..., Path]) -> None:
    huge = {**PACKED, "chunk_shape": [1 << 40]}
    shown = Shown(daf({"vectors/cell/age.json": huge, "vectors/cell/age.zip": shard()}))
    with pytest.raises(CorruptDescriptor, match="a chunk would take"):
        shown.read("vectors/cell/age.data")


def test_a_shard_whose_axis_is_missing_is_listed_and_its_file_is_an_error(daf: Callable[..., Path]) -> None:
    shown = Shown(daf({"vectors/gene/age.json": PACKED, "vectors/gene/age.zip": shard()}))
    assert shown.names("vectors/gene") == ["age.data", "age.json"]
    with pytest.raises(DafmountError, match=r"axes/gene\.txt"):
        shown.read("vectors/gene/age.data")


def test_version_1_0_is_shown_as_1_1_and_the_other_way_round_on_request(daf: Callable[..., Path]) -> None:
    descriptor = '{"format":"sparse","nzind":{"format":"dense","eltype":"Int8","n_elements":0}}'
    source = daf({"vectors/cell/s.json": descriptor}, "[1,0]")
    assert Shown(source).read("daf.json") == b'{"version":[1,1]}\n'
    old = Shown(source, layout="1.0")
    assert old.read("daf.json") == b'{"version":[1,0]}\n'
    assert old.read("vectors/cell/s.json") == b'{"format":"sparse","eltype":"Bool","indtype":"Int8"}\n'
    assert json.loads(old.read("metadata.json"))["vectors/cell/s"]["indtype"] == "Int8"


def test_a_later_version_is_refused(daf: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedFormat, match=r"1\.2"):
        Shown(daf({}, "[1,2]")).names()


def test_an_archive_of_groups_shows_each_as_a_folder_opened_when_entered(corpus: Path) -> None:
    shown = Shown(corpus / "dafr" / "zstd.dafs.zip")
    assert shown.names() == ["one", "two"]
    assert shown.names("two") == ["nested"]
    nested = shown.node("two/nested")
    assert isinstance(nested, Directory)
    assert not nested.is_loaded
    assert shown.read("two/nested/vectors/cell/nick.txt") == (
        corpus / "dafr" / "small2-flat.daf" / "vectors" / "cell" / "nick.txt"
    ).read_bytes()


def test_listing_reads_no_shard(daf: Callable[..., Path]) -> None:
    text = {**PACKED, "eltype": "String", "compression": "zstd"}
    shown = Shown(daf({"vectors/cell/label.json": text, "vectors/cell/label.zip": b"nothing like a shard"}))
    label = shown.node("vectors/cell/label.txt")
    assert isinstance(label, File)
    assert label.size is None
    assert shown.names("vectors/cell") == ["label.json", "label.txt"]


def test_inode_numbers_are_the_same_each_time_and_differ_within_a_tree(corpus: Path) -> None:
    numbers = []
    for _ in range(2):
        shown = Shown(corpus / "dafr" / "zstd.daf.zip")
        files = [f"vectors/cell/{name}" for name in shown.names("vectors/cell")]
        numbers.append({path: shown.table.number(shown.node(path)) for path in [*files, "axes", "vectors/cell"]})
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0].values())) == len(numbers[0])
