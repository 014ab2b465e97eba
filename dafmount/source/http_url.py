"""URLs taken apart: what is asked for, what may be shown, and what must not be.

Pure functions and values. A URL's user, password and query may be secrets; `shown` has none of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from urllib.parse import quote, unquote, urljoin, urlsplit

from dafmount.errors import UsageError

SCHEMES = ("http", "https")

_SAFE = "/%:@!$&'()*+,;=~-._"
_SAFE_IN_QUERY = _SAFE + "?[]"
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Url:
    """An absolute http or https URL without its fragment."""

    scheme: str
    host: str
    """In lower case; an IPv6 address has no brackets."""
    port: int
    path: str
    """Percent-encoded; begins with `/`."""
    query: str = field(default="", repr=False)
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """As messages and /proc/mounts show it: without user, password and query."""
        return f"{self.scheme}://{self._authority}{self.path}"

    @property
    def requested(self) -> str:
        """As it is sent; may hold secrets in its query."""
        return f"{self.shown}?{self.query}" if self.query else self.shown

    @property
    def origin(self) -> tuple[str, str, int]:
        """What a secret belongs to."""
        return self.scheme, self.host, self.port

    def below(self, path: str) -> Url:
        """The URL of a file in this directory, `path` not encoded yet. The query stays: it may be what lets in."""
        encoded = "/".join(quote(os.fsencode(part), safe="") for part in path.split("/"))
        return replace(self, path=f"{self.path.rstrip('/')}/{encoded}")

    def may_have_secrets_of(self, other: Url) -> bool:
        """Whether what was meant for `other` may be sent here: the same server, or the same after a step up to TLS."""
        if self.origin == other.origin:
            return True
        stepped_up = (other.scheme, self.scheme) == ("http", "https")
        default_ports = (other.port, self.port) == (_DEFAULT_PORTS["http"], _DEFAULT_PORTS["https"])
        return self.host == other.host and stepped_up and default_ports

    @property
    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"


def is_url(source: str) -> bool:
    """Whether a source as typed is a URL that this program reads."""
    return source.lower().startswith(("http://", "https://"))


def parse_url(text: str) -> Url:
    """The URL in `text`; what a URL may not hold (a blank, letters beyond ASCII) is percent-encoded.

    Raises UsageError.
    """
    try:
        parts = urlsplit(text)
        scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
        if host is not None and not host.isascii():
            host = host.encode("idna").decode("ascii")
    except (ValueError, UnicodeError):
        # The message of the error may hold what must not be shown.
        raise UsageError(f"{_shown_at_best(text)}: no valid URL") from None
    if scheme not in SCHEMES:
        raise UsageError(f"{_shown_at_best(text)}: no http or https URL")
    if not host or any(character in host for character in " \t\r\n/\\<>\"'%"):
        raise UsageError(f"{_shown_at_best(text)}: a URL without a valid host")
    return Url(
        scheme,
        host,
        _DEFAULT_PORTS[scheme] if port is None else port,
        quote(os.fsencode(parts.path), safe=_SAFE) or "/",
        quote(os.fsencode(parts.query), safe=_SAFE_IN_QUERY),
        None if parts.username is None else unquote(parts.username),
        None if parts.password is None else unquote(parts.password),
    )


def split_group(source: str) -> tuple[str, str | None]:
    """The URL and the group after `#/`, without `/` at its ends; raises UsageError."""
    url, mark, fragment = source.partition("#")
    if not mark:
        return url, None
    group = fragment.strip("/")
    if not fragment.startswith("/") or not group:
        raise UsageError(
            f"{_shown_at_best(url)}: after # a group is expected, as in x.dafs.zip#/group (# in a name is written %23)"
        )
    return url, group


def without_secrets(source: str) -> str:
    """A source as typed, without a URL's user, password and query."""
    if not is_url(source):
        return source
    url, mark, fragment = source.partition("#")
    return _shown_at_best(url) + mark + fragment


def secrets_in(source: str) -> list[str]:
    """The parts of a source as typed that must not be shown."""
    if not is_url(source):
        return []
    rest = source.partition("#")[0].partition("://")[2]
    authority, _, query = rest.partition("?")
    user_information, at, _ = authority.partition("/")[0].rpartition("@")
    return [secret for secret in (user_information if at else "", query) if secret]


def redirected(url: Url, location: str) -> Url:
    """Where a redirect leads; raises UsageError for another scheme or a broken URL."""
    target = parse_url(urljoin(url.requested, location))
    return target


def _shown_at_best(text: str) -> str:
    """A URL that perhaps cannot be parsed, without what may be secret."""
    head, mark, rest = text.partition("://")
    authority, slash, path = rest.partition("?")[0].partition("/")
    shown = f"{head}{mark}{authority.rpartition('@')[2]}{slash}{path}"
    return shown if shown.isprintable() else ascii(shown)
