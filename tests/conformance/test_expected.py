"""Mounts of archives that dafr and DataAxesFormats.jl wrote show what those programs would have written flat."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zarr

from mounts import Mounted

pytestmark = pytest.mark.fuse

CODECS = ("blosc_lz4_bitshuffle", "blosc_zstd_bitshuffle", "gzip", "zstd")
GROUPS = ("one", "two/nested")
DAFR = tuple(f"dafr/{codec}.{kind}" for codec in CODECS for kind in ("daf", "daf.zip", "dafs.zip"))
JULIA = tuple(f"julia/fpk/{codec}.files" for codec in ("bl", "bz", "gz", "zs"))
ITEMSIZE = {"Bool": 1} | {f"{sign}Int{bits}": bits // 8 for sign in ("", "U") for bits in (8, 16, 32, 64)}
ITEMSIZE |= {"Float32": 4, "Float64": 8}


class Expected(NamedTuple):
    """One line of a list of what a mount must show."""

    sha256: str
    size: int
    path: str


class Shown(NamedTuple):
    """A mounted archive, by its name in the corpus."""

    name: str
    place: Path


def read_expected(corpus: Path) -> Iterator[Expected]:
    for name in ("expected-sha256.txt", "expected-descriptors.txt"):
        for line in (corpus / name).read_text().splitlines():
            sha256, size, path = line.split(maxsplit=2)
            yield Expected(sha256, int(size), path)


@pytest.fixture(scope="module", params=DAFR + JULIA)
def shown(request: pytest.FixtureRequest, corpus: Path, mounted: Mounted) -> Iterator[Shown]:
    with mounted(corpus / request.param) as place:
        yield Shown(request.param, place)


def roots(place: Path) -> list[Path]:
    """The data sets of a mount: itself, or the groups of a `.dafs.zip`."""
    return sorted(path.parent for path in place.rglob("daf.json"))


# ---------------------------------------------------------------------------------------------------------------------
# The lists


def test_the_lists_name_only_archives_that_are_mounted_here(corpus: Path) -> None:
    paths = [line.path for line in read_expected(corpus)]
    assert len(paths) == 500
    assert [path for path in paths if not path.startswith(tuple(f"{name}/" for name in DAFR + JULIA))] == []


def test_every_listed_file_has_the_listed_size_and_bytes(shown: Shown, corpus: Path) -> None:
    lines = [line for line in read_expected(corpus) if line.path.startswith(f"{shown.name}/")]
    assert lines
    wrong = []
    for line in lines:
        path = shown.place / line.path.removeprefix(f"{shown.name}/")
        size = path.stat().st_size  # asked before anything was read
        if (sha256_of(path), size) != (line.sha256, line.size):
            wrong.append(f"{line.path}: {size} bytes, expected {line.size}, or other content")
    assert wrong == []


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("group", GROUPS)
def test_a_group_mounted_alone_is_the_flat_tree_and_as_listed(
    codec: str, group: str, corpus: Path, mounted: Mounted
) -> None:
    archive = f"dafr/{codec}.dafs.zip"
    twin = {"one": "small-flat.daf", "two/nested": "small2-flat.daf"}[group]
    with mounted(f"{corpus / archive}#/{group}") as place:
        lines = [line for line in read_expected(corpus) if line.path.startswith(f"{archive}/{group}/")]
        assert lines
        assert [
            line.path
            for line in lines
            if sha256_of(place / line.path.removeprefix(f"{archive}/{group}/")) != line.sha256
        ] == []
        assert unexplained_differences(corpus / "dafr" / twin, place) == []


# ---------------------------------------------------------------------------------------------------------------------
# The whole tree


def unexplained_differences(flat: Path, place: Path) -> list[str]:
    """What `diff -r` finds, less what a mount adds: metadata.json, and the directories that git and ZIP files lose.

    Two files are dafr's own and passed through where they are: `metadata.zip` repeats the descriptors, packed ones as
    packed, and `axes/metadata.json` is written into directories only.
    """
    found = subprocess.run(
        ["diff", "--recursive", "--brief", "--no-dereference", flat, place],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )
    assert found.returncode < 2
    made_up = {f"Only in {place}: metadata.json"}
    for directory, names, files in os.walk(place):
        made_up |= {f"Only in {directory}: {name}" for name in names if is_hollow(Path(directory) / name)}
        assert files or names or is_hollow(Path(directory))
    of_dafr = {
        f"Files {flat}/metadata.zip and {place}/metadata.zip differ",
        f"Only in {flat}: metadata.zip",
        f"Only in {flat}/axes: metadata.json",
    }
    return [line for line in found.stdout.splitlines() if line not in made_up | of_dafr]


def is_hollow(directory: Path) -> bool:
    """Whether there is no file below."""
    return not any(files for _, _, files in os.walk(directory))


@pytest.mark.parametrize("shown", DAFR, indirect=True)
def test_diff_finds_nothing_between_a_mounted_archive_and_its_flat_twin(shown: Shown, corpus: Path) -> None:
    twins = {"": "flat.daf"}
    if shown.name.endswith(".dafs.zip"):
        twins = {"one": "small-flat.daf", "two/nested": "small2-flat.daf"}
    assert roots(shown.place) == [shown.place / group for group in twins]
    for group, twin in twins.items():
        assert unexplained_differences(corpus / "dafr" / twin, shown.place / group) == []


@pytest.mark.parametrize("kind", ["daf", "daf.zip"])
def test_a_flat_data_set_is_shown_as_it_is(kind: str, corpus: Path, mounted: Mounted) -> None:
    with mounted(corpus / "dafr" / f"flat.{kind}") as place:
        assert unexplained_differences(corpus / "dafr" / "flat.daf", place) == []


@pytest.mark.parametrize("name", ["julia-filesdaf", "example-daf"])
def test_a_tree_of_version_1_0_is_itself_when_shown_in_that_layout(name: str, corpus: Path, mounted: Mounted) -> None:
    with mounted(corpus / "julia" / name, "-o", "layout=1.0") as place:
        assert unexplained_differences(corpus / "julia" / name, place) == []


@pytest.mark.parametrize("name", ["julia-filesdaf", "example-daf", "jf11"])
def test_a_flat_tree_of_either_version_is_shown_as_1_1(name: str, corpus: Path, mounted: Mounted) -> None:
    source = corpus / "julia" / name
    with mounted(source) as place:
        assert json.loads((place / "daf.json").read_text()) == {"version": [1, 1]}
        for path in source.rglob("*"):
            if path.is_file() and path.suffix != ".json":
                assert (place / path.relative_to(source)).read_bytes() == path.read_bytes()
        assert false_descriptors(place) == []


def test_every_axis_has_its_directories(shown: Shown) -> None:
    for root in roots(shown.place):
        axes = sorted(path.stem for path in root.glob("axes/*.txt"))
        assert axes
        assert sorted(os.listdir(root / "vectors")) == axes
        assert sorted(os.listdir(root / "matrices")) == axes
        for rows in axes:
            assert sorted(os.listdir(root / "matrices" / rows)) == axes


# ---------------------------------------------------------------------------------------------------------------------
# metadata.json and the descriptors


def test_metadata_json_is_one_line_that_holds_each_descriptor_once(shown: Shown) -> None:
    for root in roots(shown.place):
        text = (root / "metadata.json").read_bytes().decode()
        assert "\n" not in text
        pairs: list[tuple[str, Any]] = json.loads(text, object_pairs_hook=lambda pairs: pairs)
        assert len(dict(pairs)) == len(pairs)
        metadata = json.loads(text)
        found = {
            str(path.relative_to(root).with_suffix("")): json.loads(path.read_text())
            for pattern in ("scalars/*.json", "vectors/*/*.json", "matrices/*/*/*.json")
            for path in root.glob(pattern)
        }
        for path in root.glob("axes/*.txt"):
            found[f"axes/{path.stem}"] = {"format": "axis", "n_entries": count_lines(path)}
        assert metadata == found


def test_descriptors_tell_the_true_size_of_their_payload(shown: Shown) -> None:
    for root in roots(shown.place):
        assert json.loads((root / "daf.json").read_text()) == {"version": [1, 1]}
        assert false_descriptors(root) == []


def false_descriptors(root: Path) -> list[str]:
    """The payloads of a flat 1.1 tree whose size is not what descriptor and axes promise."""
    n_entries = {path.stem: count_lines(path) for path in root.glob("axes/*.txt")}
    wrong = []
    for path in [*root.glob("vectors/*/*.json"), *root.glob("matrices/*/*/*.json")]:
        descriptor = json.loads(path.read_text())
        if descriptor["format"] == "sparse":
            parts = {
                f".{name}": (part, part["n_elements"]) for name, part in descriptor.items() if isinstance(part, dict)
            }
        else:
            n_elements = 1
            for axis in path.relative_to(root).parts[1:-1]:
                n_elements *= n_entries[axis]
            parts = {"": (descriptor, n_elements)}
        for suffix, (part, n_elements) in parts.items():
            payload = path.with_name(path.stem + payload_suffix(suffix, part["eltype"]))
            if part["eltype"] == "String":
                right = count_lines(payload) == n_elements
            else:
                right = payload.stat().st_size == n_elements * ITEMSIZE[part["eltype"]]
            if not right:
                wrong.append(str(payload.relative_to(root)))
    return wrong


def payload_suffix(component: str, eltype: str) -> str:
    if eltype == "String":
        return {"": ".txt", ".nzval": ".nztxt"}[component]
    return component or ".data"


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


# ---------------------------------------------------------------------------------------------------------------------
# The same content as Zarr


@pytest.mark.parametrize("codec", ["bl", "bz", "gz", "zs"])
def test_the_mount_holds_what_zarr_reads_from_the_zarr_twin(
    codec: str, corpus: Path, mounted: Mounted, tmp_path: Path
) -> None:
    twin = tmp_path / "twin"
    shutil.copytree(corpus / "julia" / "zpk" / f"{codec}.daf.zarr", twin, copy_function=shutil.copyfile)
    compared = 0
    with mounted(corpus / "julia" / "fpk" / f"{codec}.files") as place:
        for described in sorted(twin.rglob("zarr.json")):
            array = read_zarr(described)
            path = described.parent.relative_to(twin)
            if array is None or path.parts[0] == "scalars":  # the two were given scalars of their own
                continue
            if path.name in ("colptr", "rowval", "nzval", "nzind"):
                path = path.parent.with_name(f"{path.parent.name}.{path.name}")
            elif array.dtype.kind in "TO":
                path = path.with_name(f"{path.name}.txt")
            else:
                path = path.with_name(f"{path.name}.data")
            assert (place / path).read_bytes() == flat_bytes(array), path
            compared += 1
    assert compared == 12


def read_zarr(described: Path) -> Any:
    """The array that a `zarr.json` describes, None for a group's.

    zarr-python refuses shards that are no whole number of chunks, which Daf writes: the shape of the shard, which is
    all there is, may as well be rounded up.
    """
    metadata = json.loads(described.read_text())
    if metadata["node_type"] != "array":
        return None
    codec = metadata["codecs"][0]
    if codec["name"] == "sharding_indexed":
        shard = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        chunk = codec["configuration"]["chunk_shape"]
        shard[:] = [-(-outer // inner) * inner for outer, inner in zip(shard, chunk, strict=True)]
        described.chmod(0o644)
        described.write_text(json.dumps(metadata))
    return zarr.open_array(str(described.parent), mode="r")[...]


def flat_bytes(array: Any) -> bytes:
    """Zarr's twin has the dimensions reversed, so that its C order is Daf's column-major one."""
    if array.dtype.kind in "TO":
        return "".join(f"{value}\n" for value in array).encode()
    data: bytes = array.tobytes()
    return data
