"""What a mount tells of itself and of its files, as getfattr, ls, numpy, `dafmount --list` and `--status` see it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mounts import LIMIT_S, Mounted, run_dafmount, servers, wait_until, write_daf

pytestmark = pytest.mark.fuse

NO_MOUNT = 8

MAP_BY_ATTRIBUTES = """
import json, os, sys
import numpy
for path in sys.argv[1:]:
    told = {name: os.getxattr(path, "user.daf." + name).decode() for name in ("dtype", "shape", "order")}
    shape = tuple(json.loads(told["shape"]))
    values = numpy.memmap(path, dtype=told["dtype"], mode="r", shape=shape, order=told["order"])
    print(json.dumps([str(values.dtype), values.shape, values.tolist()]))
"""


def getfattr(path: Path) -> dict[str, str]:
    done = subprocess.run(
        ["getfattr", "--absolute-names", "-d", path], capture_output=True, text=True, check=True, timeout=LIMIT_S
    )
    lines = [line.partition("=") for line in done.stdout.splitlines() if "=" in line]
    return {name: value[1:-1].replace('\\"', '"') for name, _, value in lines}


def status(place: Path) -> dict[str, Any]:
    done = run_dafmount("--status", place, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def listed(place: Path) -> tuple[str, dict[str, Any]]:
    """The line and the JSON object that `--list` gives for a mount point."""
    table, as_json = run_dafmount("--list"), run_dafmount("--list", "--json")
    assert (table.returncode, table.stderr, as_json.returncode, as_json.stderr) == (0, "", 0, "")
    (line,) = [line for line in table.stdout.splitlines() if line.startswith(f"{place} ")]
    (found,) = [found for found in json.loads(as_json.stdout) if found["mountpoint"] == str(place)]
    return line, found


@pytest.fixture
def background(daf: Path, mountpoint: Path) -> Iterator[Path]:
    """A mount in the background that is not waited for at the end."""
    done = run_dafmount(daf, mountpoint)
    assert (done.returncode, done.stderr) == (0, "")
    yield mountpoint
    for server in servers(mountpoint):
        os.kill(server, signal.SIGKILL)


# ---------------------------------------------------------------------------------------------------------------------
# Attributes of files


def test_numpy_maps_any_file_of_numbers_by_its_attributes_alone(made: Path, mounted: Mounted) -> None:
    names = (
        "matrices/cell/gene/counts.data",
        "matrices/gene/cell/counts.data",
        "matrices/gene/gene/near.data",
        "matrices/cell/gene/UMIs.colptr",
        "matrices/cell/gene/UMIs.nzval",
        "vectors/cell/is_odd.data",
        "vectors/gene/is_marker.nzind",
    )
    seen = []
    for source in ("flat.daf", "packed.daf.zip"):
        with mounted(made / source) as place:
            command = [sys.executable, "-c", MAP_BY_ATTRIBUTES, *(str(place / name) for name in names)]
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
            seen.append(dict(zip(names, map(json.loads, done.stdout.splitlines()), strict=True)))
    assert seen[0] == seen[1]
    dtype, shape, values = seen[0]["matrices/cell/gene/counts.data"]
    assert (dtype, shape) == ("int16", [20_011, 37])
    # As it was made: a gene's cells side by side, numbered through, modulo 251.
    assert [row[3] for row in values[:500]] == [(3 * 20_011 + cell) % 251 for cell in range(500)]
    assert seen[0]["vectors/cell/is_odd.data"][2][:4] == [False, True, False, True]


def test_getfattr_shows_what_a_packed_file_is(made: Path, mounted: Mounted) -> None:
    with mounted(made / "packed.daf.zip") as place:
        found = getfattr(place / "matrices" / "cell" / "gene" / "fraction.data")
        text = getfattr(place / "vectors" / "cell" / "label.txt")
        assert getfattr(place / "axes" / "cell.txt") == {}
        assert getfattr(place / "vectors") == {}
    shard = made / "packed.daf" / "matrices" / "cell" / "gene" / "fraction.zip"
    assert found == {
        "user.daf.eltype": "Float32",
        "user.daf.dtype": "<f4",
        "user.daf.shape": "[20011,37]",
        "user.daf.order": "F",
        "user.daf.layout": "dense",
        "user.daf.compression": "blosc_zstd_bitshuffle",
        "user.daf.chunk_shape": "[3000,4]",
        "user.daf.stored_bytes": str(shard.stat().st_size),
    }
    assert "user.daf.dtype" not in text
    assert text["user.daf.eltype"] == "String"


def test_ls_asks_for_the_attributes_of_no_more_than_a_few_of_many_files(tmp_path: Path, mounted: Mounted) -> None:
    n_files = 1000
    source = write_daf(tmp_path / "many.daf")
    for number in range(n_files):
        (source / "vectors" / "cell" / f"v{number}.json").write_text('{"format":"dense","eltype":"UInt8"}\n')
        (source / "vectors" / "cell" / f"v{number}.data").write_bytes(b"abc")
    with mounted(source) as place:
        before = status(place)["requests"]
        command = ["ls", "-l", place / "vectors" / "cell"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S)
        assert done.stdout.count(b"\n") == 1 + 2 * (n_files + 1)
        after = status(place)["requests"]
    # Asking for the status takes a few as well.
    assert after["getxattr"] - before.get("getxattr", 0) < 20


def test_attributes_cannot_be_changed(daf: Path, mounted: Mounted) -> None:
    with mounted(daf) as place:
        file = place / "vectors" / "cell" / "age.data"
        for change in (
            lambda: os.setxattr(file, "user.daf.eltype", b"x"),
            lambda: os.removexattr(file, "user.daf.eltype"),
            lambda: os.setxattr(place, "user.dafmount.pid", b"1"),
        ):
            with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
                change()
        with pytest.raises(OSError, match=os.strerror(errno.ENODATA)):
            os.getxattr(file, "user.other")
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            os.getxattr(file, "trusted.other")


# ---------------------------------------------------------------------------------------------------------------------
# The mount


def test_the_root_shows_the_same_numbers_as_status(background: Path, daf: Path) -> None:
    found = getfattr(background)
    told = status(background)
    assert found["user.dafmount.source"] == told["source"] == str(daf)
    assert found["user.dafmount.mountpoint"] == told["mountpoint"] == str(background)
    assert [int(found["user.dafmount.pid"])] == [told["pid"]] == servers(background)
    assert found["user.dafmount.started"] == told["started"]
    assert json.loads(found["user.dafmount.statistics"]).keys() == told.keys()
    assert {name.removeprefix("user.dafmount.") for name in found} == told.keys() | {"statistics"}


def test_what_is_read_is_counted(made: Path, mounted: Mounted) -> None:
    with mounted(made / "packed.daf.zip") as place:
        before = status(place)
        data = (place / "matrices" / "cell" / "gene" / "fraction.data").read_bytes()
        after = status(place)
    assert before["bytes_served"] == before["chunks_decoded"] == 0
    assert after["bytes_served"] == len(data) == 20_011 * 37 * 4
    assert after["chunks_decoded"] == 7 * 10
    assert after["requests"]["read"] > 0
    assert after["requests"]["open"] == 1
    shard_bytes = (made / "packed.daf" / "matrices" / "cell" / "gene" / "fraction.zip").stat().st_size
    assert after["bytes_fetched"] - before["bytes_fetched"] >= shard_bytes * 0.9
    assert after["requests_fetched"] > before["requests_fetched"]
    assert after["cache_misses"] > 0
    assert 0 < after["cache_bytes"] <= after["cache_limit_bytes"]
    assert (after["errors"], after["retries"]) == ({}, 0)
    assert list(after["latency_us"]["read"]) == ["p50", "p90", "p99", "longest"]
    assert after["memory_bytes"] > 1 << 20


def test_a_small_cache_evicts(made: Path, mounted: Mounted) -> None:
    with mounted(made / "packed.daf.zip", "-o", "cache=256K") as place:
        (place / "matrices" / "cell" / "gene" / "fraction.data").read_bytes()
        found = status(place)
    assert found["cache_evictions"] > 0
    assert found["cache_bytes"] <= found["cache_limit_bytes"] == 256 << 10


def test_errors_are_counted(daf: Path, mounted: Mounted) -> None:
    (daf / "vectors" / "cell" / "age.json").write_text("{")
    with mounted(daf, "-o", "layout=1.0", expect_log=["age.json.*JSON"]) as place:
        for _ in range(2):
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                (place / "vectors" / "cell" / "age.json").read_bytes()
        assert status(place)["errors"] == {"EIO": 2}


def test_the_text_says_what_the_numbers_mean(background: Path, daf: Path) -> None:
    (background / "axes" / "cell.txt").read_bytes()
    done = run_dafmount("--status", background / "axes")
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(line.split(":", 1) for line in done.stdout.splitlines())
    assert lines["source"].strip() == str(daf)
    assert lines["mounted at"].strip() == str(background)
    assert "read 1" in lines["requests"]
    assert lines["bytes served"].split()[0] == "6"
    assert "retries" in lines["fetched"]
    assert lines["errors"].strip() == "none"
    assert "p99" in lines["time of read"]


def test_list_shows_a_living_mount(background: Path, daf: Path) -> None:
    (background / "axes" / "cell.txt").read_bytes()
    line, found = listed(background)
    assert line.split()[1] == str(daf)
    assert "MiB" in line
    assert found["requests"]["read"] == 1
    assert found["pid"] == servers(background)[0]


def test_names_with_blanks_and_line_ends_are_shown_on_one_line(tmp_path: Path) -> None:
    source, place = write_daf(tmp_path / "a b\\040.daf"), tmp_path / "two\nlines\x1b[1m"
    place.mkdir()
    assert run_dafmount(source, place).returncode == 0
    try:
        found = json.loads(run_dafmount("--list", "--json").stdout)
        assert (str(place), str(source)) in {(one["mountpoint"], one["source"]) for one in found}
        table = run_dafmount("--list").stdout
        assert "two\\nlines\\x1b[1m" in table
        assert "\x1b" not in table
    finally:
        assert run_dafmount("--unmount", place).returncode == 0


# ---------------------------------------------------------------------------------------------------------------------
# Mounts that cannot answer


def check_line(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert (done.returncode, done.stdout) == (NO_MOUNT, "")
    assert done.stderr.count("\n") == 1
    assert [word for word in words if word not in done.stderr] == [], done.stderr


def test_a_dead_mount_is_listed_as_dead(background: Path) -> None:
    os.kill(servers(background)[0], signal.SIGKILL)
    wait_until(lambda: servers(background) == [], "dying")
    line, found = listed(background)
    assert "dead" in line
    assert "dead" in found["problem"]
    check_line(run_dafmount("--status", background), str(background), "dead")


@contextmanager
def stopped(place: Path) -> Iterator[None]:
    (server,) = servers(place)
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


def test_a_mount_that_hangs_holds_up_nobody(background: Path, daf: Path) -> None:
    with stopped(background):
        line, found = listed(background)
        assert "no answer" in line
        assert "no answer" in found["problem"]
        check_line(run_dafmount("--status", background), str(background), "no answer")
        check_line(run_dafmount(daf, background), str(background), "not answered")
    assert status(background)["source"] == str(daf)


def test_status_of_what_is_no_dafmount_says_so(tmp_path: Path) -> None:
    check_line(run_dafmount("--status", tmp_path), str(tmp_path), "no dafmount is mounted here")
    check_line(run_dafmount("--status", "/proc"), "/proc", "no dafmount")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--json"],
        ["--list", "--status", "x"],
        ["--list", "x"],
        ["--status", "x", "--unmount", "y"],
        ["--status", "x", "y"],
        ["a", "b", "--json"],
    ],
    ids=" ".join,
)
def test_questions_stand_alone(arguments: list[str]) -> None:
    done = run_dafmount(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
