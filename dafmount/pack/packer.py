"""Packs a data set, or unpacks it: from a source's name to a destination's.

Owns the steps and nothing of their details. One call belongs to one thread, which starts and ends others.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from dafmount.daf.sources import open_source
from dafmount.errors import CorruptDescriptor, NoRoom, UsageError
from dafmount.pack import pipeline
from dafmount.pack.destination import Destination, check_apart, check_free, open_sink, parse_destination
from dafmount.pack.durable import FULL
from dafmount.pack.pipeline import Begin, Part
from dafmount.pack.plan import Document, Plan, Planned, ShardFile, make_plan
from dafmount.pack.settings import PackSettings, Selection
from dafmount.pack.sink import OutFile, Sink
from dafmount.shard.writer import ShardWriter
from dafmount.source.resolve import Resolved, daf_roots
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive


class Listener(Protocol):
    """Who wants to know how far it is."""

    def planned(self, plan: Plan) -> None:
        """What will be written; `plan.size` is the sum of what `advanced` will be told."""

    def advanced(self, size: int) -> None:
        """So many more flat bytes are done."""

    def committing(self) -> None:
        """From here on nothing is taken back."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to do."""

    source: str
    destination: str
    settings: PackSettings | None
    """None: everything flat."""
    selection: Selection
    jobs: int = 1
    overwrite: bool = False


def pack(order: Order, listener: Listener) -> None:
    """Writes the destination, which appears only when it is complete, or raises and leaves things as they were.

    Raises UsageError, DestinationExists, DestinationBusy, NoRoom, whatever is wrong with the source, or the OSError.
    """
    destination = parse_destination(order.destination)
    check_free(destination, overwrite=order.overwrite)
    resolved = open_source(order.source, spool=Spool(), verify="all")
    try:
        _check_one(resolved)
        if "://" not in order.source:
            check_apart(destination, Path(resolved.archive.name))
        plan = make_plan(resolved.archive, resolved.root, order.settings, order.selection)
        listener.planned(plan)
        try:
            _write(plan, destination, order, listener)
        except OSError as error:
            if error.errno in FULL:
                raise NoRoom(f"{destination.display}: {error.strerror}; nothing was written") from error
            raise
    finally:
        resolved.archive.close()


def _check_one(resolved: Resolved) -> None:
    if not resolved.is_daf:
        archive = resolved.archive
        if not isinstance(archive, ZipArchive):
            raise UsageError(f"{resolved.display}: a folder of data sets; choose one")
        groups = ", ".join(daf_roots(archive))
        raise UsageError(f"{resolved.display}: has several data sets; choose one with #/group: {groups}")


def _write(plan: Plan, destination: Destination, order: Order, listener: Listener) -> None:
    with open_sink(destination, overwrite=order.overwrite) as sink:
        if sink.wants_metadata:
            for path in plan.directories:
                sink.make_directory(path)
        _write_files(plan.files, sink, order.jobs, listener)
        if sink.wants_metadata:
            out = sink.create("metadata.json")
            out.write(plan.metadata)
            out.close()
        sink.commit(listener.committing)


def _write_files(files: tuple[Planned, ...], sink: Sink, jobs: int, listener: Listener) -> None:
    out: OutFile
    for step in pipeline.run(files, jobs):
        if isinstance(step, Begin):
            out = sink.create(step.file.path)
            writer = _writer(step.file, out)
        elif isinstance(step, Part):
            writer.write(step)
            listener.advanced(step.size)
        else:
            writer.finish()
            out.close()


def _writer(file: Planned, out: OutFile) -> _FlatWriter | _PackedWriter:
    return _PackedWriter(file, out) if isinstance(file, ShardFile) else _FlatWriter(file, out)


def _scratch() -> IO[bytes]:
    """An unnamed file on a disk; /tmp is often in memory."""
    return tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or "/var/tmp")


class _FlatWriter:
    """Writes flat bytes, and counts the lines of a text."""

    def __init__(self, file: Planned, out: OutFile) -> None:
        self._path = file.path
        self._out = out
        self._expected_lines = None if isinstance(file, Document | ShardFile) else file.n_lines
        self._n_lines = 0
        self._ends_in_newline = True

    def write(self, part: Part) -> None:
        data = part.data
        assert not isinstance(data, list)
        self._out.write(data)
        if self._expected_lines is not None and data:
            self._n_lines += bytes(data).count(b"\n")
            self._ends_in_newline = data[-1] == 10

    def finish(self) -> None:
        found = self._n_lines + (not self._ends_in_newline)
        if self._expected_lines is not None and found != self._expected_lines:
            raise CorruptDescriptor(f"{self._path}: {found} lines, expected {self._expected_lines}")


class _PackedWriter:
    """Writes a shard."""

    def __init__(self, file: ShardFile, out: OutFile) -> None:
        packing = file.packing
        level = packing.compression_level or 0
        self._shard = ShardWriter(
            out, file.shape, packing.chunk_shape, file.itemsize, packing.compression, level, _scratch
        )

    def write(self, part: Part) -> None:
        assert isinstance(part.data, list)
        for encoded in part.data:
            self._shard.append_encoded(*encoded)

    def finish(self) -> None:
        self._shard.finish()
