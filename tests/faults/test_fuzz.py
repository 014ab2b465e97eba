"""Damaged archives, shards and descriptors, from the file to the bytes of every mounted file."""

from __future__ import annotations

import logging
import random
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import faulty_web
import fuzzing
from dafmount.shard.codecs import CODECS
from dafmount.source.spool import Spool

SEEDS = {seed.name: seed for seed in fuzzing.seeds()}
ARCHIVES = {
    (name, method): fuzzing.as_archive(seed.stored, method)
    for name, seed in SEEDS.items()
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
}
MAX_MEMORY_BYTES = 64 << 20

many = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False)
random_numbers = st.integers(0, 2**32).map(random.Random)


@pytest.fixture
def quiet() -> Iterator[None]:
    """The log of what is left out is not what this is about."""
    log = logging.getLogger("dafmount")
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(logging.NOTSET)


def write_tree(root: Path, stored: dict[str, bytes]) -> Path:
    for path, data in stored.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


@pytest.mark.parametrize("name", SEEDS)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_an_intact_seed_is_served_in_full(name: str, method: int, tmp_path: Path) -> None:
    archive = tmp_path / "x.daf.zip"
    archive.write_bytes(ARCHIVES[name, method])
    found = {path: data for path, data in fuzzing.served(archive, Spool()) if path not in fuzzing.MADE_UP}
    assert found == SEEDS[name].truth


@many
@given(st.sampled_from(sorted(ARCHIVES)), random_numbers, st.sampled_from(["auto", "all"]))
@pytest.mark.usefixtures("quiet")
def test_a_damaged_archive_serves_the_truth_or_an_error(
    tmp_path: Path, key: tuple[str, int], choose: random.Random, verify: str
) -> None:
    archive = tmp_path / "x.daf.zip"
    archive.write_bytes(fuzzing.damaged(ARCHIVES[key], choose))
    for path, found in fuzzing.served(archive, Spool(), verify):
        if found is not None:
            fuzzing.check_truth(SEEDS[key[0]], path, found)


@many
@given(st.sampled_from(sorted(SEEDS)), random_numbers)
@pytest.mark.usefixtures("quiet")
def test_damaged_shards_serve_the_truth_or_an_error(tmp_path: Path, name: str, choose: random.Random) -> None:
    seed = SEEDS[name]
    stored = dict(seed.stored)
    for path in [path for path in stored if path.endswith(".zip")]:
        stored[path] = fuzzing.damaged(stored[path], choose)
    for path, found in fuzzing.served(write_tree(tmp_path / "x.daf", stored), Spool()):
        if found is not None and path not in fuzzing.MADE_UP:
            assert found == seed.truth[path]


@many
@given(st.sampled_from(sorted(SEEDS)), random_numbers, st.sampled_from(["1.1", "1.0"]))
@pytest.mark.usefixtures("quiet")
def test_odd_descriptors_raise_only_our_errors_and_take_little_memory(
    tmp_path: Path, name: str, choose: random.Random, layout: str
) -> None:
    stored = dict(SEEDS[name].stored)
    for path in [path for path in stored if path.endswith(".json")]:
        if choose.random() < 0.7:
            stored[path] = fuzzing.odd_descriptor(stored[path], choose)
    source = write_tree(tmp_path / "x.daf", stored)
    assert peak_bytes(lambda: list(fuzzing.served(source, Spool(), layout=layout))) < MAX_MEMORY_BYTES


@many
@given(st.sampled_from(sorted(CODECS)), st.sampled_from([None, 1, 2, 4, 8]), random_numbers)
def test_a_damaged_chunk_is_its_bytes_or_an_error(
    compression: str, itemsize: int | None, choose: random.Random
) -> None:
    for _ in range(20):
        fuzzing.check_chunk(compression, itemsize, choose)


@pytest.mark.parametrize("name", ["x.daf", "x.daf.zip"])
def test_an_intact_web_server_is_served_in_full(name: str) -> None:
    truth = dict(SEEDS["zstd"].truth)
    if name == "x.daf":
        del truth["notes.txt"]  # what no descriptor speaks of cannot be known to be there
    found = dict(served_by(0.0, name, random.Random(1)))
    del found["metadata.json"]
    assert found == truth


@many
@given(st.sampled_from(["x.daf", "x.daf.zip"]), random_numbers, st.sampled_from([0.02, 0.3]))
@pytest.mark.usefixtures("quiet")
def test_a_web_server_with_faults_serves_the_truth_or_an_error(name: str, choose: random.Random, rate: float) -> None:
    for path, found in served_by(rate, name, choose):
        if found is not None:
            fuzzing.check_truth(SEEDS["zstd"], path, found)


def served_by(rate: float, name: str, choose: random.Random) -> list[tuple[str, bytes | None]]:
    files = {**faulty_web.as_web_directory(SEEDS["zstd"]), "x.daf.zip": ARCHIVES["zstd", zipfile.ZIP_STORED]}
    web = faulty_web.Web(files, choose, rate, is_checked=name.endswith(".zip"))
    with faulty_web.reached(web):
        return list(fuzzing.served(f"http://{faulty_web.HOST}/{name}", Spool(), http=faulty_web.SETTINGS))


@many
@given(st.binary(max_size=2000), st.sampled_from(["daf.json", "axes/cell.txt", "vectors/cell/age.zip", "x.daf.zip"]))
@pytest.mark.usefixtures("quiet")
def test_arbitrary_bytes_raise_only_our_errors(tmp_path: Path, data: bytes, path: str) -> None:
    if path == "x.daf.zip":
        source = tmp_path / path
        source.write_bytes(data)
    else:
        source = write_tree(tmp_path / "x.daf", {**SEEDS["zstd"].stored, path: data})
    list(fuzzing.served(source, Spool()))


@pytest.mark.parametrize("eltype", ["Float64", "String"])
@pytest.mark.parametrize("n", [10**8, 2**40, 2**60])
@pytest.mark.parametrize("chunk", [1, 1024, 2**40])
@pytest.mark.parametrize("compression", ["blosc_zstd_bitshuffle", "gzip"])
@pytest.mark.usefixtures("quiet")
def test_a_claim_of_many_or_large_chunks_takes_no_memory(
    eltype: str, n: int, chunk: int, compression: str, tmp_path: Path
) -> None:
    seed = SEEDS[compression]
    packing = {"packed_format": "indexed+zipped", "chunk_shape": [chunk], "compression": compression}
    part = {"format": "dense", "eltype": eltype, "n_elements": n, **packing}
    stored = {
        **seed.stored,
        "vectors/cell/big.json": fuzzing._json({"format": "sparse", "nzind": part, "nzval": part}),
        "vectors/cell/big.nzind.zip": seed.stored["vectors/cell/age.zip"],
        "vectors/cell/big.nzval.zip": seed.stored["vectors/cell/type.zip"],
    }
    source = write_tree(tmp_path / "x.daf", stored)
    found: dict[str, bytes | None] = {}
    assert peak_bytes(lambda: found.update(fuzzing.served(source, Spool()))) < MAX_MEMORY_BYTES
    assert {path: data for path, data in found.items() if "big.n" in path and data} == {}
    assert found["vectors/cell/age.data"] == seed.truth["vectors/cell/age.data"]


def peak_bytes(call: Callable[[], object]) -> int:
    """The most memory that Python and numpy held during a call."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
