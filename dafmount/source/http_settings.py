"""How web servers are talked to: every setting of an HTTP source in one frozen value.

Knows nothing of the library that does the talking, so that it costs nothing to import before the fork.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from dafmount.errors import UsageError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Settings of one HTTP source. What may hold a secret is left out of `repr`."""

    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Sent with every request to the server named by the URL, and to no other."""
    header_file: Path | None = None
    """A file of such headers, one `Name: value` a line."""
    user: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    """A file whose first line is the password."""
    ca_file: Path | None = None
    """Certificates that are trusted instead of the system's."""
    timeout_s: float = 120.0
    """The longest that one read may take, retries included; a server silent for a third of it is asked again."""
    retries: int = 4
    """How often a request is repeated after a fault that may pass."""
    connections: int = 8
    """Most requests under way at the same time."""
    gap_bytes: int = 8 * KIB
    """The largest gap between two ranges that are fetched by one request."""
    ahead_bytes: int = 64 * MIB
    """Most bytes fetched ahead of the readers and not yet handed out, for all files together."""
    cache_directory: Path | None = None
    """Where fetched ranges are kept from mount to mount."""
    cache_directory_bytes: int = 10 * GIB
    """Most bytes kept there."""


def parse_header(option: str, text: str) -> tuple[str, str]:
    """Name and value of `Name: value`; raises UsageError, which does not quote it."""
    name, colon, value = text.partition(":")
    name, value = name.strip(), value.strip()
    if not colon or not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", name):  # 5.1
        raise UsageError(f"option {option!r}: expected a header such as 'X-Key: abc'")
    if not value.isascii() or not value.isprintable():
        raise UsageError(f"option {option!r}: the value of {name} holds what a header cannot")
    return name, value
