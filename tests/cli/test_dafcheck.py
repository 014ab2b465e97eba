"""`dafcheck` as it is typed: what it prints, and its exit code."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from check_archives import sample, write_directory, zip_bytes

DAFCHECK = (sys.executable, "-m", "dafmount.cli.dafcheck")
REPOSITORY = Path(__file__).resolve().parents[2]
LIMIT_S = 60

CLEAN = 0
FAULTS = 1
NOT_READ = 2


def dafcheck(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*DAFCHECK, *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    return write_directory(sample("zstd"), tmp_path / "clean.daf")


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Its second chunk of vectors/cell/age is damaged, and a file is nobody's."""
    files = sample("zstd")
    shard = files["vectors/cell/age.zip"]
    end = int.from_bytes(shard[16:24], "little") + int.from_bytes(shard[24:32], "little")
    files["vectors/cell/age.zip"] = shard[: end - 2] + b"??" + shard[end:]
    files["vectors/cell/lost.data"] = b""
    return write_directory(files, tmp_path / "damaged.daf")


def test_a_clean_source(clean: Path) -> None:
    found = dafcheck(clean)
    assert (found.returncode, found.stdout) == (CLEAN, "")
    assert found.stderr.startswith(f"{clean}: clean (9 properties, ")


def test_a_damaged_source(damaged: Path) -> None:
    found = dafcheck(damaged)
    assert found.returncode == FAULTS
    fault, warning = found.stdout.splitlines()
    assert fault.startswith(f"{damaged}: vectors/cell/age.zip: chunk 1: ")
    assert warning.startswith(f"{damaged}: vectors/cell/lost.data: warning: ")
    assert f"{damaged}: 1 error, 1 warning (" in found.stderr


def test_a_warning_alone_is_no_fault(clean: Path) -> None:
    (clean / "vectors/cell/lost.data").touch()
    found = dafcheck(clean, "--quiet")
    assert found.returncode == CLEAN
    assert "warning" in found.stdout
    assert found.stderr == ""


def test_json(damaged: Path) -> None:
    found = dafcheck(damaged, "--json")
    assert found.returncode == FAULTS
    report = json.loads(found.stdout)
    fault = report["findings"][0]
    assert (fault["archive"], fault["path"], fault["chunk"]) == (str(damaged), "vectors/cell/age.zip", 1)
    assert fault["severity"] == "error"
    assert report["summary"]["errors"] == report["summary"]["warnings"] == 1
    assert report["summary"]["source"] == str(damaged)


def test_at_a_glance_chunks_are_not_read(damaged: Path) -> None:
    assert dafcheck("--quick", damaged).returncode == CLEAN


@pytest.mark.parametrize("jobs", ["1", "3"])
def test_threads(damaged: Path, jobs: str) -> None:
    assert dafcheck("--jobs", jobs, damaged).stdout == dafcheck(damaged).stdout


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        (b"", "an empty file, expected a ZIP archive"),
        (b"text", "not a ZIP archive"),
        (zip_bytes({"a": b""}), "not a Daf"),
        (zip_bytes({"daf.json": b'{"version":[9,0]}'}), "FilesDaf version 9.0"),
    ],
    ids=["missing", "empty", "text", "no Daf", "version 9"],
)
def test_what_cannot_be_read(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "x.daf.zip"
    if content is not None:
        path.write_bytes(content)
    found = dafcheck(path)
    assert (found.returncode, found.stdout) == (NOT_READ, "")
    assert message in found.stderr
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith(f"dafcheck: {path}: ")


@pytest.mark.parametrize("arguments", [(), ("a", "b"), ("--jobs", "0", "a"), ("--jobs", "x", "a"), ("--nope", "a")])
def test_a_command_line_that_makes_no_sense(arguments: tuple[str, ...]) -> None:
    found = dafcheck(*arguments)
    assert found.returncode == NOT_READ
    assert "usage: dafcheck" in found.stderr


def test_a_name_that_no_terminal_can_show(tmp_path: Path) -> None:
    root = write_directory(sample("zstd"), tmp_path / "x.daf")
    (root / os.fsdecode(b"vectors/cell/\xff\n.data")).touch()
    found = dafcheck(root)
    assert found.returncode == CLEAN
    assert len(found.stdout.splitlines()) == 1


def test_a_terminal_shows_how_far_it_is(corpus: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*DAFCHECK, corpus / "dafr" / "flat.daf.zip"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while block := read_terminal(ours):
            shown += block
        assert process.wait(LIMIT_S) == CLEAN
    os.close(ours)
    assert shown.endswith(b"read)\r\n")
    assert b"\r\x1b[K" in shown or b"clean" in shown


def read_terminal(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 4096)
    except OSError:  # the other end was closed
        return b""


def test_without_a_terminal_there_is_no_progress(corpus: Path) -> None:
    assert "\r" not in dafcheck(corpus / "dafr" / "flat.daf.zip").stderr


def test_help_tells_every_exit_code() -> None:
    text = dafcheck("--help").stdout
    assert all(f"\n  {code}  " in text for code in (CLEAN, FAULTS, NOT_READ))
    assert "--quick" in text
