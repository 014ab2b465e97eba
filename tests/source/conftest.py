"""What the tests of byte sources share: a spool, and archives as Python's zipfile writes them."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dafmount.source.local import LocalFile
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive

OpenZip = Callable[..., ZipArchive]
WriteZip = Callable[..., Path]


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    place = tmp_path / "spool"
    place.mkdir()
    return Spool(place)


@pytest.fixture
def open_zip(spool: Spool) -> Iterator[OpenZip]:
    """Opens a path as a ZipArchive, and closes it after the test."""
    opened: list[ZipArchive] = []

    def open_path(path: Path, verify: str = "auto", into: Spool | None = None) -> ZipArchive:
        file = LocalFile(path, path.name)
        opened.append(ZipArchive(file, path.name, file.mtime_ns, into or spool, verify=verify))
        return opened[-1]

    yield open_path
    for archive in opened:
        archive.close()


@pytest.fixture
def write_zip(tmp_path: Path) -> WriteZip:
    """Writes `(name or ZipInfo, bytes)` pairs into a new archive."""

    def write(
        *members: tuple[str | zipfile.ZipInfo, bytes], name: str = "x.zip", method: int = zipfile.ZIP_STORED
    ) -> Path:
        path = tmp_path / name
        with zipfile.ZipFile(path, "w", method) as archive:
            for member, data in members:
                archive.writestr(member, data)
        return path

    return write


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with files of several sizes, one of them compressible and larger than what is kept in memory."""
    root = tmp_path / "tree"
    (root / "deep" / "er").mkdir(parents=True)
    (root / "daf.json").write_bytes(b'{"version":[1,1]}\n')
    (root / "empty").write_bytes(b"")
    (root / "deep" / "numbers.txt").write_bytes(b"".join(b"%d\n" % i for i in range(150_000)))
    (root / "deep" / "er" / "random.data").write_bytes(os.urandom(300_001))
    return root
