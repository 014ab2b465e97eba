"""The properties of tests/faults/test_fuzz.py, for as long as one likes: fuzz.py [--seconds N] [--start N]

Each case follows from its number alone, so that --start with the number of a failure repeats it; only in which order a
web server's answers are damaged depends on threads. Also damages the small archives of the corpus, where that is there.
Ends with code 1 at the first failure, leaving the damaged data set.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import random
import resource
import shutil
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import faulty_web
import fuzzing
from dafmount.shard.codecs import CODECS
from dafmount.source.spool import Spool

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"
SMALL_BYTES = 2 << 20
MAX_GROWTH_KB = 500 * 1024
MAX_CASE_S = 60.0

Case = Callable[[Path, random.Random], None]


def archive_case(place: Path, choose: random.Random) -> None:
    """A damaged archive of a made data set."""
    seed = choose.choice(SEEDS)
    archive = place / "x.daf.zip"
    archive.write_bytes(fuzzing.damaged(fuzzing.as_archive(seed.stored, choose.choice((0, 8))), choose))
    for path, found in fuzzing.served(archive, Spool(), choose.choice(("auto", "all"))):
        if found is not None:
            fuzzing.check_truth(seed, path, found)


def shard_case(place: Path, choose: random.Random) -> None:
    """Damaged shards in a directory."""
    seed = choose.choice(SEEDS)
    stored = dict(seed.stored)
    for path in [path for path in stored if path.endswith(".zip")]:
        stored[path] = fuzzing.damaged(stored[path], choose)
    for path, found in fuzzing.served(write_tree(place / "x.daf", stored), Spool()):
        if found is not None and path not in fuzzing.MADE_UP and found != seed.truth[path]:
            raise AssertionError(f"{path} is served with wrong bytes")


def descriptor_case(place: Path, choose: random.Random) -> None:
    """Descriptors that make no sense."""
    stored = dict(choose.choice(SEEDS).stored)
    for path in [path for path in stored if path.endswith(".json")]:
        if choose.random() < 0.7:
            stored[path] = fuzzing.odd_descriptor(stored[path], choose)
    for _ in fuzzing.served(write_tree(place / "x.daf", stored), Spool(), layout=choose.choice(("1.0", "1.1"))):
        pass


def corpus_case(place: Path, choose: random.Random) -> None:
    """A damaged archive of the corpus."""
    original = choose.choice(sorted(CORPUS_TRUTH))
    archive = place / original.name
    archive.write_bytes(fuzzing.damaged(original.read_bytes(), choose))
    for path, found in fuzzing.served(archive, Spool(), "all"):
        if found is not None and path.rpartition("/")[2] not in fuzzing.MADE_UP:
            digest = hashlib.sha256(found).digest()
            if digest not in CORPUS_TRUTH[original]:
                raise AssertionError(f"{original.name}: {path} is served with wrong bytes")


def chunk_case(_: Path, choose: random.Random) -> None:
    """Damaged chunks of any codec."""
    for _n in range(100):
        fuzzing.check_chunk(choose.choice(list(CODECS)), choose.choice((None, 1, 2, 4, 8)), choose)


def web_case(_: Path, choose: random.Random) -> None:
    """A web server whose answers are damaged."""
    seed, name = choose.choice(SEEDS), choose.choice(("x.daf", "x.daf.zip"))
    archive = fuzzing.as_archive(seed.stored, choose.choice((0, 8)))
    files = {**faulty_web.as_web_directory(seed), "x.daf.zip": archive}
    web = faulty_web.Web(files, choose, choose.choice((0.02, 0.3)), is_checked=name.endswith(".zip"))
    with faulty_web.reached(web):
        for path, found in fuzzing.served(f"http://{faulty_web.HOST}/{name}", Spool(), http=faulty_web.SETTINGS):
            if found is not None:
                fuzzing.check_truth(seed, path, found)


def write_tree(root: Path, stored: dict[str, bytes]) -> Path:
    for path, data in stored.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(data)
    return root


def corpus_truth() -> dict[Path, set[bytes]]:
    """Digests of all that is served of the intact small archives, and of what they store."""
    truth: dict[Path, set[bytes]] = {}
    for archive in sorted(CORPUS.rglob("*.daf.zip")) if CORPUS.is_dir() else ():
        if archive.stat().st_size > SMALL_BYTES:
            continue
        shown = [data for _, data in fuzzing.served(archive, Spool()) if data is not None]
        with zipfile.ZipFile(archive) as stream:
            shown.extend(stream.read(name) for name in stream.namelist())
        truth[archive] = {hashlib.sha256(data).digest() for data in shown}
    return truth


SEEDS = fuzzing.seeds()
CORPUS_TRUTH = corpus_truth()


def main() -> int:
    """Run cases until the time is over; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    arguments = parser.parse_args()
    logging.getLogger("dafmount").setLevel(logging.CRITICAL)
    cases: list[Case] = [archive_case, shard_case, descriptor_case, chunk_case, web_case]
    if CORPUS_TRUTH:
        cases.append(corpus_case)
    end = time.monotonic() + arguments.seconds
    number, slowest = arguments.start, 0.0
    at_start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while time.monotonic() < end:
        place = Path(tempfile.mkdtemp(prefix="fuzz-"))
        case = cases[number % len(cases)]
        began = time.monotonic()
        try:
            case(place, random.Random(number))
            took = time.monotonic() - began
            assert took < MAX_CASE_S, f"took {took:.0f} s"
            growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start
            assert growth < MAX_GROWTH_KB, f"took {growth} kB of memory"
        except Exception:
            print(f"fuzz: case {number} ({case.__doc__}) failed; the data set is in {place}", file=sys.stderr)
            raise
        shutil.rmtree(place)
        slowest = max(slowest, took)
        number += 1
    growth_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - at_start) // 1024
    print(f"fuzz: {number - arguments.start} cases held; the slowest took {slowest:.2f} s; {growth_mb} MB at most")
    return 0


if __name__ == "__main__":
    sys.exit(main())
