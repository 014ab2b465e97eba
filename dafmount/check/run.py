"""A whole source: opened, every data set in it checked, its archive's own entries too.

The room's front door. Blocks; the caller's thread emits findings and progress.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from dafmount.check.context import Context, Counts
from dafmount.check.dataset import DatasetCheck
from dafmount.check.findings import Emit, Finding, Sink
from dafmount.check.outer import check_entries
from dafmount.check.work import Progress, Work
from dafmount.daf.files_layout import FilesLayout
from dafmount.daf.sources import open_source
from dafmount.errors import Corrupt, UnsupportedFormat
from dafmount.source.base import Archive
from dafmount.source.resolve import Resolved, daf_roots
from dafmount.source.spool import Spool
from dafmount.source.zip import ZipArchive
from dafmount.tree.build import Style
from dafmount.tree.cache import ChunkCache

CACHE_BYTES = 16 << 20
SPOOL_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Summary:
    """How much was checked, and what came of it."""

    source: str
    data_sets: int
    axes: int
    scalars: int
    properties: int
    files: int
    shards: int
    chunks: int
    read_bytes: int
    errors: int
    warnings: int


class _Tally:
    """Counts findings on their way; what two passes find is told once."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self.errors = 0
        self.warnings = 0
        self._told: set[Finding] = set()

    def __call__(self, finding: Finding) -> None:
        if finding in self._told:
            return
        self._told.add(finding)
        if finding.severity == "error":
            self.errors += 1
        else:
            self.warnings += 1
        self._emit(finding)


def check(
    source: str,
    emit: Emit,
    *,
    jobs: int = 1,
    quick: bool = False,
    progress: Progress | None = None,
    spool: Path | None = None,
    spool_bytes: int = SPOOL_BYTES,
) -> Summary:
    """Check everything there is in `source`, and `emit` each finding as it is made.

    With `quick` no payload is read: sizes, descriptors, directories and headers only. Raises what keeps the source from
    being read at all (NotFound, NotADaf, UnsupportedFormat, SourceDenied and so on); damage is a finding.
    """
    tally = _Tally(emit)
    counts = Counts()
    with Work(jobs, progress) as work:
        display = source
        # Unless at a glance, the checksums of all entries are checked once, before anything else.
        verify = "auto" if quick else "off"
        try:
            resolved = open_source(source, spool=Spool(spool, spool_bytes), verify=verify)
            display = resolved.display
        except Corrupt as error:
            Sink(source, "", tally).error(error)
        else:
            try:
                _check_archive(resolved, tally, work, counts, quick=quick)
            finally:
                resolved.archive.close()
        read_bytes = work.done_bytes
    return Summary(display, **asdict(counts), read_bytes=read_bytes, errors=tally.errors, warnings=tally.warnings)


def _check_archive(resolved: Resolved, emit: Emit, work: Work, counts: Counts, *, quick: bool) -> None:
    archive = resolved.archive
    roots = [resolved.root]
    if not resolved.is_daf and isinstance(archive, ZipArchive):
        roots = daf_roots(archive)
    if not quick:
        work.expect(sum(_total_bytes(archive, root) for root in roots))
    if isinstance(archive, ZipArchive):
        if not quick:
            work.expect(archive.source.size)
        check_entries(archive, resolved.root, emit, work, quick=quick)
    for root in roots:
        layout = FilesLayout(archive, root)
        style = Style(ChunkCache(CACHE_BYTES))
        has_metadata = not isinstance(archive, ZipArchive)
        dataset = DatasetCheck(Context(layout, style, emit, work, quick, counts), has_metadata)
        try:
            dataset.run()
        except UnsupportedFormat as error:
            if len(roots) == 1:
                raise
            Sink(archive.name, layout.path("daf.json"), emit).error(error)


def _total_bytes(archive: Archive, path: str) -> int:
    """The bytes of all files below a directory."""
    total = 0
    for entry in archive.listdir(path):
        if entry.is_directory:
            total += _total_bytes(archive, f"{path}/{entry.name}" if path else entry.name)
        else:
            total += entry.size or 0
    return total
