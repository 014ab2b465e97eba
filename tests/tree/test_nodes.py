"""Inode numbers, and contents that are opened at once where nothing has to be waited for."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future

import pytest

from dafmount.tree.content import Content, Literal
from dafmount.tree.nodes import ROOT_NUMBER, Directory, File, Node, NodeTable, OpenContents

NAMES = [
    "a",
    "b",
    "eight-ch",
    "eight-characters",
    "n" * 255,
    "\udcff\udcfe",
    "é",
    *(f"property-{k}" for k in range(500)),
]


class WatchedLiteral(Literal):
    """Tells which thread closed it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.closed_by: Future[int] = Future()

    def close(self) -> None:
        self.closed_by.set_result(threading.get_ident())


class Opener:
    """Opens at once only when told so."""

    def __init__(self, *, at_once: bool = True) -> None:
        self.at_once = at_once
        self.n_opened = 0

    def open(self, file: File) -> Content:
        self.n_opened += 1
        return WatchedLiteral(file.name.encode("utf-8", "surrogateescape"))

    def open_nowait(self, file: File) -> Content | None:
        return self.open(file) if self.at_once else None


def tree(names: list[str], opener: Opener | None = None) -> Directory:
    def files(directory: Directory) -> dict[str, Node]:
        return {name: File(name, directory, 1, 0, opener or Opener()) for name in names}

    def root(directory: Directory) -> dict[str, Node]:
        return {name: Directory(name, directory, 0, files) for name in ("first", "second")}

    return Directory("", None, 0, root)


def numbers(root: Directory, order: list[str], known: NodeTable | None = None) -> dict[tuple[str, str], int]:
    table = known or NodeTable(root)
    directories = root.children()
    return {
        (name, below): table.number(directories[name].children()[below])  # type: ignore[union-attr]
        for below in order
        for name in directories
    }


def test_numbers_depend_on_the_path_alone() -> None:
    shuffled = random.Random(1).sample(NAMES, len(NAMES))
    assert numbers(tree(NAMES), NAMES) == numbers(tree(shuffled), shuffled[::-1])


def test_numbers_do_not_depend_on_how_long_other_names_are() -> None:
    few = numbers(tree(["a", "eight-ch"]), ["a", "eight-ch"])
    assert few.items() <= numbers(tree(NAMES), NAMES).items()


def test_every_path_has_a_number_of_its_own() -> None:
    found = numbers(tree(NAMES), NAMES)
    assert len(set(found.values())) == 2 * len(NAMES)
    assert not {0, ROOT_NUMBER} & set(found.values())


def test_a_node_that_takes_the_name_of_a_known_one_gets_another_number() -> None:
    root = tree(["a", "b"])
    first = root.children()["first"]
    assert isinstance(first, Directory)
    table, old = NodeTable(root), first.children()["a"]
    table.remember(old)
    new = File("a", first, 1, 0, Opener())
    first.graft(first.loader, {"a": new, "b": first.children()["b"]})
    assert table.remember(new) != old.number
    assert table[old.number] is old
    assert table[new.number] is new


def test_a_number_that_is_held_is_not_given_to_what_takes_its_name() -> None:
    root = tree(["a"])
    first = root.children()["first"]
    assert isinstance(first, Directory)
    table, old = NodeTable(root), first.children()["a"]
    assert isinstance(old, File)
    table.remember(old)
    with table.held(old) as is_true, table.held(old):
        assert is_true
        old.retire()
        first.graft(first.loader, {"a": (new := File("a", first, 1, 0, Opener()))})
        table.forget(old.number, 1)
        assert table.number(new) != old.number
        with table.held(old) as is_true:
            assert not is_true
    first.graft(first.loader, {"a": (newer := File("a", first, 1, 0, Opener()))})
    assert table.number(newer) == old.number


def test_what_was_replaced_before_it_was_known_gets_a_number_too() -> None:
    root = tree(["a"])
    first = root.children()["first"]
    assert isinstance(first, Directory)
    table, old = NodeTable(root), first.children()["a"]
    new = File("a", first, 1, 0, Opener())
    first.graft(first.loader, {"a": new})
    table.remember(new)
    assert table.remember(old) != new.number
    assert table[new.number] is new


@pytest.mark.parametrize("at_once", [True, False])
def test_a_content_is_opened_once_and_kept_however_it_was_opened(at_once: bool) -> None:
    opener = Opener(at_once=at_once)
    root = tree(["a"], opener)
    first = root.children()["first"]
    assert isinstance(first, Directory)
    file = first.children()["a"]
    assert isinstance(file, File)
    NodeTable(root).remember(file)
    contents = OpenContents(2)
    content = contents.acquire_nowait(file)
    assert (content is not None) is at_once
    content = content or contents.acquire(file)
    assert contents.acquire_nowait(file) is content
    contents.release(file)
    contents.release(file)
    assert contents.acquire_nowait(file) is content
    assert opener.n_opened == 1


@pytest.mark.parametrize("at_once", [True, False])
def test_only_what_was_opened_at_once_is_closed_at_once(at_once: bool) -> None:
    root = tree(["a"], Opener(at_once=at_once))
    first = root.children()["first"]
    assert isinstance(first, Directory)
    file = first.children()["a"]
    assert isinstance(file, File)
    NodeTable(root).remember(file)
    contents = OpenContents(0)
    content = contents.acquire_nowait(file) or contents.acquire(file)
    assert isinstance(content, WatchedLiteral)
    contents.release(file)
    assert (content.closed_by.result(30) == threading.get_ident()) is at_once


def test_what_nobody_uses_can_be_closed_without_disturbing_what_is_used() -> None:
    root = tree(["used", "idle"], Opener(at_once=False))
    first = root.children()["first"]
    assert isinstance(first, Directory)
    table, contents = NodeTable(root), OpenContents(10)
    opened = {}
    for name in ("used", "idle"):
        file = first.children()[name]
        assert isinstance(file, File)
        table.remember(file)
        opened[name] = contents.acquire(file)
    contents.release(file)
    contents.drop_idle()
    used, idle = opened["used"], opened["idle"]
    assert isinstance(used, WatchedLiteral)
    assert isinstance(idle, WatchedLiteral)
    assert idle.closed_by.result(0) == threading.get_ident()
    assert not used.closed_by.done()
    assert contents.acquire(file) is not idle
