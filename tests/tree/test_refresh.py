"""The difference between a tree and its changed source, without a mount."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dafmount.errors import NotADaf, NotFound, SourceChanged
from dafmount.source.resolve import Resolved, resolve
from dafmount.source.spool import Spool
from dafmount.tree import refresh
from dafmount.tree.build import Style
from dafmount.tree.cache import ChunkCache
from dafmount.tree.live import Live, live_tree
from dafmount.tree.nodes import Directory, File, Node, NodeTable, OpenContents
from dafmount.tree.refresh import Forget, Unit, close_unused
from zip_append import Append, append

F64 = "vectors/cell/f64.data"
NOTHING = Forget([], [], [])


class Tree:
    """A live tree as a mount uses it: what is looked at is known to the kernel."""

    def __init__(self, source: Path, spool: Spool) -> None:
        def open_source(path: str, is_known: bool) -> Resolved:
            return resolve(path, spool=spool, is_known=is_known)

        style = Style(ChunkCache(1 << 20))
        self.live: Live = live_tree(open_source(str(source), False), open_source, style)
        self.nodes = NodeTable(self.live.root)
        self.contents = OpenContents(8)

    def node(self, path: str) -> Node:
        node: Node = self.live.root
        for name in path.split("/") if path else []:
            assert isinstance(node, Directory)
            node = node.children()[name]
            if not node.lookups:
                self.nodes.remember(node)
        return node

    def file(self, path: str) -> File:
        node = self.node(path)
        assert isinstance(node, File)
        return node

    def names(self, path: str) -> set[str]:
        node = self.node(path)
        assert isinstance(node, Directory)
        return set(node.children())

    def read(self, path: str) -> bytes:
        file = self.file(path)
        content = self.contents.acquire(file)
        try:
            return bytes(content.read(0, content.size))
        finally:
            self.contents.release(file)

    def look(self) -> Forget:
        """One round over all units."""
        together = Forget([], [], [])
        for unit in self.live.units:
            plan = unit.look()
            if plan is not None:
                for all_of_kind, kind in zip(together, plan.apply(self.contents), strict=True):
                    all_of_kind.extend(kind)  # type: ignore[attr-defined]
        return together

    def unit(self, path: str) -> Unit:
        unit = self.node(path).unit  # type: ignore[union-attr]
        assert isinstance(unit, Unit)
        return unit


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    (tmp_path / "spool").mkdir()
    return Spool(tmp_path / "spool")


@pytest.fixture
def archive(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copyfile(corpus / "dafr" / "zstd.daf.zip", tmp_path / "x.daf.zip"))


@pytest.fixture
def files(corpus: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(corpus / "dafr" / "zstd.daf", tmp_path / "x.daf", copy_function=shutil.copyfile))


@pytest.fixture(params=["archive", "files"])
def tree(request: pytest.FixtureRequest, spool: Spool) -> Iterator[Tree]:
    tree = Tree(request.getfixturevalue(request.param), spool)
    yield tree
    tree.contents.close()


def everything(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Directory):
        for child in node.children().values():
            yield from everything(child)


def test_nothing_changes_where_nothing_did(tree: Tree) -> None:
    before = list(everything(tree.live.root))
    assert tree.look() == NOTHING
    assert list(everything(tree.live.root)) == before


def test_every_file_but_the_index_stays_when_an_archive_grows(archive: Path, spool: Spool) -> None:
    tree = Tree(archive, spool)
    before = {node.path: node for node in everything(tree.live.root)}
    metadata = tree.file("metadata.json")
    append(archive, "vectors/cell/new.txt", b"new\n")
    forget = tree.look()
    after = {node.path: node for node in everything(tree.live.root)}
    assert set(after) - set(before) == {"vectors/cell/new.txt"}
    assert [path for path in before if after[path] is not before[path]] == ["metadata.json"]
    assert forget.inodes == [metadata.number]
    assert forget.names == [(tree.live.root.number, "metadata.json")]  # of the others the kernel has not heard
    assert tree.read("vectors/cell/new.txt") == b"new\n"
    assert tree.look() == NOTHING


def test_what_changed_is_another_node_with_another_number(files: Path, spool: Spool) -> None:
    tree = Tree(files, spool)
    old, other = tree.file("axes/gene.txt"), tree.file("axes/cell.txt")
    (files / "axes/gene.txt").write_bytes(b"new\n")
    forget = tree.look()
    new = tree.file("axes/gene.txt")
    assert old.number in forget.inodes
    assert (tree.node("axes").number, "gene.txt") in forget.names
    assert new is not old
    assert new.number != old.number
    assert old.is_retired
    with pytest.raises(SourceChanged):
        tree.contents.acquire(old)
    assert tree.read("axes/gene.txt") == b"new\n"
    assert tree.file("axes/cell.txt") is other


def test_properties_follow_their_axes(files: Path, spool: Spool) -> None:
    tree = Tree(files, spool)
    cells, genes = tree.file(F64), tree.file("vectors/gene/mean.data")
    size = tree.contents.exact_size(cells)
    with (files / "axes/cell.txt").open("ab") as stream:
        stream.write(b"one more\n")
    tree.look()
    assert tree.file(F64) is not cells
    assert tree.contents.exact_size(tree.file(F64)) == size + 8
    assert tree.file("vectors/gene/mean.data") is genes


def test_decoded_chunks_of_an_old_file_are_not_given_for_a_new_one(files: Path, spool: Spool) -> None:
    """Even where the kernel forgot the old one, so that the new one has its number."""
    tree = Tree(files, spool)
    old = tree.read(F64)
    number = tree.file(F64).number
    for suffix in ("zip", "json"):
        shutil.copyfile(files / f"vectors/cell/u64.{suffix}", files / "other")
        os.replace(files / "other", files / f"vectors/cell/f64.{suffix}")
    truth = tree.read("vectors/cell/u64.data")
    tree.nodes.forget(number, 1)
    tree.look()
    assert tree.file(F64).number == number
    assert tree.read(F64) == truth != old


def test_a_link_that_leads_elsewhere_by_now_is_followed(files: Path, corpus: Path, spool: Spool) -> None:
    link = files.with_name("current.daf")
    link.symlink_to(files.name)
    tree = Tree(link, spool)
    old, genes = tree.read(F64), tree.file("vectors/gene/mean.data")
    other = Path(shutil.copytree(corpus / "dafr" / "flat.daf", files.with_name("y.daf"), copy_function=shutil.copyfile))
    (other / F64).write_bytes(old[::-1])
    other_link = files.with_name("other")
    other_link.symlink_to(other.name)
    os.replace(other_link, link)
    tree.look()
    assert tree.read(F64) == old[::-1]
    assert tree.file("vectors/gene/mean.data") is not genes
    shutil.rmtree(files)
    assert tree.look() == NOTHING


def test_an_unfinished_entry_waits_but_not_for_ever(
    archive: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(archive, spool)
    names = tree.names("vectors/cell")
    Append(archive, "vectors/cell/new.txt", b"new\n").write_directory()
    assert tree.look() == NOTHING
    assert tree.names("vectors/cell") == names
    monkeypatch.setattr(refresh, "LASTING_S", -1)
    tree.look()
    assert tree.names("vectors/cell") == names | {"new.txt"}
    assert not caplog.records


def test_what_cannot_be_read_is_logged_once_when_it_lasts(
    archive: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(archive, spool)
    names, data = tree.names("vectors/cell"), archive.read_bytes()
    archive.write_bytes(data[:1000])
    for _ in range(3):
        assert tree.look() == NOTHING
    assert not caplog.records
    monkeypatch.setattr(refresh, "LASTING_S", -1)
    for _ in range(3):
        assert tree.look() == NOTHING
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert tree.names("vectors/cell") == names
    archive.write_bytes(data)
    tree.look()
    assert tree.names("vectors/cell") == names


def test_a_broken_archive_that_took_the_place_of_a_good_one_is_an_error_when_it_lasts(
    archive: Path, spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tree = Tree(archive, spool)
    truth = tree.read(F64)
    archive.rename(archive.with_name("away"))
    archive.write_bytes(b"no archive")
    assert tree.look() == NOTHING
    assert tree.read(F64) == truth
    monkeypatch.setattr(refresh, "LASTING_S", -1)
    assert {name for _, name in tree.look().names} >= {"vectors", "axes"}
    for _ in range(2):
        with pytest.raises(NotADaf):
            tree.live.root.children()
        assert tree.look() == NOTHING
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    archive.with_name("away").rename(archive)
    assert tree.read(F64) == truth


def test_a_source_that_is_gone_is_opened_anew_once_it_is_back(
    tree: Tree, caplog: pytest.LogCaptureFixture
) -> None:
    truth = tree.read(F64)
    place = Path(tree.unit("").name)
    place.rename(place.with_name("away"))
    forget = tree.look()
    assert {name for _, name in forget.names} >= {"vectors", "axes", "daf.json"}
    assert len(caplog.records) == 1
    for _ in range(2):
        with pytest.raises(NotFound):
            tree.live.root.children()
        assert tree.look() == NOTHING
    place.with_name("away").rename(place)
    assert tree.read(F64) == truth


def test_whoever_looks_in_between_gets_the_new_state_in_the_end(archive: Path, spool: Spool) -> None:
    tree = Tree(archive, spool)
    tree.names("vectors")
    append(archive, "vectors/cell/new.txt", b"new\n")
    plan = tree.unit("").look()
    assert plan is not None
    assert "new.txt" not in tree.names("vectors/cell")  # loaded while the plan was made
    plan.apply(tree.contents)
    tree.look()
    assert "new.txt" in tree.names("vectors/cell")
    assert tree.look() == NOTHING


def test_a_plan_for_a_unit_that_was_closed_does_nothing(archive: Path, spool: Spool) -> None:
    tree = Tree(archive, spool)
    tree.names("vectors/cell")
    append(archive, "vectors/cell/new.txt", b"new\n")
    plan = tree.unit("").look()
    assert plan is not None
    tree.unit("").close()
    assert plan.apply(tree.contents) == NOTHING


def test_what_is_left_out_is_logged_once_however_often_the_source_changes(
    archive: Path, files: Path, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    with zipfile.ZipFile(archive, "a") as stream:
        stream.writestr("../outside", b"")
    (files / "vectors/cell/outside").symlink_to("/etc")
    for source, change in (
        (archive, lambda at: append(archive, f"vectors/cell/new{at}.txt", b"")),
        (files, lambda at: (files / f"vectors/cell/new{at}.txt").touch()),
    ):
        caplog.clear()
        tree = Tree(source, spool)
        for at in range(3):
            change(at)
            assert f"new{at}.txt" in tree.names("vectors/cell") or tree.look()
            assert f"new{at}.txt" in tree.names("vectors/cell")
        assert ["left out" in record.getMessage() for record in caplog.records] == [True]


def test_a_unit_is_closed_only_when_the_kernel_knows_nothing_of_it(
    archive: Path, spool: Spool, tmp_path: Path
) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    archive.rename(lab / archive.name)
    tree = Tree(lab, spool)
    truth = tree.read(f"x.daf/{F64}")
    unit = tree.unit("x.daf")
    assert len(list(tree.live.units)) == 2
    assert not close_unused(unit, tree.contents)
    for node in everything(unit.directory):
        tree.nodes.forget(node.number, node.lookups)
    assert close_unused(unit, tree.contents)
    assert list(tree.live.units) == [tree.unit("")]
    assert not unit.directory.is_loaded
    assert tree.read(f"x.daf/{F64}") == truth


def test_open_files_fail_where_the_archive_is_another(archive: Path, corpus: Path, spool: Spool) -> None:
    tree = Tree(archive, spool)
    file, small = tree.file(F64), tree.file("axes/gene.txt")
    for one in (file, small):
        tree.contents.acquire(one).read(0, 1)
    other = shutil.copyfile(corpus / "dafr" / "gzip.daf.zip", archive.with_name("other"))
    os.replace(other, archive)
    forget = tree.look()
    assert {file.number, small.number} <= set(forget.inodes)
    for one in (file, small):
        with pytest.raises(SourceChanged):
            tree.contents.opened(one).read(0, 1)
        with pytest.raises(SourceChanged):
            tree.contents.opened(one).read_nowait(0, 1)
        tree.contents.release(one)
    assert tree.read(F64)
    assert tree.file(F64).number != file.number
