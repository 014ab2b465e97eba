from __future__ import annotations

import pytest

from dafmount.errors import UsageError
from dafmount.source.http_url import is_url, parse_url, redirected, secrets_in, split_group, without_secrets


@pytest.mark.parametrize(
    ("text", "requested"),
    [
        ("http://host/x.daf", "http://host/x.daf"),
        ("HTTP://HOST:80/x.daf", "http://host/x.daf"),
        ("https://host:443", "https://host/"),
        ("https://host:8443/a/", "https://host:8443/a/"),
        ("http://[::1]:8000/x", "http://[::1]:8000/x"),
        ("http://host/my cells.daf", "http://host/my%20cells.daf"),
        ("http://host/my%20cells%23.daf", "http://host/my%20cells%23.daf"),
        ("http://host/é.daf?a=b&c=%2F", "http://host/%C3%A9.daf?a=b&c=%2F"),
        ("http://bücher.example/x", "http://xn--bcher-kva.example/x"),
        ("https://me:pa%20ss@host/x?sig=s3cret", "https://host/x?sig=s3cret"),
    ],
)
def test_what_is_sent(text: str, requested: str) -> None:
    assert parse_url(text).requested == requested


def test_what_is_shown_holds_no_secret() -> None:
    url = parse_url("https://me:pa%20ss@host/x.daf.zip?sig=s3cret")
    assert url.shown == "https://host/x.daf.zip"
    assert (url.user, url.password) == ("me", "pa ss")
    assert "s3cret" not in repr(url)
    assert "pa ss" not in repr(url)
    assert without_secrets("https://me:pa@host/x?sig=s#/g") == "https://host/x#/g"
    assert without_secrets("/some/where?x") == "/some/where?x"


def test_secrets_of_a_source() -> None:
    assert secrets_in("https://me:pa@host/x?sig=s#/g") == ["me:pa", "sig=s"]
    assert secrets_in("https://host/x@y") == []
    assert secrets_in("/x@y?z") == []


@pytest.mark.parametrize(
    "text", ["http://", "http:///x", "http://host:port/x", "http://[::1/x", "http://ho st/x", "ftp://host/x", "http://%41/"]
)
def test_text_that_is_no_url(text: str) -> None:
    with pytest.raises(UsageError):
        parse_url(text)


def test_messages_about_broken_urls_hold_no_secret() -> None:
    for text in ("http://me:s3cret@host:port/x", "ftp://me:s3cret@host/x?s3cret", "http://me:s3cret@/?s3cret"):
        with pytest.raises(UsageError) as caught:
            parse_url(text)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "requested"),
    [
        ("axes/cell.txt", "http://host/x.daf/axes/cell.txt?token=1"),
        ("scalars/a b#c?d%e.json", "http://host/x.daf/scalars/a%20b%23c%3Fd%25e.json?token=1"),
        ("vectors/g\N{LATIN SMALL LETTER E WITH ACUTE}ne/x", "http://host/x.daf/vectors/g%C3%A9ne/x?token=1"),
    ],
)
def test_files_below_a_directory(path: str, requested: str) -> None:
    for text in ("http://host/x.daf?token=1", "http://host/x.daf/?token=1"):
        assert parse_url(text).below(path).requested == requested


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("http://h/x.dafs.zip", ("http://h/x.dafs.zip", None)),
        ("http://h/x.dafs.zip#/g", ("http://h/x.dafs.zip", "g")),
        ("http://h/x.dafs.zip?q#/a/b#c/", ("http://h/x.dafs.zip?q", "a/b#c")),
    ],
)
def test_groups(source: str, found: tuple[str, str | None]) -> None:
    assert split_group(source) == found


@pytest.mark.parametrize("source", ["http://h/x#", "http://h/x#/", "http://h/x#g"])
def test_fragments_that_are_no_group(source: str) -> None:
    with pytest.raises(UsageError, match="a group is expected"):
        split_group(source)


def test_what_is_a_url() -> None:
    assert is_url("HTTPS://host/x")
    assert not is_url("/http://host/x")
    assert not is_url("ftp://host/x")


@pytest.mark.parametrize(
    ("other", "may"),
    [
        ("http://host/y", True),
        ("http://host:80/", True),
        ("https://host/x", True),
        ("http://other/x", False),
        ("http://host:81/x", False),
        ("https://host:444/x", False),
        ("http://sub.host/x", False),
    ],
)
def test_who_may_have_the_secrets_of_a_server(other: str, may: bool) -> None:
    assert parse_url(other).may_have_secrets_of(parse_url("http://host/x")) is may


def test_no_secret_goes_from_https_to_http() -> None:
    assert not parse_url("http://host/x").may_have_secrets_of(parse_url("https://host/x"))


def test_redirects() -> None:
    url = parse_url("http://host/a/x.zip?token=1")
    assert redirected(url, "../y.zip").requested == "http://host/y.zip"
    assert redirected(url, "//other/z?q").requested == "http://other/z?q"
    for location in ("file:///etc/passwd", "ftp://host/x", "javascript:1"):
        with pytest.raises(UsageError):
            redirected(url, location)
