"""Whatever single byte of an archive is altered: where a reader sees something else, the check finds something."""

from __future__ import annotations

import logging
import shutil
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from check_archives import (
    COMPRESSIONS,
    Files,
    findings,
    flipped,
    is_found_out,
    sample,
    seen,
    write_directory,
    zip_bytes,
)

MASKS = st.one_of(st.sampled_from([1 << bit for bit in range(8)]), st.integers(1, 255))
MODEST = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """Damaged archives are logged by the thousand."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def files_of(compression: str) -> Files:
    return sample(compression)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flips")


def judge(source: str, path: Path, original: bytes, before: dict[str, bytes] | None, at: int, mask: int) -> None:
    """Alter one byte of `path`, compare what is seen, and put it back."""
    path.write_bytes(flipped(original, at, mask))
    try:
        if seen(source) != before:
            assert is_found_out(source), f"byte {at} of {path.name} ^ {mask:#x} goes unnoticed"
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("form", ["stored", "deflated"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_any_byte_of_a_zip_archive(place: Path, compression: str, form: str) -> None:
    path = place / f"{compression}-{form}.daf.zip"
    if form == "stored":
        original = zip_bytes(files_of(compression))
    else:
        original = zip_bytes(files_of(compression), zipfile.ZIP_DEFLATED, with_directories=True)
    path.write_bytes(original)
    before = seen(str(path))
    assert before is not None
    assert findings(path) == []

    @MODEST
    @given(st.integers(0, len(original) - 1), MASKS)
    def alter(at: int, mask: int) -> None:
        judge(str(path), path, original, before, at, mask)

    alter()


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_any_byte_of_a_shard_or_descriptor_in_a_directory(place: Path, compression: str) -> None:
    files = files_of(compression)
    root = write_directory(files, place / f"{compression}.daf")
    before = seen(str(root))
    assert before is not None
    assert findings(root) == []
    known = sorted(path for path in files if path.endswith((".zip", ".json")) and path != "metadata.json")

    @MODEST
    @given(st.sampled_from(known), st.data(), MASKS)
    def alter(name: str, data: st.DataObject, mask: int) -> None:
        at = data.draw(st.integers(0, len(files[name]) - 1))
        judge(str(root), root / name, files[name], before, at, mask)

    alter()


@pytest.mark.parametrize("name", ["zstd.dafs.zip#/one", "gzip.dafs.zip", "blosc_lz4_bitshuffle.dafs.zip#/two/nested"])
def test_any_byte_of_an_archive_that_dafr_wrote(place: Path, corpus: Path, name: str) -> None:
    archive, mark, group = name.partition("#")
    path = place / archive
    shutil.copyfile(corpus / "dafr" / archive, path)
    source = f"{path}{mark}{group}"
    original = path.read_bytes()
    before = seen(source)
    assert before is not None

    @MODEST
    @given(st.integers(0, len(original) - 1), MASKS)
    def alter(at: int, mask: int) -> None:
        judge(source, path, original, before, at, mask)

    alter()


def unread_by_all(shard: bytes) -> set[int]:
    """Bytes that no reader looks at (APPNOTE 4.3): times, versions, attributes, and an old end record's own numbers."""
    places: set[int] = set()
    for signature, ranges in (
        (b"PK\3\4", [(4, 6), (10, 14)]),
        (b"PK\1\2", [(4, 8), (12, 16), (34, 42)]),
        (b"PK\6\6", [(12, 16)]),
        (b"PK\6\7", [(16, 20)]),
        (b"PK\5\6", [(4, 20)]),
    ):
        at = shard.find(signature)
        while at >= 0:
            places.update(at + offset for start, stop in ranges for offset in range(start, stop))
            at = shard.find(signature, at + 1)
    return places


@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "gzip", "zstd"])
def test_every_byte_of_a_small_shard(place: Path, compression: str) -> None:
    name = "vectors/cell/age"
    whole = files_of(compression)
    files = {path: whole[path] for path in ("daf.json", "axes/cell.txt", f"{name}.json", f"{name}.zip")}
    root = write_directory(files, place / f"{compression}-every.daf")
    shard = files[f"{name}.zip"]
    unnoticed = 0
    before = seen(str(root))
    noticed_by_all = set(range(len(shard))) - unread_by_all(shard)
    for at in sorted(noticed_by_all):
        (root / f"{name}.zip").write_bytes(flipped(shard, at, 0x10))
        if not is_found_out(root):
            # A compressed stream has bits without a meaning; the checksum of what it decodes to is right.
            assert compression in ("gzip", "zstd"), f"byte {at} of {len(shard)} goes unnoticed"
            assert seen(str(root)) == before
            unnoticed += 1
    assert unnoticed <= 3
