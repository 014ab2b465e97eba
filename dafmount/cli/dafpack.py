"""The command dafpack: packs and unpacks data sets."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from dafmount import __version__
from dafmount.cli import exits
from dafmount.errors import DafmountError, UsageError

if TYPE_CHECKING:
    from tqdm import tqdm

    from dafmount.pack.plan import Plan

DESCRIPTION = """Write a Daf data set packed (chunked and compressed), or flat with --unpack.

SOURCE is anything that dafmount opens: a FilesDaf directory, x.daf.zip, x.dafs.zip#/group.
DESTINATION's name says what is written:
  x.daf              a FilesDaf directory (so does any other name without .zip)
  x.daf.zip          a ZipDaf archive
  x.dafs.zip#/group  a group, appended to the archive, which is created when it is missing

The destination appears under its name only when it is complete; when dafpack fails or is stopped, everything is as it
was before. A group is appended in place: old groups stay readable all the time."""

EPILOG = """Properties whose columns are smaller than a chunk stay flat, as the Daf packages have it.

codecs and their levels: blosc_zstd_bitshuffle and blosc_lz4_bitshuffle 1-9, zstd and zstd_bitshuffle 1-22,
gzip and gzip_shuffle 1-9

"""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stopped(KeyboardInterrupt):
    """A signal asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="dafpack: %(message)s", level=logging.WARNING)
    _on_signals(_stop)
    try:
        return _run(arguments)
    except (DafmountError, OSError) as error:
        print(f"dafpack: {' '.join(str(error).split())}", file=sys.stderr)
        return exits.exit_code(error)
    except BaseException as error:
        stopped = _stopped_by(error)
        if stopped is None:
            raise
        print("dafpack: stopped; nothing was written", file=sys.stderr)
        return exits.INTERRUPTED + stopped.number


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it knows is what --help and the manual page say."""
    parser = argparse.ArgumentParser(
        prog="dafpack",
        usage="dafpack [OPTION...] SOURCE DESTINATION",
        description=DESCRIPTION,
        epilog=EPILOG + exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="what to read")
    parser.add_argument("destination", metavar="DESTINATION", help="what to write")
    parser.add_argument("--unpack", action="store_true", help="write everything flat")
    parser.add_argument(
        "--target-chunk-kb",
        type=int,
        metavar="KB",
        help="uncompressed size of a chunk, in units of 1024 bytes; smaller columns stay flat "
        "(8; also DAF_PACKED_TARGET_CHUNK_KB)",
    )
    parser.add_argument(
        "--compression", metavar="CODEC", help="see below (blosc_zstd_bitshuffle; also DAF_PACKED_COMPRESSION)"
    )
    parser.add_argument(
        "--compression-level", type=int, metavar="N", help="see below (5; also DAF_PACKED_COMPRESSION_LEVEL)"
    )
    parser.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="PATTERN",
        help="write only properties that a pattern matches, such as 'vectors/cell/*' or 'matrices/*/UMIs' (quoted, for "
        "the shell; * matches / too); may be repeated; axes are always written",
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="do not write these; wins over --include"
    )
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="threads that compress (one for each processor)")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the whole of an existing directory or archive; never a group"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress bar and no notes")
    parser.add_argument("--version", action="version", version=f"dafpack {__version__}")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from dafmount.pack.packer import Order, pack
    from dafmount.pack.settings import Selection, make_settings

    jobs = len(os.sched_getaffinity(0)) if arguments.jobs is None else arguments.jobs
    if jobs < 1:
        raise UsageError(f"--jobs {jobs}: expected at least 1")
    how = (arguments.target_chunk_kb, arguments.compression, arguments.compression_level)
    if arguments.unpack and how != (None, None, None):
        raise UsageError("--unpack takes no chunk size, compression or level")
    order = Order(
        arguments.source,
        arguments.destination,
        None if arguments.unpack else make_settings(os.environ, *how),
        Selection(tuple(arguments.include), tuple(arguments.exclude)),
        jobs,
        arguments.overwrite,
    )
    terminal = _Terminal(arguments.quiet)
    try:
        pack(order, terminal)
    finally:
        terminal.close()
    return exits.OK


class _Terminal:
    """Shows progress where there is a terminal, and says what is left out."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._bar: tqdm[NoReturn] | None = None

    def planned(self, plan: Plan) -> None:
        """See Listener."""
        if self._is_quiet:
            return
        if plan.left_out:
            more = f" and {len(plan.left_out) - 5} more" if len(plan.left_out) > 5 else ""
            print(
                f"dafpack: left out, as no part of the data set: {', '.join(map(ascii, plan.left_out[:5]))}{more}",
                file=sys.stderr,
            )
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=plan.size, unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True)

    def advanced(self, size: int) -> None:
        """See Listener."""
        if self._bar is not None:
            self._bar.update(size)

    def committing(self) -> None:
        """See Listener."""
        _on_signals(signal.SIG_IGN)

    def close(self) -> None:
        """The bar stays as it is, on a line of its own."""
        if self._bar is not None:
            self._bar.close()


def _stop(number: int, frame: FrameType | None) -> None:
    _on_signals(signal.SIG_IGN)  # nothing interrupts the cleaning up
    raise _Stopped(number)


def _stopped_by(error: BaseException | None) -> _Stopped | None:
    """The signal behind an error: where one interrupts a lock, what Python does to clean up fails on top of it."""
    while error is not None and not isinstance(error, _Stopped):
        error = error.__context__
    return error


def _on_signals(action: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    for number in _SIGNALS:
        # One that was ignored from the start, as under nohup, stays so.
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, action)


if __name__ == "__main__":
    sys.exit(main())
