"""What the checks of one Daf share: where it lies, how it is read, and where findings go.

Must not know what is checked. Belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dafmount.check.findings import Emit, Sink
from dafmount.check.work import Work
from dafmount.daf.descriptor import JSON, parse_json
from dafmount.daf.files_layout import MAX_DESCRIPTOR_BYTES, FilesLayout
from dafmount.errors import Corrupt, NotFound, UnsupportedFormat
from dafmount.source.base import Entry
from dafmount.tree.build import Style
from dafmount.tree.content import Content

BLOCK_BYTES = 4 << 20
"""How much of a flat file is read at a time."""

FAULTS = (Corrupt, NotFound, UnsupportedFormat, OSError)
"""What says that something within a data set is wrong, rather than that it cannot be checked any further."""


@dataclass(slots=True)
class Counts:
    """How much was checked."""

    data_sets: int = 0
    axes: int = 0
    scalars: int = 0
    properties: int = 0
    files: int = 0
    shards: int = 0
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Context:
    """The check of one Daf, to all its parts."""

    layout: FilesLayout
    style: Style
    emit: Emit
    work: Work
    quick: bool
    counts: Counts

    def sink(self, path: str) -> Sink:
        """Where findings about a file of this Daf go."""
        return Sink(self.layout.archive.name, self.layout.path(path), self.emit)

    def entries(self, path: str) -> list[Entry]:
        """A directory's entries; none where it is not there, which ZIP archives lose when it is empty."""
        try:
            return self.layout.archive.listdir(self.layout.path(path))
        except NotFound:
            return []
        except OSError as error:
            self.sink(path).error(error)
            return []

    def read_blocks(self, source: Content) -> Iterator[bytes]:
        """A file's bytes, some at a time."""
        for block in file_blocks(source):
            self.work.advance(len(block))
            yield block

    def read_json(self, path: str, sink: Sink, limit: int = MAX_DESCRIPTOR_BYTES) -> dict[str, JSON] | None:
        """The JSON object in a file; None where there is none, which was reported."""
        try:
            raw = self.layout.archive.read_small(self.layout.path(path), limit)
            self.work.advance(len(raw))
            fields = parse_json(raw, path)
            raw.decode("utf-8")
            return fields
        except UnicodeDecodeError as error:
            sink.error(f"no valid UTF-8: {error.reason}")
        except FAULTS as error:
            sink.error(error)
        return None


def file_blocks(source: Content, step: int = BLOCK_BYTES) -> Iterator[bytes]:
    """A file's bytes, some at a time."""
    size = source.size
    for offset in range(0, size, step):
        yield bytes(source.read(offset, min(step, size - offset)))
