"""-o words, the environment, and what is said of those that make no sense."""

from __future__ import annotations

from pathlib import Path

import pytest

from dafmount.errors import UsageError
from dafmount.options import MIB, Options, parse_options


def test_defaults() -> None:
    assert parse_options([], {}) == Options()
    assert Options().cache_bytes == 64 * MIB


@pytest.mark.parametrize(
    ("text", "size"),
    [("65536", 65536), ("64K", 65536), ("64k", 65536), ("2MiB", 2 << 20), ("1.5G", 3 << 29), ("1T", 1 << 40)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_options([f"cache={text}"], {}).cache_bytes == size


def test_a_word_wins_over_the_environment_and_a_later_over_an_earlier_one() -> None:
    environment = {"DAF_PACKED_LOCAL_CACHE_KB": "100"}
    assert parse_options([], environment).cache_bytes == 102_400
    assert parse_options(["cache=1K", "cache=2K"], environment).cache_bytes == 2048


def test_words_of_mount_8_are_accepted_and_those_of_libfuse_passed_on() -> None:
    words = "ro,dev,suid,defaults,noauto,user,_netdev,nofail,x-systemd.automount,x-gvfs-show,allow_other,max_read=4096"
    assert parse_options([words], {}) == Options(kernel=("allow_other", "max_read=4096"))


def test_a_comma_in_a_value_is_escaped() -> None:
    options = parse_options([r"spool=/a\,b,shards", "fsname=x"], {})
    assert (options.spool, options.shards, options.fsname) == (Path("/a,b"), True, "x")


@pytest.mark.parametrize(("text", "seconds"), [("0", 0), ("0.0", 0), ("0.25", 0.25), ("60", 60)])
def test_refreshing_can_be_slow_quick_or_off(text: str, seconds: float) -> None:
    assert parse_options([f"refresh={text}"], {}).refresh_s == seconds


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("cache=lots", "no size"),
        ("cache", "needs a value"),
        ("shards=yes", "takes no value"),
        ("layout=2.0", "one of 1.1, 1.0"),
        ("verify=maybe", "one of off, auto, all"),
        ("timeout=0", "number of seconds"),
        ("refresh=often", "number of seconds"),
        ("refresh=-1", "number of seconds"),
        ("uid=root", "whole number"),
        ("umask=9", "octal"),
        ("rw", "read-only"),
        ("cach=1", "unknown option 'cach'"),
    ],
)
def test_what_makes_no_sense_is_named(word: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options([word], {})


def test_an_environment_that_makes_no_sense_is_named() -> None:
    with pytest.raises(UsageError, match="DAF_PACKED_LOCAL_CACHE_KB"):
        parse_options([], {"DAF_PACKED_LOCAL_CACHE_KB": "64M"})
