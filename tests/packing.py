"""What the tests of packing share: running it, and looking at what it wrote. Imported by tests; owns no fixtures."""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from dafmount.pack.packer import Order, pack
from dafmount.pack.plan import Plan
from dafmount.pack.settings import Selection, make_settings
from mounts import LIMIT_S

DAFPACK = (sys.executable, "-m", "dafmount.cli.dafpack")
EVERYTHING = Selection()
INDEXES = {"metadata.json", "metadata.zip"}
"""What the packages make anew: dafr has one at the root and one for the axes."""


class Silent:
    """A listener that remembers what it was told."""

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.size = 0
        self.is_committing = False

    def planned(self, plan: Plan) -> None:
        self.plan = plan

    def advanced(self, size: int) -> None:
        self.size += size

    def committing(self) -> None:
        self.is_committing = True


def run_pack(
    source: Path | str,
    destination: Path | str,
    compression: str | None = None,
    *,
    target_kb: int | None = None,
    level: int | None = None,
    selection: Selection = EVERYTHING,
    jobs: int = 1,
    overwrite: bool = False,
) -> Silent:
    """Packs in this process."""
    settings = make_settings({}, target_kb, compression, level)
    return _run(Order(str(source), str(destination), settings, selection, jobs, overwrite))


def run_unpack(source: Path | str, destination: Path | str) -> Silent:
    """Unpacks in this process."""
    return _run(Order(str(source), str(destination), None, EVERYTHING))


def _run(order: Order) -> Silent:
    listener = Silent()
    pack(order, listener)
    assert listener.plan is not None
    assert listener.size - listener.plan.size in (0, 1)  # a text may lack its last newline
    return listener


def run_dafpack(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end."""
    return subprocess.run(
        [*DAFPACK, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT_S,
        env=os.environ | (environment or {}),
    )


def files(place: Path) -> Iterator[str]:
    """Relative paths of all files but the indexes."""
    for path in sorted(place.rglob("*")):
        if path.is_file() and path.name not in INDEXES:
            yield str(path.relative_to(place))


def assert_same_files(one: Path, other: Path) -> None:
    """The same files with the same bytes, the indexes aside."""
    assert list(files(one)) == list(files(other))
    _, different, unreadable = filecmp.cmpfiles(one, other, list(files(one)), shallow=False)
    assert not different
    assert not unreadable


def assert_same_trees(one: Path, other: Path) -> None:
    """The very same files and directories."""
    found = subprocess.run(["diff", "-r", one, other], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def remains(place: Path) -> list[Path]:
    """Temporary files and directories."""
    return [path for path in place.iterdir() if path.name.startswith(".")]
