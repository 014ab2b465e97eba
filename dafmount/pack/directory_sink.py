"""A FilesDaf directory, written under a temporary name beside its own and renamed when it is complete.

Owns that directory and the replacing of an old one. Knows nothing of what the files hold. Belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from dafmount.pack.durable import default_mode, exchange, rename_new, sync_tree

_BUFFER_BYTES = 1 << 20


class DirectorySink:
    """A directory at `target`. See Sink."""

    wants_metadata = True

    def __init__(self, target: Path, *, overwrite: bool) -> None:
        """`target`'s parent must exist; whether `target` may be replaced has been checked."""
        self._target = target
        self._overwrite = overwrite
        self._temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        self._made = {self._temporary}
        self._open: BinaryIO | None = None

    def make_directory(self, path: str) -> None:
        """See Sink."""
        (self._temporary / path).mkdir(parents=True, exist_ok=True)

    def create(self, path: str) -> BinaryIO:
        """See Sink."""
        full = self._temporary / path
        if full.parent not in self._made:
            full.parent.mkdir(parents=True, exist_ok=True)
            self._made.add(full.parent)
        self._open = full.open("xb", buffering=_BUFFER_BYTES)
        return self._open

    def commit(self, point_of_no_return: Callable[[], None]) -> None:
        """See Sink. An old directory is removed after the new one has taken its name."""
        os.chmod(self._temporary, default_mode(executable=True))
        sync_tree(self._temporary)
        point_of_no_return()
        if self._overwrite and self._target.is_dir():
            aside = Path(f"{self._temporary}-old")
            self._temporary = exchange(self._temporary, self._target, aside)
        else:
            rename_new(self._temporary, self._target)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._open is not None:
            with contextlib.suppress(OSError):  # its last bytes, which nobody wants, may not fit the disk
                self._open.close()
        # What was not committed, or the directory that was replaced.
        shutil.rmtree(self._temporary, ignore_errors=True)
