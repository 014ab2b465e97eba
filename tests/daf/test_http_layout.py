from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import pytest
from web import Web

from dafmount.daf.http_layout import ListedDaf
from dafmount.errors import Corrupt, CorruptDescriptor, NotADaf, NotFound
from dafmount.source.http import HttpDirectory, HttpSite
from dafmount.source.http_settings import HttpSettings
from dafmount.source.http_url import parse_url
from dafmount.source.spool import Spool

MARKER = b'{"version":[1,1]}\n'
PACKED = {"packed_format": "indexed+zipped", "chunk_shape": [4], "compression": "zstd", "compression_level": 5}
METADATA = {
    "axes/cell": {"format": "axis", "n_entries": 7},
    "axes/g e#ne": {"format": "axis", "n_entries": 0},
    "scalars/n": {"type": "Float64", "value": 0.1},
    "vectors/cell/age": {"format": "dense", "eltype": "Int16"},
    "vectors/cell/name": {"format": "dense", "eltype": "String"},
    "vectors/cell/packed": {"format": "dense", "eltype": "Int16", **PACKED},
    "vectors/cell/flag": {"format": "sparse", "nzind": {"format": "dense", "eltype": "UInt32", "n_elements": 2}},
    "matrices/cell/cell/near": {"format": "sparse", "eltype": "Bool", "indtype": "UInt8"},
    "matrices/cell/g e#ne/x": {"format": "dense", "eltype": "Float32"},
}


@pytest.fixture
def web() -> Iterator[Web]:
    with Web({}) as server:
        yield server


def listed(web: Web, metadata: bytes | Mapping[str, object] | None, **files: bytes) -> ListedDaf:
    there: dict[str, bytes] = {"x.daf/daf.json": MARKER}
    if metadata is not None:
        there["x.daf/metadata.json"] = metadata if isinstance(metadata, bytes) else json.dumps(metadata).encode()
    web.files = there | {f"x.daf/{name}": data for name, data in files.items()}
    url = parse_url(web.url + "/x.daf/")
    return ListedDaf(HttpDirectory(HttpSite(url, HttpSettings(timeout_s=30, retries=0), Spool()), url))


def names(daf: ListedDaf, path: str) -> dict[str, int | None]:
    return {entry.name: entry.size for entry in daf.listdir(path)}


def test_what_the_descriptors_name_is_listed_without_a_request(web: Web) -> None:
    daf = listed(web, METADATA)
    assert len(web.requests) == 2
    assert set(names(daf, "")) == {"daf.json", "axes", "scalars", "vectors", "matrices"}
    assert names(daf, "axes") == {"cell.txt": None, "g e#ne.txt": None}
    cells = names(daf, "vectors/cell")
    assert {name: size for name, size in cells.items() if not name.endswith(".json")} == {
        "age.data": 14,
        "name.txt": None,
        "packed.zip": None,
        "flag.nzind": 8,
    }
    assert set(names(daf, "matrices/cell/cell")) == {"near.json", "near.colptr", "near.rowval"}
    assert names(daf, "matrices/cell/g e#ne")["x.data"] == 0
    assert daf.axis_lengths == {"cell": 7, "g e#ne": 0}
    assert len(web.requests) == 2
    for path in ("nothing", "axes/cell.txt", "vectors/gone"):
        with pytest.raises(NotFound):
            daf.listdir(path)


def test_descriptors_are_as_they_are_written(web: Web) -> None:
    text = b'\xef\xbb\xbf \n{ "scalars/n" : {"type": "Float64",\n "value": 1.50e+3} , "axes/a":{"n_entries":1}}'
    daf = listed(web, text)
    assert daf.read_small("scalars/n.json", 1000) == b'{"type":"Float64","value":1.50e+3}\n'
    source = daf.open("scalars/n.json")
    assert source.read(0, source.size) == daf.read_small("scalars/n.json", 1000)
    with pytest.raises(Corrupt):
        daf.read_small("scalars/n.json", 10)
    assert len(web.requests) == 2


def test_files_are_fetched_when_read(web: Web) -> None:
    daf = listed(web, METADATA, **{"axes/g e#ne.txt": b"one\n", "vectors/cell/age.data": b"\x01\x00" * 7})
    source = daf.open("axes/g e#ne.txt")
    assert source.read(0, source.size) == b"one\n"
    assert daf.open("vectors/cell/age.data").read(2, 4) == b"\x01\x00\x01\x00"
    with pytest.raises(NotFound):
        daf.open("vectors/cell/gone.data")
    with pytest.raises(NotFound):
        daf.open("vectors/cell/name.txt").read(0, 1)


def test_a_file_of_another_size_than_metadata_says(web: Web) -> None:
    daf = listed(web, METADATA, **{"vectors/cell/age.data": b"\x01\x00" * 8})
    with pytest.raises(Corrupt, match=r"has 16 bytes, metadata\.json speaks of 14"):
        daf.open("vectors/cell/age.data").read(0, 4)


@pytest.mark.parametrize(
    ("path", "descriptor"),
    [
        ("vectors/cell/x", {"format": "unheard"}),
        ("vectors/cell/x", 5),
        ("axes/x", {"n_entries": -1}),
        ("axes/x", {"n_entries": True}),
    ],
)
def test_a_broken_descriptor_costs_its_own_files(
    web: Web, path: str, descriptor: object, caplog: pytest.LogCaptureFixture
) -> None:
    daf = listed(web, {**METADATA, path: descriptor})
    assert names(daf, "vectors/cell")["age.data"] == 14
    assert "x" not in daf.axis_lengths
    assert path in caplog.text


@pytest.mark.parametrize(
    "path", ["../x", "vectors/../../x", "vectors/cell/..", "/axes/x", "axes/a/b", "axes", "other/x", "scalars/", ""]
)
def test_paths_that_lead_elsewhere_are_left_out(web: Web, path: str, caplog: pytest.LogCaptureFixture) -> None:
    daf = listed(web, {"axes/cell": {"n_entries": 1}, path: {"type": "String", "value": "x"}})
    assert set(names(daf, "")) == {"daf.json", "axes"}
    assert names(daf, "axes") == {"cell.txt": None}
    assert "is no path" in caplog.text


def test_without_metadata_it_says_how_to_make_one(web: Web) -> None:
    with pytest.raises(NotADaf, match=r"no metadata\.json.*FilesDaf.*dafpack"):
        listed(web, None)


@pytest.mark.parametrize("metadata", [b"", b"[]", b"{", b"<html>not found</html>", b'{"a":}', b"\xff", b'{"a":1}x'])
def test_metadata_that_is_none(web: Web, metadata: bytes) -> None:
    with pytest.raises(CorruptDescriptor):
        listed(web, metadata)


def test_metadata_of_more_than_its_limit_is_not_read(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dafmount.daf.http_layout.MAX_METADATA_BYTES", 500)
    with pytest.raises(Corrupt, match="more than 500 bytes"):
        listed(web, json.dumps(METADATA).encode() + bytes(50_000_000))
    assert web.sent_bytes < 20_000_000
