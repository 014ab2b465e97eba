"""What other programs wrote is found sound, whichever way it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from check_archives import COMPRESSIONS, findings, sample, write_directory, zip_bytes
from dafmount.check.run import check
from dafmount.errors import NotADaf

CODECS = ("blosc_lz4_bitshuffle", "blosc_zstd_bitshuffle", "gzip", "zstd")
ARCHIVES = (
    *(f"dafr/{codec}.{kind}" for codec in CODECS for kind in ("daf", "daf.zip", "dafs.zip", "dafs.zip#/two/nested")),
    *(f"dafr/{name}" for name in ("flat.daf", "flat.daf.zip", "small-flat.daf", "small-flat.daf.zip")),
    *(f"julia/{name}" for name in ("fpk/bl.files", "fpk/bz.files", "fpk/gz.files", "fpk/zs.files")),
    *(f"julia/{name}" for name in ("jf11", "example-daf", "julia-filesdaf")),
)


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("name", ARCHIVES)
def test_nothing_is_found_in_an_archive_of_the_corpus(corpus: Path, name: str, jobs: int) -> None:
    assert findings(f"{corpus}/{name}", jobs=jobs) == []


@pytest.mark.parametrize("name", ARCHIVES)
def test_nothing_is_found_at_a_glance_either(corpus: Path, name: str) -> None:
    assert findings(f"{corpus}/{name}", quick=True) == []


def test_the_summary_counts_what_was_checked(corpus: Path) -> None:
    progress: list[tuple[int, int]] = []
    summary = check(f"{corpus}/dafr/zstd.daf", lambda _: None, progress=lambda *at: progress.append(at))
    assert (summary.data_sets, summary.axes, summary.scalars, summary.properties) == (1, 3, 7, 32)
    assert (summary.shards, summary.chunks) == (26, 4625)
    assert summary.read_bytes == progress[-1][0]
    assert progress == sorted(progress)


def test_every_group_of_an_archive_is_checked(corpus: Path) -> None:
    assert check(f"{corpus}/dafr/zstd.dafs.zip", lambda _: None).data_sets == 2


def test_what_is_no_daf_is_an_error_rather_than_a_finding(corpus: Path) -> None:
    with pytest.raises(NotADaf):
        findings(corpus / "julia" / "zpk" / "bz.daf.zarr")


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_nothing_is_found_in_what_this_program_wrote(tmp_path: Path, compression: str) -> None:
    files = sample(compression)
    assert findings(write_directory(files, tmp_path / "x.daf"), jobs=2) == []
    (tmp_path / "x.daf.zip").write_bytes(zip_bytes(files))
    assert findings(tmp_path / "x.daf.zip") == []
