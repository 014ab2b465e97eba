"""What a check found: values, and the sinks that collect them.

Owns how a finding is said. Must not know what is checked. A sink belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from dafmount.source.names import shown

Severity: TypeAlias = Literal["error", "warning"]
"""error: contradicts the format, or cannot be read. warning: allowed, but most likely not what was meant."""

MAX_PER_FILE = 20
"""Findings of one file that are listed; a lost block makes one for each of its chunks."""


class Finding(NamedTuple):
    """One fault."""

    archive: str
    path: str
    """Within the archive; '' for the archive as a whole."""
    chunk: int | None
    severity: Severity
    message: str
    """What was found and what was expected, on one line."""

    @property
    def line(self) -> str:
        """The whole as one line."""
        parts = [shown(self.archive)]
        if self.path:
            parts.append(shown(self.path))
        if self.chunk is not None:
            parts.append(f"chunk {self.chunk}")
        if self.severity == "warning":
            parts.append("warning")
        return ": ".join([*parts, self.message])


Emit: TypeAlias = Callable[[Finding], None]


class Sink:
    """Where the findings about one file of an archive go; no more than some of them are listed."""

    def __init__(self, archive: str, path: str, emit: Emit) -> None:
        self.archive = archive
        self.path = path
        self._emit = emit
        self._count = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found so far."""
        return self._count == 0

    def error(self, message: str | Exception, chunk: int | None = None) -> None:
        """What contradicts the format or cannot be read; an exception's own naming of the place is left out."""
        self._add(message, chunk, "error")

    def warning(self, message: str) -> None:
        """What is allowed, but most likely not meant."""
        self._add(message, None, "warning")

    def close(self) -> None:
        """Say how many were not listed."""
        more = self._count - MAX_PER_FILE
        if more > 0:
            self._emit(Finding(self.archive, self.path, None, "error", f"{more} more faults are not listed"))
        self._count = min(self._count, MAX_PER_FILE)

    def _add(self, message: str | Exception, chunk: int | None, severity: Severity) -> None:
        self._count += 1
        if self._count <= MAX_PER_FILE:
            text = " ".join(str(message).split()) or type(message).__name__
            text = self._without_place(text, chunk)
            self._emit(Finding(self.archive, self.path, chunk, severity, text))

    def _without_place(self, text: str, chunk: int | None) -> str:
        archive, path = shown(self.archive), shown(self.path)
        for place in (f"{archive}: {path}: ", f"{archive}/{path}: ", f"{path}: ", f"{archive}: "):
            if len(place) > 2:
                text = text.removeprefix(place)
        return text if chunk is None else text.removeprefix(f"chunk {chunk}: ")
