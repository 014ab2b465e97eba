"""The command dafcheck: reads everything in a source and says what is wrong with it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dafmount import __version__
from dafmount.cli.progress import ProgressLine, size_text
from dafmount.errors import DafmountError

if TYPE_CHECKING:
    from dafmount.check.findings import Finding
    from dafmount.check.run import Summary

CLEAN = 0
FAULTS = 1
NOT_READ = 2

DESCRIPTION = """Read everything in a Daf data set and report each fault with archive, path and chunk.

SOURCE is a FilesDaf directory, x.daf.zip, x.dafs.zip#/group, or x.dafs.zip (every group). Checked are descriptors
against sizes and axes, every checksum, the Zarr index of a shard against its ZIP directory, decoded chunks and their
padding, sparse indices, truth values, UTF-8, metadata.json, and the entries of a ZIP archive."""

EPILOG = """An error contradicts the format or cannot be read. A warning, such as a file that no descriptor speaks
of, is allowed but most likely not meant, and does not count for the exit code.

exit codes:
  0  no errors
  1  errors were found
  2  the source could not be read, or the command line makes no sense"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return _check(arguments.source, arguments.jobs, arguments.quick, arguments.json, arguments.quiet)
    except (DafmountError, OSError) as error:
        print(f"dafcheck: {' '.join(str(error).split())}", file=sys.stderr)
        return NOT_READ
    except KeyboardInterrupt:
        print("dafcheck: interrupted", file=sys.stderr)
        return NOT_READ


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it knows is what --help and the manual page say."""
    parser = argparse.ArgumentParser(
        prog="dafcheck",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="what to check")
    parser.add_argument("--quick", action="store_true", help="structure only: read no payloads and decode no chunks")
    parser.add_argument(
        "-j", "--jobs", type=_jobs, default=_default_jobs(), metavar="N", help="threads (one for each processor)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object: findings and summary")
    parser.add_argument("-q", "--quiet", action="store_true", help="no summary and no progress, findings only")
    parser.add_argument("--version", action="version", version=f"dafcheck {__version__}")
    return parser


def _default_jobs() -> int:
    return len(os.sched_getaffinity(0))


def _jobs(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise argparse.ArgumentTypeError(f"{text!r}, expected 1 to 1024")
    return int(text)


def _check(source: str, jobs: int, quick: bool, as_json: bool, quiet: bool) -> int:
    from dafmount.check.run import check

    found: list[Finding] = []
    with ProgressLine(is_wanted=not quiet) as line:

        def emit(finding: Finding) -> None:
            if as_json:
                found.append(finding)
            else:
                line.clear()
                print(finding.line, flush=True)

        spool = os.environ.get("TMPDIR")
        summary = check(
            source, emit, jobs=jobs, quick=quick, progress=line.update, spool=Path(spool) if spool else None
        )
    if as_json:
        print(json.dumps({"findings": [f._asdict() for f in found], "summary": asdict(summary)}, indent=1))
    elif not quiet:
        print(_summary_text(summary), file=sys.stderr)
    return FAULTS if summary.errors else CLEAN


def _summary_text(summary: Summary) -> str:
    counts = [
        _counted(summary.properties, "property", "properties"),
        _counted(summary.files, "file", "files"),
        _counted(summary.shards, "shard", "shards"),
        _counted(summary.chunks, "chunk", "chunks"),
        f"{size_text(summary.read_bytes)} read",
    ]
    result = "clean" if not summary.errors else _counted(summary.errors, "error", "errors")
    if summary.warnings:
        result += ", " + _counted(summary.warnings, "warning", "warnings")
    return f"{summary.source}: {result} ({', '.join(counts)})"


def _counted(n: int, one: str, many: str) -> str:
    return f"{n} {one if n == 1 else many}"


if __name__ == "__main__":
    sys.exit(main())
