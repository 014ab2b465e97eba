"""Every setting of a mount, in one frozen value: `-o` words, the environment, defaults.

Owns their names, units and limits. Knows neither argparse nor FUSE beyond the words it passes on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from dafmount.errors import UsageError
from dafmount.source.http_settings import HttpSettings, parse_header
from dafmount.source.http_url import is_url

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

LAYOUTS = ("1.1", "1.0")
Verify: TypeAlias = Literal["off", "auto", "all"]
VERIFY = get_args(Verify)

CACHE_VARIABLE = "DAF_PACKED_LOCAL_CACHE_KB"
HTTP_CACHE_VARIABLE = "DAF_PACKED_HTTP_CACHE_KB"
GAP_VARIABLE = "DAF_HTTP_MAX_COALESCE_GAP_KB"
PASSWORD_VARIABLE = "DAFMOUNT_PASSWORD"

_Value: TypeAlias = int | float | str | Path
_Parser: TypeAlias = Callable[[str, str], _Value]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": KIB, "m": MIB, "g": GIB, "t": 1024 * GIB}

_IGNORED = frozenset(
    "ro dev nodev suid nosuid exec noexec auto noauto nofail defaults user nouser users owner group _netdev async "
    "atime noatime relatime norelatime strictatime diratime nodiratime lazytime nolazytime silent loud fd".split()
)
"""Words of mount(8) that need no doing here: a mount is always ro,nosuid,nodev and has no access times."""

_KERNEL = frozenset({"allow_other", "allow_root", "default_permissions", "auto_unmount", "max_read"})
"""Words that libfuse or the kernel understand and that are passed on."""


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of one mount. Sizes are in bytes."""

    cache_bytes: int = 64 * MIB
    """Most bytes of decoded chunks kept (`cache=`, or DAF_PACKED_LOCAL_CACHE_KB)."""
    http_cache_bytes: int = 256 * MIB
    """The same where the source is a URL (`cache=`, or DAF_PACKED_HTTP_CACHE_KB)."""
    spool: Path | None = None
    """Directory for decoded copies of compressed ZIP entries (`spool=`); None: $TMPDIR or /var/tmp."""
    spool_bytes: int = 4 * GIB
    """Most bytes of such copies (`spool-size=`)."""
    layout: str = "1.1"
    """The version of FilesDaf that the mount is an example of (`layout=`)."""
    shards: bool = False
    """Whether the shards are shown beside the flat files (`shards`)."""
    verify: Verify = "auto"
    """Which checksums are checked (`verify=`): off, auto, all."""
    timeout_s: float = 120.0
    """How long a request may wait for the source before it fails with ETIMEDOUT (`timeout=`, seconds)."""
    readahead_bytes: int = MIB
    """How far the kernel reads ahead, where this process may say so (`readahead=`; 0: as the kernel likes)."""
    http_readahead_bytes: int = 0
    """The same where the source is a URL: what the kernel reads ahead for nobody is fetched too."""
    decoders: int | None = None
    """Threads that decode ahead of who reads on and on (`decoders=`); None: as many as are of use on this machine."""
    refresh_s: float = 1.0
    """How often the source is asked whether it changed (`refresh=`, seconds); 0: only when a file shows it."""
    http_refresh_s: float = 60.0
    """The same where the source is a URL, which is asked only while it is used."""
    nonempty: bool = False
    """Whether the mount point may have entries, which the mount hides (`nonempty`)."""
    uid: int | None = None
    gid: int | None = None
    """Owner and group of everything shown; None: the mounting user's."""
    umask: int | None = None
    """Permission bits that nothing shown has; None: those follow from the source."""
    fmask: int | None = None
    dmask: int | None = None
    """The same for files and for directories alone; None: as `umask`."""
    fsname: str | None = None
    """What /proc/mounts shows as the source; None: the source itself."""
    kernel: tuple[str, ...] = ()
    """Words for libfuse, passed on."""
    http: HttpSettings = field(default_factory=HttpSettings)
    """How web servers are talked to."""

    def for_source(self, source: str) -> Options:
        """These settings with those that are others where the source is a URL in their place."""
        if not is_url(source):
            return self
        return replace(
            self,
            cache_bytes=self.http_cache_bytes,
            readahead_bytes=self.http_readahead_bytes,
            refresh_s=self.http_refresh_s,
        )


def parse_options(words: Iterable[str], environment: Mapping[str, str]) -> Options:
    """Options from `-o` words (each may be a comma-separated list; `\\,` stands for a comma) and the environment.

    A later word wins over an earlier one, a word over the environment. Raises UsageError, naming the word.
    """
    options = Options()
    cache_kb = environment.get(CACHE_VARIABLE)
    if cache_kb is not None:
        options = replace(options, cache_bytes=_number(CACHE_VARIABLE, cache_kb) * KIB)
    http_cache_kb, gap_kb = environment.get(HTTP_CACHE_VARIABLE), environment.get(GAP_VARIABLE)
    if http_cache_kb is not None:
        options = replace(options, http_cache_bytes=_number(HTTP_CACHE_VARIABLE, http_cache_kb) * KIB)
    http = HttpSettings(password=environment.get(PASSWORD_VARIABLE))
    if gap_kb is not None:
        http = replace(http, gap_bytes=_number(GAP_VARIABLE, gap_kb) * KIB)
    options = replace(options, http=http)
    for word in _split(words):
        options = _apply(options, word)
    if {"allow_other", "allow_root"} <= set(options.kernel):
        raise UsageError("options 'allow_other' and 'allow_root' exclude each other")
    return replace(options, http=replace(options.http, timeout_s=options.timeout_s))


def secrets_in(words: Iterable[str]) -> list[str]:
    """The parts of `-o` words that nobody else should see."""
    return [word.partition("=")[2].partition(":")[2].strip() for word in _split(words) if word.startswith("header=")]


def _split(words: Iterable[str]) -> Iterable[str]:
    for word in words:
        parts = [part.strip().replace("\\,", ",") for part in re.split(r"(?<!\\),", word) if part.strip()]
        yield from parts[1:] if _is_from_mount(parts) else parts


def _is_from_mount(parts: list[str]) -> bool:
    """Whether mount.fuse3 wrote these: it always says rw, then either of dev and nodev, and of suid and nosuid."""
    rest = set(parts[1:])
    return parts[:1] == ["rw"] and bool(rest & {"dev", "nodev"}) and bool(rest & {"suid", "nosuid"})


def _apply(options: Options, word: str) -> Options:
    name, equals, value = word.partition("=")
    http_setter = _HTTP_SETTERS.get(name)
    if http_setter is not None and (equals or name not in _IGNORED):
        if not value:
            raise UsageError(f"option {name!r} needs a value: {name}=...")
        return replace(options, http=http_setter(options.http, value))
    if name in _HTTP_TWINS and value:
        twin, parse_twin = _HTTP_TWINS[name]
        options = replace(options, **{twin: parse_twin(name, value)})  # type: ignore[arg-type]
    if name == "password":
        raise UsageError(f"a password would be seen by everyone: use password-file=FILE, or {PASSWORD_VARIABLE}")
    setter = _SETTERS.get(name)
    if setter is not None:
        field, parse = setter
        if parse is None:
            if equals:
                raise UsageError(f"option {name!r} takes no value, found {word!r}")
            return replace(options, **{field: True})  # type: ignore[arg-type]
        if not equals:
            raise UsageError(f"option {name!r} needs a value: {name}=...")
        return replace(options, **{field: parse(name, value)})  # type: ignore[arg-type]
    if name in _KERNEL:
        if bool(equals) != (name == "max_read"):
            raise UsageError(f"option {word!r}: {'needs a value: max_read=...' if not equals else 'takes no value'}")
        return replace(options, kernel=(*options.kernel, word))
    if name in _IGNORED or name.startswith(("x-", "comment")):
        return options
    if name == "rw":
        raise UsageError("option 'rw': a dafmount is read-only; leave it out, 'ro' is implied")
    if name == "remount":
        raise UsageError("option 'remount': unmount it and mount it again instead")
    known = ", ".join(sorted({*_SETTERS, *_HTTP_SETTERS}))
    raise UsageError(f"unknown option {name!r}; known are {known} and those of mount(8)")


def parse_size(name: str, text: str) -> int:
    """Bytes from `65536`, `64M`, `64MiB`, `1.5G`; raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"option {name!r}: {text!r} is no size; write it as 65536, 64K, 64M or 4G")
    unit = _UNITS[match[2].lower()]
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise UsageError(f"option {name!r}: {text!r} is no whole number")
    return int(text)


def _seconds(name: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) == 0:
        raise UsageError(f"option {name!r}: {text!r} is no number of seconds")
    return float(text)


def _pause(name: str, text: str) -> float:
    return 0.0 if re.fullmatch(r"0+(\.0+)?", text) else _seconds(name, text)


def _octal(name: str, text: str) -> int:
    if not re.fullmatch(r"0?[0-7]{1,3}", text):
        raise UsageError(f"option {name!r}: {text!r} is no octal mask such as 022")
    return int(text, 8)


def _choice(known: tuple[str, ...]) -> _Parser:
    def parse(name: str, text: str) -> str:
        if text not in known:
            raise UsageError(f"option {name!r}: {text!r}, expected one of {', '.join(known)}")
        return text

    return parse


def _path(name: str, text: str) -> Path:
    if not text:
        raise UsageError(f"option {name!r} needs a directory")
    return Path(text).absolute()


def _text(name: str, text: str) -> str:
    return text


_SETTERS: dict[str, tuple[str, _Parser | None]] = {
    "cache": ("cache_bytes", parse_size),
    "spool": ("spool", _path),
    "spool-size": ("spool_bytes", parse_size),
    "layout": ("layout", _choice(LAYOUTS)),
    "shards": ("shards", None),
    "verify": ("verify", _choice(VERIFY)),
    "timeout": ("timeout_s", _seconds),
    "readahead": ("readahead_bytes", parse_size),
    "decoders": ("decoders", _number),
    "refresh": ("refresh_s", _pause),
    "nonempty": ("nonempty", None),
    "uid": ("uid", _number),
    "gid": ("gid", _number),
    "umask": ("umask", _octal),
    "fmask": ("fmask", _octal),
    "dmask": ("dmask", _octal),
    "fsname": ("fsname", _text),
}


def _add_header(http: HttpSettings, text: str) -> HttpSettings:
    return replace(http, headers=(*http.headers, parse_header("header", text)))


def _set_user(http: HttpSettings, text: str) -> HttpSettings:
    if ":" in text:
        raise UsageError("option 'user': expected a name alone; the password is read from password-file=FILE")
    return replace(http, user=text)


def _small_number(name: str, text: str, least: int, most: int) -> int:
    number = _number(name, text)
    if not least <= number <= most:
        raise UsageError(f"option {name!r}: {text!r}, expected {least} to {most}")
    return number


_HTTP_TWINS: dict[str, tuple[str, _Parser]] = {
    "cache": ("http_cache_bytes", parse_size),
    "readahead": ("http_readahead_bytes", parse_size),
    "refresh": ("http_refresh_s", _pause),
}
"""Words that set two fields, whose defaults differ where the source is a URL."""

_HTTP_SETTERS: dict[str, Callable[[HttpSettings, str], HttpSettings]] = {
    "header": _add_header,
    "header-file": lambda http, text: replace(http, header_file=_path("header-file", text)),
    "user": _set_user,
    "password-file": lambda http, text: replace(http, password_file=_path("password-file", text)),
    "cacert": lambda http, text: replace(http, ca_file=_path("cacert", text)),
    "retries": lambda http, text: replace(http, retries=_small_number("retries", text, 0, 100)),
    "connections": lambda http, text: replace(http, connections=_small_number("connections", text, 1, 64)),
    "cache-dir": lambda http, text: replace(http, cache_directory=_path("cache-dir", text)),
    "cache-dir-size": lambda http, text: replace(http, cache_directory_bytes=parse_size("cache-dir-size", text)),
}
