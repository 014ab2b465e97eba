from __future__ import annotations

import errno
import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dafmount.errors import CorruptArchive, EmptyFile, GroupNotFound, NotADaf, NotFound, UsageError
from dafmount.source.resolve import Resolved, daf_roots, resolve
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive

WriteZip = Callable[..., Path]
Resolve = Callable[..., Resolved]

MARKER = b'{"version":[1,1]}\n'


@pytest.fixture
def open_source(spool: Spool) -> Resolve:
    return lambda source: resolve(str(source), spool=spool)


@pytest.fixture
def packed(write_zip: WriteZip) -> Callable[..., Path]:
    """An archive called `name` with a data set in each of the folders."""
    return lambda name, *roots: write_zip(*((f"{root}/daf.json".lstrip("/"), MARKER) for root in roots), name=name)


def test_a_directory(open_source: Resolve, tree: Path) -> None:
    found = open_source(tree)
    assert (found.root, found.is_daf, found.display) == ("", True, str(tree))
    assert found.archive.read_small("daf.json", 100) == MARKER


def test_the_display_is_absolute(open_source: Resolve, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tree.parent)
    assert open_source("tree").display == str(tree)
    assert open_source("tree").archive.name == "tree"
    monkeypatch.chdir("/")


def test_a_relative_source_stays_readable_after_a_change_of_directory(
    open_source: Resolve, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tree.parent)
    archive = open_source("tree").archive
    monkeypatch.chdir("/")
    assert archive.read_small("daf.json", 100) == MARKER
    assert archive.stamp().size


def test_a_directory_that_is_no_daf(open_source: Resolve, tmp_path: Path) -> None:
    (tmp_path / "between").mkdir()
    (tmp_path / "x.zip").write_bytes(b"x")
    with pytest.raises(NotADaf, match=r"not a Daf: the directory has no daf\.json, nor are there data sets below it$"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("name", "roots", "root", "is_daf"),
    [
        ("x.daf.zip", [""], "", True),
        ("x.daf.zip", ["", "other"], "", True),
        ("x.daf.zip", ["x.daf"], "x.daf", True),
        ("x.daf.zip", ["x.daf", "__MACOSX/x.daf"], "x.daf", True),
        ("x.daf.zip", ["x.daf", "x.daf/old/copy"], "x.daf", True),
        ("x.dafs.zip", ["one"], "", False),
        ("x.dafs.zip", ["one", "two/nested"], "", False),
        ("x.zip", [""], "", True),
        ("x.zip", ["some/where/deep"], "some/where/deep", True),
        ("x.zip", ["one", "two/nested"], "", False),
        ("unusual", ["one"], "one", True),
    ],
)
def test_archives(
    open_source: Resolve, packed: Callable[..., Path], name: str, roots: list[str], root: str, is_daf: bool
) -> None:
    path = packed(name, *roots)
    found = open_source(path)
    assert (found.root, found.is_daf, found.display) == (root, is_daf, str(path))


@pytest.mark.parametrize("group", ["one", "one/", "/one", "two/nested", "two/nested/"])
def test_groups(open_source: Resolve, packed: Callable[..., Path], group: str) -> None:
    path = packed("x.dafs.zip", "one", "two/nested")
    found = open_source(f"{path}#/{group}")
    assert (found.root, found.is_daf) == (group.strip("/"), True)
    assert found.display == f"{path}#/{group.strip('/')}"


@pytest.mark.parametrize("group", ["three", "two", "one/x", "../one", "one/../two/nested", "."])
def test_a_missing_group_lists_those_there(open_source: Resolve, packed: Callable[..., Path], group: str) -> None:
    path = packed("x.dafs.zip", "one", "two/nested")
    with pytest.raises(GroupNotFound, match=r"x\.dafs\.zip: no group '.*'; it has one, two/nested$"):
        open_source(f"{path}#/{group}")


def test_a_missing_group_lists_twenty_of_many(open_source: Resolve, packed: Callable[..., Path]) -> None:
    path = packed("x.dafs.zip", *(f"g{i:02}" for i in range(25)))
    with pytest.raises(GroupNotFound, match=r"it has g00, .*, g19 and 5 more$"):
        open_source(f"{path}#/gone")


def test_a_mark_without_a_group(open_source: Resolve, packed: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="no group after #/"):
        open_source(f"{packed('x.dafs.zip', 'one')}#/")


def test_only_archives_of_several_have_groups(open_source: Resolve, packed: Callable[..., Path], tree: Path) -> None:
    for path in (packed("x.daf.zip", "one"), tree):
        with pytest.raises(UsageError, match=r"only \.dafs\.zip archives have groups"):
            open_source(f"{path}#/one")
    assert open_source(f"{packed('x.zip', 'one', 'two')}#/one").root == "one"


def test_an_existing_path_wins_over_a_group(open_source: Resolve, tmp_path: Path) -> None:
    folder = tmp_path / "x.dafs.zip#"
    folder.mkdir()
    with zipfile.ZipFile(tmp_path / "x.dafs.zip", "w") as archive:
        archive.writestr("y.dafs.zip/daf.json", MARKER)
    source = f"{folder}/y.dafs.zip"
    assert open_source(source).root == "y.dafs.zip"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("inner/daf.json", MARKER)
    assert open_source(source).display == source
    assert open_source(f"{source}#/inner").root == "inner"


def test_an_archive_of_several_folders_is_no_single_daf(open_source: Resolve, packed: Callable[..., Path]) -> None:
    with pytest.raises(NotADaf, match="but in one, two; an archive of several is called"):
        open_source(packed("x.daf.zip", "one", "two"))
    with pytest.raises(NotADaf, match="but in deep/er"):
        open_source(packed("x.daf.zip", "deep/er"))


@pytest.mark.parametrize("name", ["x.daf.zip", "x.dafs.zip", "x.zip"])
def test_an_archive_without_a_daf(open_source: Resolve, write_zip: WriteZip, name: str) -> None:
    path = write_zip(("something", b"else"), ("__MACOSX/x/daf.json", b""), name=name)
    with pytest.raises(NotADaf, match=r"not a Daf: the archive has no daf\.json$"):
        open_source(path)


def test_sources_that_do_not_exist(open_source: Resolve, tmp_path: Path, tree: Path) -> None:
    for source in (tmp_path / "gone", tmp_path / "gone.dafs.zip#/g", tree / "daf.json" / "x"):
        with pytest.raises(NotFound, match="no such file or directory"):
            open_source(source)
    (tmp_path / "dangling").symlink_to("gone")
    with pytest.raises(NotFound, match="no such file or directory"):
        open_source(tmp_path / "dangling")


def test_sources_that_are_no_archives(open_source: Resolve, tmp_path: Path) -> None:
    path = tmp_path / "x.daf.zip"
    path.write_bytes(b"")
    with pytest.raises(EmptyFile):
        open_source(path)
    path.write_bytes(b"text")
    with pytest.raises(NotADaf, match="not a ZIP archive"):
        open_source(path)
    path.write_bytes(b"PK\3\4")
    with pytest.raises(CorruptArchive, match="cut short"):
        open_source(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotADaf, match="neither a directory nor a regular file"):
        open_source(tmp_path / "pipe")


@pytest.mark.parametrize("source", ["", "a\0b"])
def test_text_that_is_no_path(open_source: Resolve, source: str) -> None:
    with pytest.raises(UsageError):
        open_source(source)


def test_a_file_that_may_not_be_read(
    open_source: Resolve, packed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    path = packed("x.daf.zip", "")
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError):
        open_source(path)


def test_failing_leaves_no_file_open(open_source: Resolve, packed: Callable[..., Path]) -> None:
    path = packed("x.dafs.zip", "one")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(GroupNotFound):
            open_source(f"{path}#/gone")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_corpus(open_source: Resolve, corpus: Path) -> None:
    assert open_source(corpus / "dafr/zstd.daf").is_daf
    assert open_source(corpus / "dafr/zstd.daf.zip").is_daf
    groups = open_source(corpus / "dafr/zstd.dafs.zip")
    assert isinstance(groups.archive, ZipArchive)
    assert (groups.is_daf, daf_roots(groups.archive)) == (False, ["one", "two/nested"])
    assert open_source(f"{corpus}/dafr/zstd.dafs.zip#/two/nested").root == "two/nested"


def test_names_in_messages_stay_on_one_line(open_source: Resolve, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("new\nline/daf.json", MARKER)
    path = tmp_path / "two\nlines.dafs.zip"
    path.write_bytes(stream.getvalue())
    with pytest.raises(GroupNotFound) as caught:
        open_source(f"{path}#/a\nb")
    assert "\n" not in str(caught.value)
