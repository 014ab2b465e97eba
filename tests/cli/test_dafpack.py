"""The command as people and Makefiles use it: exit codes, messages, signals, kills, progress, memory."""

from __future__ import annotations

import fcntl
import os
import pty
import random
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mounts import LIMIT_S, wait_until
from packing import DAFPACK, assert_same_trees, remains, run_dafpack, run_pack, run_unpack

MIB = 1 << 20
DESTINATIONS = ("x.daf", "x.daf.zip", "x.dafs.zip#/new", "y.dafs.zip#/new")
"""The last one is an archive that does not exist before."""


def make_matrix(place: Path, n_bytes: int, write: Callable[[Path, int], None]) -> Path:
    """A data set of one matrix of UInt32."""
    n_rows = 1 << 15
    n_columns = n_bytes // (4 * n_rows)
    for folder in ("axes", "scalars", "vectors/cell", "vectors/gene", "matrices/cell/gene"):
        (place / folder).mkdir(parents=True)
    (place / "daf.json").write_bytes(b'{"version":[1,1]}\n')
    (place / "axes/cell.txt").write_text("".join(f"c{n}\n" for n in range(n_rows)))
    (place / "axes/gene.txt").write_text("".join(f"g{n}\n" for n in range(n_columns)))
    (place / "matrices/cell/gene/m.json").write_bytes(b'{"format":"dense","eltype":"UInt32"}\n')
    write(place / "matrices/cell/gene/m.data", n_bytes)
    return place


def write_zeros(path: Path, n_bytes: int) -> None:
    with path.open("wb") as stream:
        stream.truncate(n_bytes)


def write_counts(path: Path, n_bytes: int) -> None:
    column = np.random.default_rng(1).poisson(3, MIB // 4).astype("<u4").tobytes()
    path.write_bytes(column * (n_bytes // MIB))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes a second or so to pack."""
    return make_matrix(tmp_path_factory.mktemp("large") / "large.daf", 48 * MIB, write_counts)


@pytest.fixture
def place(tmp_path: Path, corpus: Path) -> Path:
    """Where destinations go; an archive with a group is there already."""
    run_pack(corpus / "julia" / "jf11", f"{tmp_path}/x.dafs.zip#/old")
    (tmp_path / "empty").mkdir()
    return tmp_path


def contents(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--compression", "lzma", "SOURCE", "x.daf"), 2, "unknown compression 'lzma', expected one of blosc_zstd"),
        (("--compression-level", "0", "SOURCE", "x.daf"), 2, "level 0, expected 1 to 9"),
        (("--compression", "zstd", "--compression-level", "23", "SOURCE", "x.daf"), 2, "expected 1 to 22"),
        (("--target-chunk-kb", "0", "SOURCE", "x.daf"), 2, "expected 1 to"),
        (("--jobs", "0", "SOURCE", "x.daf"), 2, "--jobs 0"),
        (("--unpack", "--compression", "zstd", "SOURCE", "x.daf"), 2, "--unpack"),
        (("--include", "vectors/cells/*", "SOURCE", "x.daf"), 2, "'vectors/cells/*' matches no property"),
        (("SOURCE", "x.dafs.zip"), 2, "which group"),
        (("missing.daf", "x.daf"), 3, "missing.daf: no such file"),
        (("SOURCE", "missing/x.daf"), 3, "no such directory"),
        ((".", "x.daf"), 2, "a folder of data sets; choose one"),
        (("empty", "x.daf"), 4, "not a Daf"),
        (("x.dafs.zip#/g", "x.daf"), 6, "it has old"),
        (("SOURCE", "x.dafs.zip#/old"), 11, "exists already"),
        (("SOURCE", "SOURCE"), 11, "--overwrite"),
    ],
)
def test_what_cannot_be_done_costs_one_line_and_has_a_code(
    place: Path, corpus: Path, arguments: tuple[str, ...], code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    before = contents(place)
    source = str(corpus / "julia" / "jf11")
    found = run_dafpack(*(source if argument == "SOURCE" else argument for argument in arguments))
    assert (found.returncode, found.stdout) == (code, "")
    assert says in found.stderr
    assert found.stderr.count("\n") == 1
    assert found.stderr.startswith("dafpack: ")
    assert contents(place) == before
    assert remains(place) == []


def test_the_help_tells_codes_and_variables() -> None:
    found = run_dafpack("--help")
    assert found.returncode == 0
    for word in ("DAF_PACKED_TARGET_CHUNK_KB", "--overwrite", "x.dafs.zip#/group", "11  the destination exists"):
        assert word in found.stdout


def test_options_and_variables_reach_the_shards(place: Path, corpus: Path) -> None:
    source = corpus / "dafr" / "small-flat.daf"
    variables = {"DAF_PACKED_COMPRESSION": "gzip", "DAF_PACKED_COMPRESSION_LEVEL": "7"}
    variables["DAF_PACKED_TARGET_CHUNK_KB"] = "2"
    assert run_dafpack(source, place / "a.daf", environment=variables).returncode == 0
    options = ("--compression", "gzip", "--compression-level", "7", "--target-chunk-kb", "2")
    assert run_dafpack(*options, source, place / "b.daf").returncode == 0
    assert_same_trees(place / "a.daf", place / "b.daf")
    descriptor = (place / "a.daf/vectors/cell/f64.json").read_text()
    assert '"chunk_shape":[256],"compression":"gzip","compression_level":7' in descriptor


def test_unpack_include_and_exclude(place: Path, corpus: Path) -> None:
    arguments = ("--unpack", "--include", "matrices/*", "--exclude", "*/gene/cell/*", "-j", "2")
    found = run_dafpack(*arguments, corpus / "dafr" / "gzip.dafs.zip#/one", place / "a.daf")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")
    written = sorted(str(path.relative_to(place / "a.daf")) for path in (place / "a.daf").rglob("*.json"))
    assert written == [
        "daf.json",
        "matrices/cell/gene/dense.json",
        "matrices/cell/gene/sparse.json",
        "metadata.json",
    ]


def on_a_terminal(*arguments: str | Path) -> str:
    """What the command writes to a terminal that is its standard error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    server = subprocess.Popen([*DAFPACK, *arguments], stdin=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    parts = []
    with suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            parts.append(part)
    os.close(ours)
    assert server.wait(LIMIT_S) == 0
    return b"".join(parts).decode()


def test_progress_is_shown_on_a_terminal_and_nowhere_else(large: Path, place: Path) -> None:
    shown = on_a_terminal(large, place / "a.daf")
    assert "100%" in shown
    assert "48." in shown  # mebibytes, and the axes
    assert "B/s" in shown
    assert on_a_terminal("--quiet", large, place / "b.daf") == ""
    found = run_dafpack(large, place / "c.daf")
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_what_is_left_out_is_said_unless_quiet(place: Path, corpus: Path) -> None:
    run_unpack(corpus / "julia" / "jf11", place / "s.daf")
    (place / "s.daf" / "README").write_text("mine")
    found = run_dafpack(place / "s.daf", place / "a.daf")
    assert found.stderr == "dafpack: left out, as no part of the data set: 'README'\n"
    assert run_dafpack("-q", place / "s.daf", place / "b.daf").stderr == ""


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*DAFPACK, *map(str, arguments)], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def written_bytes(process: subprocess.Popen[str]) -> int:
    """How much a process has handed to `write` and its kin so far."""
    try:
        counts = Path(f"/proc/{process.pid}/io").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 1 << 60
    return int(next(line.split()[1] for line in counts.splitlines() if line.startswith("wchar")))


def wait_for_bytes(process: subprocess.Popen[str], n_bytes: int) -> None:
    wait_until(lambda: process.poll() is not None or written_bytes(process) >= n_bytes, "writing")


@pytest.mark.parametrize("name", DESTINATIONS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_takes_everything_back(large: Path, place: Path, name: str, number: signal.Signals) -> None:
    before = contents(place)
    process = start("-j", "2", large, f"{place}/{name}")
    wait_for_bytes(process, 2 * MIB)
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, errors) == (128 + number, "dafpack: stopped; nothing was written\n")
    assert contents(place) == before
    assert remains(place) == []


def test_a_limit_on_the_size_of_files_is_no_room(large: Path, place: Path) -> None:
    limit = ["prlimit", f"--fsize={MIB}", "--"]
    for name in DESTINATIONS:
        found = subprocess.run(
            [*limit, *DAFPACK, large, f"{place}/{name}"], capture_output=True, text=True, check=False, timeout=LIMIT_S
        )
        assert found.returncode == 12, found.stderr
        assert found.stderr.endswith("File too large; nothing was written\n")
        assert remains(place) == []


@pytest.fixture(scope="module")
def expected(large: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The large data set as it comes back."""
    place = tmp_path_factory.mktemp("expected") / "x.daf"
    run_unpack(large, place)
    return place


def kills(name: str) -> Iterator[int]:
    """After how many written bytes to kill: anywhere, but more often near the end, where things are renamed."""
    numbers = random.Random(name)
    for n in range(5):
        yield int(6.5 * MIB * numbers.random()) if n % 2 else int((6 + 7 * ("x.dafs" in name)) * MIB * numbers.random())


@pytest.mark.parametrize(
    ("name", "overwrite"), [*((name, False) for name in DESTINATIONS), ("x.daf", True), ("x.daf.zip", True)]
)
def test_a_kill_leaves_the_old_or_the_new(
    large: Path, expected: Path, place: Path, corpus: Path, name: str, overwrite: bool
) -> None:
    old = corpus / "julia" / "jf11"
    run_unpack(old, place / "old")
    target = f"{place}/{name}"
    if overwrite:
        run_pack(old, target)
    options = ["--overwrite"] if overwrite else []
    for n_bytes in kills(name):
        process = start(*options, large, target)
        wait_for_bytes(process, n_bytes)
        process.kill()
        process.communicate()
        run_unpack(f"{place}/x.dafs.zip#/old", place / "again")
        assert_same_trees(place / "again", place / "old")
        found = run_dafpack("--unpack", target, place / "found")
        if found.returncode == 0:
            is_old = (place / "found/scalars/title.json").exists()
            assert is_old <= overwrite
            assert_same_trees(place / "found", place / "old" if is_old else expected)
        else:
            assert found.returncode in (3, 6), found.stderr  # there is none of that name
            assert not overwrite
        for left in ("again", "found"):
            subprocess.run(["rm", "-rf", place / left], check=True)
        if found.returncode == 0 and "#" in name:
            break  # it was faster than the kill
        if found.returncode == 0 and not overwrite:
            subprocess.run(["rm", "-rf", target], check=True)


def test_memory_does_not_grow_with_the_matrix(tmp_path: Path) -> None:
    """512 MiB here; 2 GiB, tried by hand, take as much."""
    source = make_matrix(tmp_path / "zeros.daf", 512 * MIB, write_zeros)
    # The peak of the process itself: what wait4() tells may be the peak of the one that started it.
    program = (
        "import sys; from dafmount.cli.dafpack import main; code = main(); "
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM'))); sys.exit(code)"
    )
    for name in ("x.daf", "x.daf.zip"):
        command = [sys.executable, "-c", program, "-j", "2", source, tmp_path / name]
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=2 * LIMIT_S)
        assert 0 < int(found.stdout) < 150 * 1024  # KiB
