from __future__ import annotations

from pathlib import Path

import pytest

from dafmount.errors import UsageError
from dafmount.options import GIB, KIB, MIB, Options, parse_options, secrets_in


def test_defaults() -> None:
    options = parse_options([], {})
    assert options == Options()
    assert (options.http.gap_bytes, options.http.connections, options.http.retries) == (8 * KIB, 8, 4)
    assert options.for_source("/x.daf").cache_bytes == 64 * MIB
    remote = options.for_source("https://host/x.daf")
    assert (remote.cache_bytes, remote.readahead_bytes, remote.refresh_s) == (256 * MIB, 0, 60)
    assert options.for_source("/x.daf").refresh_s == 1


def test_the_environment() -> None:
    environment = {
        "DAF_PACKED_HTTP_CACHE_KB": "100",
        "DAF_HTTP_MAX_COALESCE_GAP_KB": "3",
        "DAFMOUNT_PASSWORD": "pa55word",
    }
    options = parse_options([], environment)
    assert options.for_source("http://host/x").cache_bytes == 100 * KIB
    assert options.for_source("/x").cache_bytes == 64 * MIB
    assert (options.http.gap_bytes, options.http.password) == (3 * KIB, "pa55word")
    assert "pa55word" not in repr(options)
    with pytest.raises(UsageError, match="DAF_HTTP_MAX_COALESCE_GAP_KB"):
        parse_options([], {"DAF_HTTP_MAX_COALESCE_GAP_KB": "many"})


def test_words() -> None:
    words = ["header=X-A: 1\\,2,header=Cookie: c=d,user=me,password-file=/p,cacert=/c,retries=0,connections=3"]
    words += ["timeout=7,cache=1M,readahead=256K,refresh=5,cache-dir=/d,cache-dir-size=2G,header-file=/h"]
    options = parse_options(words, {})
    http = options.http
    assert http.headers == (("X-A", "1,2"), ("Cookie", "c=d"))
    assert (http.user, http.password_file, http.header_file, http.ca_file) == ("me", Path("/p"), Path("/h"), Path("/c"))
    assert (http.retries, http.connections, http.timeout_s, options.timeout_s) == (0, 3, 7, 7)
    assert (http.cache_directory, http.cache_directory_bytes) == (Path("/d"), 2 * GIB)
    remote = options.for_source("http://host/x")
    assert (remote.cache_bytes, remote.readahead_bytes, remote.refresh_s) == (MIB, 256 * KIB, 5)
    assert options.for_source("/x") == options
    assert secrets_in(words) == ["1,2", "c=d"]


def test_the_word_user_of_mount_is_still_one() -> None:
    assert parse_options(["user,_netdev"], {}) == Options()


@pytest.mark.parametrize(
    "word",
    [
        "header=s3cret",
        "header=A B: s3cret",
        "header=A: s3\ns3cret",
        "header=",
        "user=me:s3cret",
        "password=s3cret",
        "connections=0",
        "connections=100",
        "retries=-1",
        "retries=x",
        "cache-dir=",
        "cacert",
        "s3cretless=s3cret",
    ],
)
def test_words_that_make_no_sense_are_not_quoted(word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_options([word], {})
    assert "s3cret" not in str(caught.value).replace("s3cretless", "")
