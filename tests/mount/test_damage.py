"""Bad data costs the file it is in, one line in the log, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from mounts import Mounted

pytestmark = pytest.mark.fuse

BAD_CHUNK = 3
CHUNK_BYTES = 8192
PROPERTY = "vectors/cell/f64"
OTHERS = ("vectors/cell/i64.data", "vectors/cell/label.txt", "matrices/cell/gene/counts.data", "axes/cell.txt")


def copy_of(corpus: Path, codec: str, tmp_path: Path) -> Path:
    source = tmp_path / f"{codec}.daf"
    shutil.copytree(corpus / "dafr" / f"{codec}.daf", source, copy_function=shutil.copyfile)
    return source


def flip_a_byte_of_a_chunk(shard: Path) -> None:
    data = bytearray(shard.read_bytes())
    offset, length = struct.unpack_from("<QQ", data, 16 * BAD_CHUNK)  # of the Zarr index
    data[offset + length // 2] ^= 0x10
    shard.write_bytes(data)


def lines_about(log: Path, word: str) -> list[str]:
    return [line for line in log.read_text().splitlines() if word in line]


@pytest.mark.parametrize("codec", ["blosc_lz4_bitshuffle", "blosc_zstd_bitshuffle", "gzip", "zstd"])
def test_a_damaged_chunk_is_an_io_error_in_its_file_and_one_line(
    codec: str, corpus: Path, tmp_path: Path, mounted: Mounted
) -> None:
    source, log = copy_of(corpus, codec, tmp_path), tmp_path / "log"
    flip_a_byte_of_a_chunk(source / f"{PROPERTY}.zip")
    with mounted(source, log=log, expect_log=[rf"{source.name}.*{PROPERTY}.*\b{BAD_CHUNK}\b"]) as shown:
        file = os.open(shown / f"{PROPERTY}.data", os.O_RDONLY)
        try:
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.pread(file, 100, BAD_CHUNK * CHUNK_BYTES + 200)
        finally:
            os.close(file)
        assert len(lines_about(log, PROPERTY)) == 1
        for name in OTHERS:
            assert (shown / name).read_bytes() == (corpus / "dafr" / "flat.daf" / name).read_bytes()


def test_a_damaged_descriptor_is_an_io_error_of_its_property_and_one_line(
    corpus: Path, tmp_path: Path, mounted: Mounted
) -> None:
    source, log = copy_of(corpus, "zstd", tmp_path), tmp_path / "log"
    (source / f"{PROPERTY}.json").chmod(0o644)
    (source / f"{PROPERTY}.json").write_text('{"format":"dense","eltype":')
    with mounted(source, log=log, expect_log=[rf"{source.name}.*{PROPERTY}\.json"]) as shown:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (shown / f"{PROPERTY}.json").read_bytes()
        assert len(lines_about(log, PROPERTY)) == 1
        for name in OTHERS:
            assert (shown / name).read_bytes() == (corpus / "dafr" / "flat.daf" / name).read_bytes()


def test_an_unknown_compression_is_refused_for_its_file_only(corpus: Path, tmp_path: Path, mounted: Mounted) -> None:
    source, log = copy_of(corpus, "zstd", tmp_path), tmp_path / "log"
    descriptor = source / f"{PROPERTY}.json"
    descriptor.chmod(0o644)
    descriptor.write_text(descriptor.read_text().replace('"zstd"', '"brotli"'))
    with mounted(source, log=log, expect_log=[rf"{PROPERTY}.*brotli"]) as shown:
        with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
            (shown / f"{PROPERTY}.data").read_bytes()
        for name in OTHERS:
            assert (shown / name).read_bytes() == (corpus / "dafr" / "flat.daf" / name).read_bytes()


def test_a_damaged_entry_of_an_archive_costs_that_entry(corpus: Path, tmp_path: Path, mounted: Mounted) -> None:
    archive = tmp_path / "damaged.daf.zip"
    shutil.copyfile(corpus / "dafr" / "zstd.daf.zip", archive)
    with zipfile.ZipFile(archive) as stream:
        entry = stream.getinfo("vectors/cell/label.txt")
    with archive.open("r+b") as out:  # as a writer leaves it that was interrupted: the local header is not there yet
        out.seek(entry.header_offset)
        out.write(bytes(30))
    with mounted(archive, expect_log=[r"damaged\.daf\.zip.*vectors/cell/label\.txt"]) as shown:
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            (shown / "vectors/cell/label.txt").read_bytes()
        for name in set(OTHERS) - {"vectors/cell/label.txt"}:
            assert (shown / name).read_bytes() == (corpus / "dafr" / "flat.daf" / name).read_bytes()
