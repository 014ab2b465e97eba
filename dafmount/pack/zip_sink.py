"""A new ZIP archive, written to a temporary file beside its name and renamed when it is complete.

Owns that file. Knows nothing of what the entries hold. Belongs to one thread.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from dafmount.pack.durable import default_mode, rename_new, sync_file
from dafmount.pack.zip_writer import EntryFile, ZipWriter, end_records

BUFFER_BYTES = 1 << 20


class ZipSink:
    """An archive at `target`, every path in it under `prefix`. See Sink."""

    wants_metadata = False

    def __init__(self, target: Path, prefix: str, *, overwrite: bool) -> None:
        """`target`'s parent must exist; whether `target` may be replaced has been checked. `prefix` ends in `/`."""
        self._target = target
        self._prefix = prefix
        self._overwrite = overwrite
        fd, name = tempfile.mkstemp(prefix=f".{target.name}.partial-", dir=target.parent)
        self._temporary: Path | None = Path(name)
        self._out = os.fdopen(fd, "w+b", buffering=BUFFER_BYTES)
        self._writer = ZipWriter(self._out)

    def make_directory(self, path: str) -> None:
        """Archives have files only."""

    def create(self, path: str) -> EntryFile:
        """See Sink."""
        return self._writer.create(self._prefix + path)

    def commit(self, point_of_no_return: Callable[[], None]) -> None:
        """See Sink."""
        assert self._temporary is not None
        at, directory = self._writer.size, self._writer.directory
        self._out.seek(at)
        self._out.write(directory + end_records(at + len(directory), at, len(directory), self._writer.n_entries))
        self._out.flush()
        os.fchmod(self._out.fileno(), default_mode(executable=False))
        os.fsync(self._out.fileno())
        point_of_no_return()
        if self._overwrite:
            os.rename(self._temporary, self._target)
            sync_file(self._target.parent)
        else:
            rename_new(self._temporary, self._target)
        self._temporary = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._temporary is not None:
            self._temporary.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # its last bytes, which nobody wants, may not fit the disk
            self._out.close()
