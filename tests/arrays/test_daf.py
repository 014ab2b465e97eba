"""`dafmount.open`: what other programs wrote, as arrays, against the same written flat and read with numpy alone."""

from __future__ import annotations

import builtins
import doctest
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse import csc_array

import dafmount
from check_archives import COMPRESSIONS, N_CELLS, N_GENES, Files, compact, sample, write_directory, zip_bytes
from dafmount.arrays.lazy import LazyArray
from dafmount.errors import Corrupt, CorruptDescriptor, DafmountError, GroupNotFound, NotFound, UnsupportedFormat

REPOSITORY = Path(__file__).resolve().parents[2]
CODECS = ("blosc_lz4_bitshuffle", "blosc_zstd_bitshuffle", "gzip", "zstd")
TYPES = {"Bool": "?", "Float32": "<f4", "Float64": "<f8"}
TYPES |= {f"Int{8 * n}": f"<i{n}" for n in (1, 2, 4, 8)} | {f"UInt{8 * n}": f"<u{n}" for n in (1, 2, 4, 8)}


def flat_truth(root: Path) -> Iterator[tuple[tuple[str, ...], str, np.ndarray[Any, Any]]]:
    """Every property of a flat FilesDaf as a dense array, read without dafmount: axes, name, values."""
    lengths = {path.stem: path.read_bytes().count(b"\n") for path in root.glob("axes/*.txt")}
    for path in sorted([*root.glob("vectors/*/*.json"), *root.glob("matrices/*/*/*.json")]):
        axes = path.relative_to(root).parts[1:-1]
        fields = json.loads(path.read_text())
        shape = tuple(lengths[axis] for axis in axes)
        yield axes, path.stem, dense_truth(path, fields, shape)


def dense_truth(path: Path, fields: dict[str, Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    def part(key: str, eltype: str) -> np.ndarray[Any, Any]:
        return np.fromfile(path.with_suffix(f".{key}"), TYPES[eltype])

    if fields["format"] == "dense":
        if fields["eltype"] == "String":
            lines = path.with_suffix(".txt").read_text().split("\n")[:-1]
            return np.array(lines, object).reshape(shape, order="F")
        return part("data", fields["eltype"]).reshape(shape, order="F")
    value_type = fields["nzval"]["eltype"] if "nzval" in fields else fields.get("eltype", "Bool")
    index_type = fields.get("indtype") or fields["nzind" if len(shape) == 1 else "rowval"]["eltype"]
    rows = part("nzind" if len(shape) == 1 else "rowval", index_type).astype(int) - 1
    if value_type == "String":
        values = np.array(path.with_suffix(".nztxt").read_text().split("\n")[:-1], object)
    elif path.with_suffix(".nzval").exists():
        values = part("nzval", value_type)
    else:
        values = np.ones(len(rows), bool)
    dense = np.full(shape, "" if value_type == "String" else 0, values.dtype)
    if len(shape) == 1:
        dense[rows] = values
    else:
        starts = part("colptr", fields["colptr"]["eltype"] if "colptr" in fields else index_type).astype(int)
        dense[rows, np.repeat(np.arange(shape[1]), np.diff(starts))] = values
    return dense


def as_dense(array: Any) -> np.ndarray[Any, Any]:
    return array.toarray() if isinstance(array, csc_array) else np.asarray(array)


def check_against(source: str, flat: Path) -> int:
    """How many properties of `source` are those of a flat FilesDaf; fails for one that is not."""
    n = 0
    with dafmount.open(source) as daf:
        for axes, name, expected in flat_truth(flat):
            array = daf.vector(*axes, name) if len(axes) == 1 else daf.matrix(*axes, name)
            assert array.shape == expected.shape
            assert array.dtype == expected.dtype
            np.testing.assert_array_equal(as_dense(array), expected, err_msg=f"{axes} {name}")
            assert name in (daf.vectors(*axes) if len(axes) == 1 else daf.matrices(*axes))
            n += 1
        for path in flat.glob("axes/*.txt"):
            assert daf.axis_entries(path.stem) == path.read_text().split("\n")[:-1]
            assert daf.axis_length(path.stem) == len(daf.axis_entries(path.stem))
        assert set(daf.axes) == {path.stem for path in flat.glob("axes/*.txt")}
        for path in flat.glob("scalars/*.json"):
            assert daf.scalar(path.stem) == json.loads(path.read_text())["value"]
            assert path.stem in daf.scalars
    return n


@pytest.mark.parametrize("kind", ["daf", "daf.zip"])
@pytest.mark.parametrize("codec", [*CODECS, "flat"])
def test_every_property_that_dafr_wrote_is_its_flat_twin(corpus: Path, codec: str, kind: str) -> None:
    assert check_against(f"{corpus}/dafr/{codec}.{kind}", corpus / "dafr" / "flat.daf") == 32


@pytest.mark.parametrize("codec", CODECS)
def test_groups_are_their_flat_twins(corpus: Path, codec: str) -> None:
    assert check_against(f"{corpus}/dafr/{codec}.dafs.zip#/one", corpus / "dafr" / "small-flat.daf")
    assert check_against(f"{corpus}/dafr/{codec}.dafs.zip#/two/nested", corpus / "dafr" / "small2-flat.daf")


@pytest.mark.parametrize("name", ["jf11", "example-daf", "julia-filesdaf"])
def test_flat_data_sets_of_julia(corpus: Path, name: str) -> None:
    assert check_against(f"{corpus}/julia/{name}", corpus / "julia" / name)


@pytest.fixture(params=COMPRESSIONS)
def files(request: pytest.FixtureRequest) -> Files:
    return sample(request.param)


def test_what_kind_of_array_a_property_is(files: Files, tmp_path: Path) -> None:
    with dafmount.open(write_directory(files, tmp_path)) as daf:
        assert isinstance(daf.vector("gene", "mean"), np.memmap)
        assert not daf.vector("gene", "mean").flags.writeable
        assert isinstance(daf.vector("cell", "age"), LazyArray)
        assert isinstance(daf.vector("cell", "label"), LazyArray)
        assert isinstance(daf.matrix("cell", "gene", "UMIs"), LazyArray)
        assert isinstance(daf.matrix("cell", "gene", "spliced"), csc_array)
        assert isinstance(daf.vector("cell", "doublet"), np.ndarray)
        assert daf.vector("cell", "doublet").dtype == bool
        assert daf.matrix("cell", "gene", "UMIs") is daf.matrix("cell", "gene", "UMIs")
        assert daf.vector("cell", "label")[2] == "type-2 é"


def test_flat_numbers_in_an_archive_are_read_when_indexed(files: Files, tmp_path: Path) -> None:
    (tmp_path / "x.daf.zip").write_bytes(zip_bytes(files))
    with dafmount.open(tmp_path / "x.daf.zip") as daf:
        mean = daf.vector("gene", "mean")
        assert isinstance(mean, LazyArray)
        assert mean[:].tobytes() == files["vectors/gene/mean.data"]


def test_matrices_are_column_major(files: Files, tmp_path: Path) -> None:
    with dafmount.open(write_directory(files, tmp_path)) as daf:
        umis = daf.matrix("cell", "gene", "UMIs")
        assert umis.shape == (N_CELLS, N_GENES)
        whole = np.asarray(umis)
        assert whole.flags.f_contiguous
        np.testing.assert_array_equal(whole, daf.matrix("cell", "gene", "blocks"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"type": "Bool", "value": 1}, True),
        ({"type": "Bool", "value": False}, False),
        ({"type": "Float64", "value": 3}, 3.0),
        ({"type": "Float32", "value": "-Inf"}, -math.inf),
        ({"type": "UInt64", "value": 2**64 - 1}, 2**64 - 1),
        ({"type": "string", "value": ""}, ""),
    ],
)
def test_scalars(tmp_path: Path, value: object, expected: object) -> None:
    write_directory({"daf.json": compact({"version": [1, 0]}), "scalars/x.json": compact(value)}, tmp_path)
    with dafmount.open(tmp_path) as daf:
        found = daf.scalar("x")
        assert (found, type(found)) == (expected, type(expected))


def test_a_scalar_that_is_no_number(tmp_path: Path) -> None:
    not_a_number = compact({"type": "Float64", "value": None})
    write_directory({"daf.json": compact({"version": [1, 0]}), "scalars/x.json": not_a_number}, tmp_path)
    with dafmount.open(tmp_path) as daf:
        assert math.isnan(float(daf.scalar("x")))


def test_errors_name_what_there_is(files: Files, tmp_path: Path) -> None:
    with dafmount.open(write_directory(files, tmp_path)) as daf:
        with pytest.raises(NotFound, match="no axis 'donor'; it has cell, gene"):
            daf.vectors("donor")
        with pytest.raises(NotFound, match="no vector 'size' of cell; there are age, doublet, is_ok, label"):
            daf.vector("cell", "size")
        with pytest.raises(NotFound, match="no matrix 'x' of gene and cell; there are none"):
            daf.matrix("gene", "cell", "x")
        with pytest.raises(NotFound, match="no scalar 'm'; it has n, title"):
            daf.scalar("m")


def test_several_data_sets_want_a_name(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "x.dafs.zip"
    path.write_bytes(zip_bytes({f"{group}/{name}": data for group in ("a", "b/c") for name, data in files.items()}))
    with pytest.raises(GroupNotFound, match="several data sets, name one of them after '#/': a, b/c"):
        dafmount.open(path)
    with dafmount.open(f"{path}#/b/c") as daf:
        assert daf.name == f"{path}#/b/c"


@pytest.mark.parametrize(
    ("path", "data", "read"),
    [
        ("vectors/gene/mean.data", b"\0", lambda daf: daf.vector("gene", "mean")),
        ("vectors/cell/age.zip", b"", lambda daf: daf.vector("cell", "age")[0]),
        ("vectors/cell/doublet.nzind", b"\xff\0\0\0" * 3, lambda daf: daf.vector("cell", "doublet")),
        ("axes/gene.txt", b"\xff\n" * N_GENES, lambda daf: daf.axis_entries("gene")),
        ("scalars/n.json", b"[]", lambda daf: daf.scalar("n")),
        ("scalars/n.json", compact({"type": "Int8", "value": "x"}), lambda daf: daf.scalar("n")),
    ],
)
def test_damage_raises_errors_of_this_package(tmp_path: Path, path: str, data: bytes, read: Any) -> None:
    files = {**sample("zstd"), path: data}
    with dafmount.open(write_directory(files, tmp_path)) as daf, pytest.raises(Corrupt):
        read(daf)


def test_a_colptr_that_cannot_be(tmp_path: Path) -> None:
    files = sample("zstd")
    fields = json.loads(files["matrices/cell/gene/spliced.json"])
    fields["colptr"] = {"format": "dense", "eltype": "UInt8", "n_elements": N_GENES + 1}
    files["matrices/cell/gene/spliced.json"] = compact(fields)
    files["matrices/cell/gene/spliced.colptr"] = bytes([1, 200, *[1] * (N_GENES - 1)])
    with (
        dafmount.open(write_directory(files, tmp_path)) as daf,
        pytest.raises(CorruptDescriptor, match="colptr: from"),
    ):
        daf.matrix("cell", "gene", "spliced")


def test_a_sparse_matrix_of_strings_is_filled_up(tmp_path: Path) -> None:
    write_directory(
        {
            "daf.json": compact({"version": [1, 1]}),
            "axes/a.txt": b"x\ny\n",
            "axes/b.txt": b"z\n",
            "matrices/a/b/m.json": compact({"format": "sparse", "eltype": "String", "indtype": "UInt8"}),
            "matrices/a/b/m.colptr": b"\1\2",
            "matrices/a/b/m.rowval": b"\2",
            "matrices/a/b/m.nztxt": b"here\n",
        },
        tmp_path,
    )
    with dafmount.open(tmp_path) as daf:
        assert daf.matrix("a", "b", "m").tolist() == [[""], ["here"]]


def test_an_empty_axis(tmp_path: Path) -> None:
    write_directory(
        {
            "daf.json": compact({"version": [1, 1]}),
            "axes/none.txt": b"",
            "vectors/none/x.json": compact({"format": "dense", "eltype": "Int8"}),
            "vectors/none/x.data": b"",
            "matrices/none/none/s.json": compact({"format": "sparse", "eltype": "Bool", "indtype": "UInt8"}),
            "matrices/none/none/s.colptr": b"\1",
            "matrices/none/none/s.rowval": b"",
        },
        tmp_path,
    )
    with dafmount.open(tmp_path) as daf:
        assert daf.vector("none", "x").shape == (0,)
        assert daf.matrix("none", "none", "s").shape == (0, 0)
        assert daf.axis_entries("none") == []


def test_a_closed_daf_says_so(files: Files, tmp_path: Path) -> None:
    daf = dafmount.open(write_directory(files, tmp_path))
    age = daf.vector("cell", "age")
    mean = daf.vector("gene", "mean")
    daf.close()
    assert mean[0] >= 0
    with pytest.raises(DafmountError, match="after it was closed"):
        age[0]


def test_without_scipy_only_sparse_matrices_fail(files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_scipy(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_scipy)
    with dafmount.open(write_directory(files, tmp_path)) as daf:
        assert daf.matrix("cell", "gene", "UMIs")[0, 0] >= 0
        with pytest.raises(UnsupportedFormat, match=r"pip install 'dafmount\[scipy\]'"):
            daf.matrix("cell", "gene", "spliced")


def test_importing_dafmount_imports_nothing_heavy() -> None:
    heavy = ("numpy", "scipy", "trio", "zstandard", "blosc2")
    code = f"import sys, dafmount; print([name for name in {heavy} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"


def test_the_examples_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = REPOSITORY / "scripts" / "sample.py"
    subprocess.run([sys.executable, script, tmp_path / "cells.daf.zip"], cwd=REPOSITORY, check=True)
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(dafmount)
    assert (failed, tried) == (0, 2)
