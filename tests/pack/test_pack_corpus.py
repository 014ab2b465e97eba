"""Data sets that other programs wrote: packed as they pack them, unpacked as they leave them flat, and back again."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packing import assert_same_files, assert_same_trees, files, run_pack, run_unpack

CODECS = ("blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd_bitshuffle", "zstd", "gzip", "gzip_shuffle")
DAFR_CODECS = ("blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip")
JULIA_CODECS = {"bz": "blosc_zstd_bitshuffle", "bl": "blosc_lz4_bitshuffle", "zs": "zstd", "gz": "gzip"}
SMALL = ("dafr/small-flat.daf", "dafr/small2-flat.daf", "julia/jf11", "julia/julia-filesdaf", "julia/example-daf")

TARGETS_OF_DAFR = {
    1: ("i32_many_chunks", "mask_mixed_1k", "mask_true_1k"),
    4: ("bool", "i8", "u8"),
    39: ("f64_39k_chunks",),
}
"""The vectors that its author packed with another target."""

STRINGS_OF_DAFR = ("vectors/cell/label", "vectors/cell/sparse_str", "matrices/cell/batch/tag")
"""dafr leaves strings flat; DataAxesFormats.jl, whose rule counts, packs them."""


def descriptors(place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in files(place) if name.endswith(".json")}


def destinations(folder: Path) -> Iterator[str]:
    yield from (f"{folder}/x.daf", f"{folder}/x.daf.zip", f"{folder}/x.dafs.zip#/deep/group")


@pytest.mark.parametrize("compression", DAFR_CODECS)
def test_what_is_packed_and_how_is_what_dafr_packs(tmp_path: Path, corpus: Path, compression: str) -> None:
    theirs = corpus / "dafr" / f"{compression}.daf"
    run_pack(corpus / "dafr" / "flat.daf", tmp_path / "x.daf", compression)
    special = tuple(f"vectors/cell/{name}" for names in TARGETS_OF_DAFR.values() for name in names) + STRINGS_OF_DAFR
    expected = {name: raw for name, raw in descriptors(theirs).items() if not name.startswith(special)}
    found = {name: raw for name, raw in descriptors(tmp_path / "x.daf").items() if not name.startswith(special)}
    assert len(expected) > 25
    assert found == expected
    assert [name for name in files(tmp_path / "x.daf") if not name.startswith(special)] == [
        name for name in files(theirs) if not name.startswith(special)
    ]


@pytest.mark.parametrize("target_kb", list(TARGETS_OF_DAFR))
def test_another_target_gives_the_chunks_that_dafr_makes(tmp_path: Path, corpus: Path, target_kb: int) -> None:
    run_pack(corpus / "dafr" / "flat.daf", tmp_path / "x.daf", "zstd", target_kb=target_kb)
    for name in TARGETS_OF_DAFR[target_kb]:
        path = f"vectors/cell/{name}.json"
        assert (tmp_path / "x.daf" / path).read_bytes() == (corpus / "dafr" / "zstd.daf" / path).read_bytes()


@pytest.mark.parametrize("short", list(JULIA_CODECS))
def test_what_is_packed_and_how_is_what_julia_packs(tmp_path: Path, corpus: Path, short: str) -> None:
    theirs = corpus / "julia" / "fpk" / f"{short}.files"
    run_unpack(theirs, tmp_path / "flat.daf")
    run_pack(tmp_path / "flat.daf", tmp_path / "x.daf", JULIA_CODECS[short])
    # The package writes relaid-out sparse matrices flat whatever their size.
    relaid_out = "matrices/gene/cell/sparse.json"
    expected, found = descriptors(theirs), descriptors(tmp_path / "x.daf")
    expected.pop(relaid_out), found.pop(relaid_out)
    assert b'"String","packed_format"' in expected["vectors/cell/label.json"]
    assert found == expected


def test_metadata_json_is_the_one_that_julia_writes(tmp_path: Path, corpus: Path) -> None:
    theirs = corpus / "julia" / "jf11"
    run_pack(theirs, tmp_path / "x.daf")
    expected = (theirs / "metadata.json").read_bytes()
    found = (tmp_path / "x.daf" / "metadata.json").read_bytes()
    assert found == expected
    assert not found.endswith(b"\n")


@pytest.mark.parametrize("compression", DAFR_CODECS)
@pytest.mark.parametrize("kind", ["daf", "daf.zip"])
def test_unpacking_gives_what_dafr_writes_flat(tmp_path: Path, corpus: Path, compression: str, kind: str) -> None:
    run_unpack(corpus / "dafr" / f"{compression}.{kind}", tmp_path / "x.daf")
    flat = corpus / "dafr" / "flat.daf"
    found = set(files(tmp_path / "x.daf"))
    assert found <= set(files(flat))  # one of the packed directories lacks the matrices
    assert len(found) > 60
    for name in found:
        assert (tmp_path / "x.daf" / name).read_bytes() == (flat / name).read_bytes(), name


def test_unpacking_gives_what_the_list_of_flat_files_says(tmp_path: Path, corpus: Path) -> None:
    sources = [f"julia/fpk/{short}.files" for short in JULIA_CODECS]
    sources += [f"dafr/{codec}.dafs.zip/{group}" for codec in DAFR_CODECS for group in ("one", "two/nested")]
    expected = [line.split(maxsplit=2) for line in (corpus / "expected-sha256.txt").read_text().splitlines()]
    n_checked = 0
    for source in sources:
        place = tmp_path / source.replace("/", "-")
        run_unpack(str(corpus / source).replace(".dafs.zip/", ".dafs.zip#/"), place)
        for sha256, size, path in expected:
            if path.startswith(source + "/"):
                data = (place / path.removeprefix(source + "/")).read_bytes()
                assert (hashlib.sha256(data).hexdigest(), len(data)) == (sha256, int(size)), path
                n_checked += 1
    assert n_checked > 40


@pytest.fixture(scope="module")
def flat(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The flat data sets of the corpus, with the empty directories that its storage loses."""
    place = tmp_path_factory.mktemp("flat")
    made = {}
    for name in (*SMALL, "dafr/flat.daf"):
        made[name] = place / name.replace("/", "-")
        run_unpack(corpus / name, made[name])
    return made


@pytest.mark.parametrize("name", [*SMALL, "dafr/flat.daf"])
def test_a_flat_data_set_is_copied_as_it_is(corpus: Path, flat: dict[str, Path], name: str) -> None:
    if (corpus / name / "daf.json").read_bytes() == b'{"version":[1,1]}\n':
        assert_same_files(flat[name], corpus / name)
        return
    # Version 1.0 becomes 1.1: daf.json and the descriptors of sparse properties differ, nothing else.
    assert list(files(flat[name])) == list(files(corpus / name))
    for path in files(corpus / name):
        found, expected = (flat[name] / path).read_bytes(), (corpus / name / path).read_bytes()
        if found != expected:
            old: dict[str, Any] = json.loads(expected)
            new: dict[str, Any] = json.loads(found)
            if path == "daf.json":
                assert new == {"version": [1, 1]}
                continue
            assert old["format"] == new.pop("format") == "sparse"
            assert new.pop("nzval", {"eltype": "Bool"})["eltype"] == old["eltype"]
            assert {component["eltype"] for component in new.values()} == {old["indtype"]}


@pytest.mark.parametrize("compression", CODECS)
@pytest.mark.parametrize("name", SMALL)
def test_packed_and_unpacked_again_not_a_byte_differs(
    tmp_path: Path, flat: dict[str, Path], name: str, compression: str
) -> None:
    for n, destination in enumerate(destinations(tmp_path)):
        run_pack(flat[name], destination, compression, target_kb=1, jobs=1 + n % 2)
        run_unpack(destination, tmp_path / f"back{n}.daf")
        assert_same_trees(tmp_path / f"back{n}.daf", flat[name])


@pytest.mark.parametrize(("at", "compression"), list(enumerate(CODECS)))
def test_the_large_one_too(tmp_path: Path, flat: dict[str, Path], at: int, compression: str) -> None:
    destination = list(destinations(tmp_path))[at % 3]
    run_pack(flat["dafr/flat.daf"], destination, compression, jobs=2)
    again = tmp_path / "again.daf.zip"
    run_pack(destination, again, "zstd", target_kb=5)
    shutil.rmtree(tmp_path / "x.daf", ignore_errors=True)
    run_unpack(again, tmp_path / "back.daf")
    assert_same_trees(tmp_path / "back.daf", flat["dafr/flat.daf"])


@pytest.mark.parametrize("compression", CODECS)
def test_other_programs_read_the_archives(tmp_path: Path, flat: dict[str, Path], compression: str) -> None:
    source = flat["dafr/small-flat.daf"]
    run_pack(source, tmp_path / "x.daf.zip", compression)
    run_pack(source, f"{tmp_path}/x.dafs.zip#/one", compression)
    run_pack(source, f"{tmp_path}/x.dafs.zip#/two", compression)
    run_pack(source, f"{tmp_path}/x.dafs.zip#/deep/three", compression)
    for name in ("x.daf.zip", "x.dafs.zip"):
        path = tmp_path / name
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            prefix = "" if name == "x.daf.zip" else "two/"
            assert archive.read(prefix + "axes/cell.txt") == (source / "axes/cell.txt").read_bytes()
            assert "metadata.json" not in {entry.rpartition("/")[2] for entry in archive.namelist()}
        tested = subprocess.run(["unzip", "-t", path], capture_output=True, text=True, check=False)
        assert tested.returncode == 0, tested.stdout[-500:] + tested.stderr
        assert "warning" not in tested.stdout + tested.stderr
        tested = subprocess.run(["7z", "t", path], capture_output=True, text=True, check=False)
        assert tested.returncode == 0, tested.stdout
        assert "Warning" not in tested.stdout
