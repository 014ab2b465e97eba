"""How messages of this room name a chunk. Owns that one type; threads may share it."""

from __future__ import annotations

from collections.abc import Callable

Where = str | Callable[[], str]
"""The name, or what makes it, where making a text for each chunk would cost more than decoding the chunk."""


def text_of(where: Where) -> str:
    """The name as text, for a message."""
    return where if isinstance(where, str) else where()
