"""The command scripts/bench: which lines, how large, where the data lies; the table and the JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from benchmarks.bench import Bench
from benchmarks.data import FULL, QUICK, Data
from benchmarks.figures import HEADING, Figure, rows
from benchmarks.lines import LINES
from benchmarks.mounting import CannotMeasure
from benchmarks.peers import Peers
from dafmount import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; 0 whatever the figures are, since they depend on the machine."""
    arguments = make_parser().parse_args(argv)
    place = arguments.data.absolute()
    bench = Bench(Data(place, QUICK if arguments.quick else FULL), Peers(place if arguments.peers else None))
    before = os.getloadavg()[0]
    figures: list[Figure] = []
    print(HEADING, flush=True)
    for line in arguments.lines:
        try:
            measured = LINES[line](bench)
        except CannotMeasure as error:
            measured = [Figure(line, (LINES[line].__doc__ or "").rstrip("."), None, "", None, str(error))]
        for figure in measured:
            print("\n".join(rows(figure)), flush=True)
        figures += measured
    if before > 0.5:
        print(f"The machine had other work to do (load {before:.1f} at the start): the figures may be too low.")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report(figures, before, arguments.quick), indent=1) + "\n")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it knows is what --help says."""
    parser = argparse.ArgumentParser(
        prog="bench",
        description="Measures dafmount against what this machine does without it, as ratios taken in one run.",
        allow_abbrev=False,
    )
    parser.add_argument("--lines", type=_lines, default=list(LINES), help=f"which, of {', '.join(LINES)} (all)")
    parser.add_argument(
        "--quick", action="store_true", help="little data, few rounds: shows that it works, not how fast"
    )
    parser.add_argument("--peers", action="store_true", help="measure ratarmount, zarr-python and mount-zip too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples there")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=Path(os.environ.get("TMPDIR") or "/var/tmp") / "dafmount-bench",
        help="where the data is made, and stays (%(default)s); some 15 GB for all lines",
    )
    return parser


def report(figures: list[Figure], load: float, is_quick: bool) -> dict[str, object]:
    """All that was measured, and on what."""
    return {
        "dafmount": __version__,
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "quick": is_quick,
        "machine": {
            "processors": os.cpu_count(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load_before": load,
        },
        "lines": [figure.as_json() for figure in figures],
    }


def _lines(text: str) -> list[str]:
    wanted = [line.strip() for line in text.split(",")]
    unknown = [line for line in wanted if line not in LINES]
    if unknown:
        raise argparse.ArgumentTypeError(f"there is no line {', '.join(unknown)}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
