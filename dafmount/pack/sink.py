"""The seam between what is written and where to: a sink takes files one after the other and shows them all at once."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self


class OutFile(Protocol):
    """A file being written."""

    def write(self, data: bytes | memoryview, /) -> int:
        """All of `data`, at the present position."""

    def seek(self, offset: int, /) -> int:
        """Go to a position, which may be beyond the end."""

    def tell(self) -> int:
        """The present position."""

    def close(self) -> None:
        """The file is complete."""


class Sink(Protocol):
    """A destination. Used as a context manager: what is not committed when it is left is taken back."""

    @property
    def wants_metadata(self) -> bool:
        """Whether it has a metadata.json, and directories."""

    def make_directory(self, path: str) -> None:
        """A directory that is to be there even when it is empty."""

    def create(self, path: str) -> OutFile:
        """A new file; it must be closed before the next one."""

    def commit(self, point_of_no_return: Callable[[], None]) -> None:
        """Make everything durable and visible; the callback is called when it cannot be taken back any more."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
