from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dafmount.source.names import all_plain, clean, decode, encode, shown

names = st.lists(
    st.sampled_from([b"a", b"bc", b".", b"..", b"", b"/", b"\\", b"\0", b".d", b"\xff", b"\xc3\xa9", b"\n"]), max_size=6
)


@settings(max_examples=100, deadline=None)
@given(st.lists(names.map(b"/".join), min_size=1, max_size=4))
def test_names_found_plain_are_clean(found: list[bytes]) -> None:
    if all_plain(found):
        assert [clean(name) for name in found] == found
        assert [decode(name).encode() for name in found] == found


def test_ordinary_names_are_found_plain() -> None:
    assert all_plain([b"a", b".d", b"a/b/..c", b"d/e.", "é".encode()])


@pytest.mark.parametrize("name", [b"", b"/a", b"a//b", b"./a", b"a/.", b"..", b"a\\b", b"a\0", b"\xe9", b"n" * 256])
def test_one_odd_name_among_many_is_noticed(name: bytes) -> None:
    assert not all_plain([b"a", name, b"b"])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=30))
def test_any_bytes_survive_as_text_and_show_on_one_line(name: bytes) -> None:
    assert encode(decode(name)) == name
    assert "\n" not in shown(decode(name))
    shown(decode(name)).encode()
