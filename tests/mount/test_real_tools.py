"""Ordinary programs find on a mount what they find in the unpacked tree."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mounts import LIMIT_S, Mounted

pytestmark = pytest.mark.fuse

AXIS = "axes/cell.txt"
TEXT = "vectors/cell/label.txt"
SMALL = "vectors/cell/f64.data"
BIG = "matrices/cell/gene/fraction.data"
SPARSE = "matrices/cell/gene/UMIs"


@dataclass(frozen=True, slots=True)
class Twins:
    """An unpacked data set, and a mount that must look like it."""

    flat: Path
    shown: Path
    files: tuple[str, ...]
    """The paths of the unpacked files, but for those that index them."""


@pytest.fixture(scope="module", params=["corpus archive", "made directory", "made with zip -r"])
def twins(request: pytest.FixtureRequest, corpus: Path, made: Path, mounted: Mounted) -> Iterator[Twins]:
    flat, source = {
        "corpus archive": (corpus / "dafr" / "flat.daf", corpus / "dafr" / "zstd.daf.zip"),
        "made directory": (made / "flat.daf", made / "packed.daf"),
        "made with zip -r": (made / "flat.daf", made / "packed.daf.zip"),
    }[request.param]
    paths = sorted(path for path in flat.rglob("*") if path.is_file() and path.stem != "metadata")
    with mounted(source) as shown:
        yield Twins(flat, shown, tuple(str(path.relative_to(flat)) for path in paths))


def run(*command: str | Path, cwd: Path | None = None) -> bytes:
    """What a command prints when it ends well and has no complaint."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, stdin=subprocess.DEVNULL, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, b""), command
    return done.stdout


def differing(twins: Twins, copy: Path) -> list[str]:
    """The files whose bytes in a copy are not those of the unpacked tree."""
    return [name for name in twins.files if (copy / name).read_bytes() != (twins.flat / name).read_bytes()]


# ---------------------------------------------------------------------------------------------------------------------
# Programs that read


@pytest.mark.parametrize(
    "command",
    [
        f"grep -c 1 {AXIS} {TEXT}",
        f"grep -n -m 5 7 {TEXT}",
        "grep -rl --include=*.txt e axes vectors | LC_ALL=C sort",
        f"wc {AXIS} {TEXT} {BIG}",
        f"sort {TEXT} | uniq -c | sort -rn | sed -n 1,10p",
        f"awk '{{ n[length($0)]++ }} END {{ for (l in n) print l, n[l] }}' {TEXT} | sort -n",
        f"md5sum {AXIS} {TEXT} {SMALL} {BIG} {SPARSE}.*",
        f"head -c 100001 {BIG} | md5sum",
        f"tail -c 100001 {BIG} | md5sum",
        f"tail -n 3 {AXIS}",
        f"tac {TEXT} | md5sum",
        f"dd if={BIG} bs=777 skip=1300 count=99 status=none | md5sum",
        f"dd if={BIG} bs=131073 status=none | md5sum",
        f"dd if={BIG} bs=1M skip=1 iflag=fullblock status=none | md5sum",
        f"dd if={SMALL} bs=1 skip=8191 count=3 status=none | od -t x1",
        f"od -A d -t f4 -j 400004 -N 64 {BIG}",
        f"paste {AXIS} {TEXT} | cut -f 2 | md5sum",
        "find . -name '*.data' -printf '%P %s\\n' | LC_ALL=C sort",
        "find axes/*.txt vectors matrices -type f -print0 | LC_ALL=C sort -z | xargs -0 -n 3 -P 4 md5sum | sort",
        "ls vectors/cell",
        "cat scalars/*.json",
    ],
)
def test_it_prints_what_it_prints_on_the_unpacked_tree(command: str, twins: Twins) -> None:
    there, here = (run("bash", "-o", "pipefail", "-c", command, cwd=place) for place in (twins.flat, twins.shown))
    assert there
    assert here == there


def test_cmp_finds_every_file_equal(twins: Twins) -> None:
    for name in twins.files:
        assert run("cmp", twins.flat / name, twins.shown / name) == b""


def test_find_ls_is_the_same_each_time_and_numbers_every_file_once(twins: Twins) -> None:
    first = run("find", twins.shown, "-ls")
    assert run("find", twins.shown, "-ls") == first
    paths = list(twins.shown.rglob("*"))
    assert len({path.stat().st_ino for path in paths}) == len(paths)


def test_directory_entries_have_the_numbers_that_stat_tells(twins: Twins) -> None:
    for directory in [twins.shown, *(path for path in twins.shown.rglob("*") if path.is_dir())]:
        with os.scandir(directory) as entries:
            for entry in entries:
                assert entry.inode() == os.stat(entry.path).st_ino, entry.path


def test_link_counts_of_directories_are_one_or_count_their_directories(twins: Twins) -> None:
    for directory in [twins.shown, *(path for path in twins.shown.rglob("*") if path.is_dir())]:
        below = sum(path.is_dir() for path in directory.iterdir())
        assert directory.stat().st_nlink in (1, 2 + below), directory


# ---------------------------------------------------------------------------------------------------------------------
# Programs that copy


@pytest.mark.parametrize(
    "command",
    [
        'tar -cf - -C "$1" . | tar -xf - -C "$2"',
        'tar --sparse -cf - -C "$1" . | tar -xf - -C "$2"',
        'cp -a "$1/." "$2"',
        'cp -r --sparse=always "$1/." "$2"',
        'rsync -a "$1/" "$2"',
        'rsync -a --checksum --sparse "$1/" "$2"',
        '(cd "$1" && zip -qr - .) > "$2.zip" && unzip -q "$2.zip" -d "$2"',
    ],
)
def test_a_copy_holds_every_byte(command: str, twins: Twins, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    run("bash", "-o", "pipefail", "-c", command, "bash", twins.shown, copy)
    assert differing(twins, copy) == []
    run("chmod", "-R", "u+w", copy)


def test_a_second_rsync_has_nothing_to_do(twins: Twins, tmp_path: Path) -> None:
    run("rsync", "-a", f"{twins.shown}/", tmp_path / "copy")
    assert run("rsync", "-ai", f"{twins.shown}/", tmp_path / "copy") == b""
    run("chmod", "-R", "u+w", tmp_path / "copy")


def test_blocks_are_counted_for_every_file_with_bytes(twins: Twins) -> None:
    without = [name for name in twins.files if (stat := (twins.shown / name).stat()).st_size and not stat.st_blocks]
    assert without == []


# ---------------------------------------------------------------------------------------------------------------------
# Programs that map files into memory


@pytest.mark.parametrize("mode", ["r", "c"])
def test_numpy_memmap_computes_the_same(mode: str, twins: Twins) -> None:
    script = f"""
import numpy
values = numpy.memmap({BIG!r}, "<f4", {mode!r})
if {mode!r} == "c":
    values[1000:2000] = 1
print(values.astype("f8").sum(), values[12345], values[::4097].tolist())
"""
    there, here = (run(sys.executable, "-c", script, cwd=place) for place in (twins.flat, twins.shown))
    assert here == there
    assert differing(twins, twins.shown) == []


SUM_C = r"""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

int main(int argc, char **argv) {
    for (int i = 2; i < argc; i++) {
        int flags = strcmp(argv[1], "shared") ? MAP_PRIVATE : MAP_SHARED;
        int file = open(argv[i], O_RDONLY);
        struct stat status;
        if (file < 0 || fstat(file, &status)) { perror(argv[i]); return 1; }
        unsigned char *bytes = mmap(NULL, status.st_size, PROT_READ, flags, file, 0);
        if (bytes == MAP_FAILED) { perror("mmap"); return 1; }
        unsigned long sum = 0;
        for (long at = status.st_size - 1; at >= 0; at -= 3) sum = sum * 31 + bytes[at];
        printf("%s %lu\n", argv[i], sum);
    }
    return 0;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("flags", ["shared", "private"])
def test_a_c_program_maps_what_it_maps_on_the_unpacked_tree(flags: str, twins: Twins, tmp_path: Path) -> None:
    source, program = tmp_path / "sum.c", tmp_path / "sum"
    source.write_text(SUM_C)
    run("cc", "-O1", "-o", program, source)
    files = [AXIS, TEXT, SMALL, BIG, f"{SPARSE}.nzval"]
    there, here = (run(program, flags, *files, cwd=place) for place in (twins.flat, twins.shown))
    assert there.count(b"\n") == len(files)
    assert here == there


# ---------------------------------------------------------------------------------------------------------------------
# make, scripts


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_builds_from_a_mounted_file_once(twins: Twins, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text(f"count: {twins.shown / AXIS} {twins.shown / BIG}\n\twc -c $^ > $@\n")
    assert b"wc -c" in run("make", cwd=tmp_path)
    assert b"up to date" in run("make", cwd=tmp_path)


@pytest.mark.parametrize("command", ["sh tools/count.sh", "./tools/count.sh"])
@pytest.mark.parametrize("source", ["packed.daf", "packed.daf.zip"])
def test_a_script_in_the_data_set_can_be_run(source: str, command: str, made: Path, mounted: Mounted) -> None:
    with mounted(made / source) as shown:
        assert run(*command.split(), cwd=shown) == b"37 genes\n"


# ---------------------------------------------------------------------------------------------------------------------
# Reads at any place


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_reads_at_any_offset_and_length_equal_slices_of_the_unpacked_file(data: st.DataObject, twins: Twins) -> None:
    name = data.draw(st.sampled_from(twins.files), label="file")
    expected = (twins.flat / name).read_bytes()
    offset = data.draw(st.integers(0, len(expected) + 10), label="offset")
    length = data.draw(st.integers(0, 300_000) | st.integers(0, 20), label="length")
    file = os.open(twins.shown / name, os.O_RDONLY)
    try:
        assert os.pread(file, length, offset) == expected[offset : offset + length]
    finally:
        os.close(file)


def test_a_file_that_sparse_data_does_without_is_missing(twins: Twins) -> None:
    """Readers tell an all-true Bool property by the missing file; an empty one would be something else."""
    descriptors = [name for name in twins.files if name.endswith(("mask_true.json", "is_marker.json"))]
    assert descriptors
    for name in descriptors:
        path = twins.shown / name
        if (path.with_suffix(".nzind")).exists():
            with pytest.raises(FileNotFoundError):
                path.with_suffix(".nzval").open()


# ---------------------------------------------------------------------------------------------------------------------
# Large directories


def test_ten_thousand_names_are_listed_in_full_by_two_readers_at_once(tmp_path: Path, mounted: Mounted) -> None:
    names = {f"note-{number:05}" for number in range(10_000)}
    (tmp_path / "many.daf" / "axes").mkdir(parents=True)
    (tmp_path / "many.daf" / "notes").mkdir()
    (tmp_path / "many.daf" / "daf.json").write_text('{"version":[1,1]}\n')
    for name in names:
        (tmp_path / "many.daf" / "notes" / name).touch()
    with (
        mounted(tmp_path / "many.daf") as shown,
        os.scandir(shown / "notes") as one,
        os.scandir(shown / "notes") as two,
    ):
        seen = [(entry.name, other.name) for entry, other in zip(one, two, strict=True)]
        assert [len(seen), {name for name, _ in seen}, {name for _, name in seen}] == [len(names), names, names]
        assert run("ls", "-l", shown / "notes").count(b"\n") == len(names) + 1


def test_compressed_entries_that_the_spool_holds_one_at_a_time_are_read_one_after_the_other(
    mounted: Mounted, tmp_path: Path
) -> None:
    archive = tmp_path / "x.daf.zip"
    notes = {f"note-{number}.txt": bytes([number]) * 600_000 for number in range(5)}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as stream:
        stream.writestr("daf.json", '{"version":[1,1]}\n')
        for name, data in notes.items():
            stream.writestr(name, data)
    with mounted(archive, "-o", f"spool={tmp_path},spool-size=1M") as shown:
        for name, data in notes.items():
            assert (shown / name).read_bytes() == data
