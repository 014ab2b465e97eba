"""`dafinfo` as it is typed: tables, JSON, and single shards, against sizes that the file system and zarr tell."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from check_archives import sample, write_directory, zip_bytes

DAFINFO = (sys.executable, "-m", "dafmount.cli.dafinfo")
REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 60


def dafinfo(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DAFINFO, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def described(*arguments: str | Path) -> Any:
    found = dafinfo("--json", *arguments)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def test_sizes_are_those_of_the_files_packed_and_flat(corpus: Path) -> None:
    packed, flat = corpus / "dafr" / "gzip.daf", corpus / "dafr" / "flat.daf"
    (found,) = described(packed)
    assert len(found["properties"]) == 32
    for one in found["properties"]:
        stored = [(packed / part["file"]).stat().st_size for part in one["components"]]
        assert one["stored_bytes"] == sum(stored)
        names = flat.joinpath(one["path"]).parent.glob(f"{Path(one['path']).name}.*")
        assert one["flat_bytes"] == sum(path.stat().st_size for path in names if path.suffix != ".json")
    assert {axis["name"]: axis["n_entries"] for axis in found["axes"]} == {"batch": 12, "cell": 5000, "gene": 700}
    by_path = {one["path"]: one for one in found["properties"]}
    umis = by_path["matrices/cell/gene/UMIs"]
    assert (umis["layout"], umis["eltype"], umis["shape"], umis["n_values"]) == (
        "sparse",
        "UInt16",
        [5000, 700],
        350496,
    )
    counts = by_path["matrices/cell/gene/counts"]
    assert (counts["layout"], counts["n_chunks"], counts["components"][0]["compression"]) == ("dense", 2100, "gzip")
    assert counts["ratio"] == round(counts["flat_bytes"] / counts["stored_bytes"], 3)


@pytest.mark.parametrize("name", ["gzip.daf", "gzip.daf.zip"])
def test_the_table_has_a_line_for_each_property(corpus: Path, name: str) -> None:
    found = dafinfo(corpus / "dafr" / name)
    assert found.returncode == 0
    rows = [line.split() for line in found.stdout.splitlines()]
    assert rows[0][-1] == "1.1"
    assert ["gene", "700"] in rows
    counts = next(row for row in rows if row[:1] == ["matrices/cell/gene/counts"])
    assert counts[1:8] == ["Int32", "5000", "x", "700", "dense", "gzip", "2100"]
    assert sum(row[0].startswith(("vectors/", "matrices/")) for row in rows if row) == 32
    assert next(row for row in rows if row[:1] == ["total"])[1] == "4625"


def test_packed_strings_have_the_size_of_their_lines(corpus: Path) -> None:
    (found,) = described(corpus / "julia" / "fpk" / "bz.files")
    label = next(one for one in found["properties"] if one["path"] == "vectors/cell/label")
    lines = (line for line in (corpus / "expected-sha256.txt").read_text().splitlines())
    expected = next(line.split() for line in lines if line.endswith("julia/fpk/bz.files/vectors/cell/label.txt"))
    assert label["flat_bytes"] == int(expected[1])


def test_every_group_of_an_archive(corpus: Path) -> None:
    found = described(corpus / "dafr" / "zstd.dafs.zip")
    assert [one["name"].rpartition("#/")[2] for one in found] == ["one", "two/nested"]
    (one,) = described(f"{corpus}/dafr/zstd.dafs.zip#/one")
    assert one["properties"] == found[0]["properties"]


@pytest.mark.parametrize("codec", ["blosc_zstd_bitshuffle", "blosc_lz4_bitshuffle", "zstd", "gzip"])
def test_a_property_shows_its_shards(corpus: Path, codec: str) -> None:
    whole, rows, values = described(corpus / "dafr" / f"{codec}.daf", "matrices/cell/gene/UMIs")
    assert [part["key"] for part in whole["components"]] == ["colptr", "rowval", "nzval"]
    assert [part["compression"] for part in whole["components"]] == [None, codec, codec]
    assert (rows["name"], values["name"]) == ("matrices/cell/gene/UMIs.rowval.zip", "matrices/cell/gene/UMIs.nzval.zip")
    assert (values["shape"], values["chunk_shape"], values["grid_shape"]) == ([350496], [4096], [86])
    assert (values["compression"], values["compression_level"], values["has_index"]) == (codec, 5, True)
    assert values["flat_bytes"] == 2 * 350496
    assert values["min_chunk_bytes"] * 86 <= values["stored_bytes"] <= values["max_chunk_bytes"] * 86
    assert values["stored_bytes"] < values["shard_bytes"]
    assert values["pipeline"][0]["name"] == "bytes"
    assert (values["codec_json"] is None) == (codec in ("zstd", "gzip"))


def test_a_path_may_be_a_file_of_the_property(corpus: Path) -> None:
    root = corpus / "dafr" / "zstd.daf"
    (one,) = described(root, "matrices/cell/gene/UMIs.nzval.zip")
    assert one["n_chunks"] == 86
    assert described(root, "vectors/cell/f64.json") == described(root, "vectors/cell/f64")
    whole, shard = described(root, "vectors/cell/f64")
    assert whole["flat_bytes"] == shard["flat_bytes"] == 40000


def test_a_shard_file_beside_its_descriptor(corpus: Path) -> None:
    (one,) = described(corpus / "dafr" / "zstd.daf" / "matrices/cell/gene/counts.zip")
    assert (one["shape"], one["eltype"], one["grid_shape"], one["compression_level"]) == (
        [5000, 700],
        "Int32",
        [3, 700],
        5,
    )


@pytest.mark.parametrize(
    ("codec", "grid"),
    [("blosc_zstd_bitshuffle", [3, 700]), ("blosc_lz4_bitshuffle", [3, 700]), ("zstd", [3, 700]), ("gzip", None)],
)
def test_a_shard_file_alone(corpus: Path, tmp_path: Path, codec: str, grid: list[int] | None) -> None:
    shard = corpus / "dafr" / f"{codec}.daf" / "matrices/cell/gene/counts.zip"
    shutil.copyfile(shard, tmp_path / "x.zip")
    (one,) = described(tmp_path / "x.zip")
    assert (one["compression"], one["n_chunks"], one["grid_shape"], one["shape"]) == (codec, 2100, grid, None)
    assert one["shard_bytes"] == shard.stat().st_size
    assert one["has_index"]
    text = dafinfo(tmp_path / "x.zip").stdout
    assert codec in text
    assert "2100 chunks" in text


def test_codecs_that_only_codec_json_tells(tmp_path: Path) -> None:
    for compression in ("gzip_shuffle", "zstd_bitshuffle"):
        (tmp_path / "x.zip").write_bytes(sample(compression)["vectors/cell/age.zip"])
        (one,) = described(tmp_path / "x.zip")
        assert one["compression"] == compression


def test_a_damaged_property_costs_nothing_else(tmp_path: Path) -> None:
    files = sample("zstd")
    files["vectors/cell/age.json"] = b"{"
    files["vectors/cell/label.zip"] = b"short"
    found = dafinfo(write_directory(files, tmp_path / "x.daf"))
    assert found.returncode == 7
    assert "vectors/cell/age.json: not valid JSON" in found.stdout
    assert "vectors/cell/label" in found.stdout
    assert "matrices/cell/gene/UMIs" in found.stdout


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [("nothing", None, 3), ("x.zip", b"", 9), ("x.zip", b"text", 4), ("x.zip", zip_bytes({"a": b"b"}), 4)],
)
def test_what_cannot_be_described(tmp_path: Path, name: str, content: bytes | None, code: int) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = dafinfo(tmp_path / name)
    assert (found.returncode, found.stdout) == (code, "")
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f"dafinfo: {tmp_path / name}")


def test_a_path_that_is_not_there(corpus: Path) -> None:
    found = dafinfo(corpus / "dafr" / "zstd.daf", "vectors/cell/nope")
    assert (found.returncode, found.stdout) == (3, "")
    assert "no property 'vectors/cell/nope'" in found.stderr
