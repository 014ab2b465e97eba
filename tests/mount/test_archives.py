"""Archives of odd makes, and files and archives that are very large, on real mounts."""

from __future__ import annotations

import errno
import io
import json
import os
import struct
import subprocess
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from dafmount.shard.writer import write_shard
from mounts import LIMIT_S, Mounted, servers, write_daf

pytestmark = pytest.mark.fuse

GIB = 1 << 30
N_NAMES = 1_000_000
MAX_BYTES_A_NAME = 200
"""The directory holds 90 of each; the rest is where they are found."""

DAF_JSON = b'{"version":[1,1]}\n'


def resident_bytes(mountpoint: Path) -> int:
    (process,) = servers(mountpoint)
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------------------------------------------
# How they were made


@pytest.mark.parametrize("options", [["-q"], ["-q0"]], ids=["deflated", "stored"])
def test_an_archive_that_was_written_to_a_pipe(
    options: list[str], made: Path, mounted: Mounted, tmp_path: Path
) -> None:
    """Its local headers have neither sizes nor checksums."""
    archive = tmp_path / "x.daf.zip"
    with archive.open("wb") as stream:
        made_by = subprocess.Popen(["zip", *options, "-r", "-", "."], cwd=made / "packed.daf", stdout=subprocess.PIPE)
        subprocess.run(["cat"], stdin=made_by.stdout, stdout=stream, check=True, timeout=LIMIT_S)
        assert made_by.wait(LIMIT_S) == 0
    assert b"PK\7\x08" in archive.read_bytes()
    with mounted(archive) as shown:
        for path in [path for path in (made / "flat.daf").rglob("*") if path.is_file()]:
            name = path.relative_to(made / "flat.daf")
            assert (shown / name).read_bytes() == path.read_bytes(), name


def test_a_file_that_is_a_directory_too_has_one_story(mounted: Mounted, tmp_path: Path) -> None:
    archive = tmp_path / "x.daf.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("daf.json", DAF_JSON)
        for name in ("a", "a/b", "c/d", "c"):
            stream.writestr(name, b"below" if "/" in name else b"file")
    with mounted(archive, expect_log=["left out"]) as shown:
        for name, below in (("a", "b"), ("c", "d")):
            assert [entry.is_dir() for entry in os.scandir(shown) if entry.name == name] == [True]
            assert (shown / name).is_dir()
            assert os.listdir(shown / name) == [below]
            assert (shown / name / below).read_bytes() == b"below"
            with pytest.raises(OSError, match=os.strerror(errno.EISDIR)):
                (shown / name).read_bytes()


def test_entries_that_overlap_have_each_their_own_bytes(mounted: Mounted, tmp_path: Path) -> None:
    """One is stored within another, whole, as an archive in an archive is."""
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as stream:
        stream.writestr("inner.txt", b"inner")
    archive = tmp_path / "x.daf.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("daf.json", DAF_JSON)
        stream.writestr("outer.zip", inner.getvalue())
        info = zipfile.ZipInfo("inner.txt")
        info.CRC, info.file_size, info.compress_size = zlib.crc32(b"inner"), 5, 5
        info.header_offset = stream.getinfo("outer.zip").header_offset + 30 + len("outer.zip")
        stream.filelist.append(info)
        stream.NameToInfo[info.filename] = info
    with mounted(archive) as shown:
        assert (shown / "outer.zip").read_bytes() == inner.getvalue()
        assert (shown / "inner.txt").read_bytes() == b"inner"


# ---------------------------------------------------------------------------------------------------------------------
# How large they are


def write_many_names(archive: Path, n_names: int) -> None:
    """Empty entries in a thousand directories; written here, for zipfile takes ten seconds for a million."""
    names = [b"daf.json", *(b"notes/%03d/%06d.json" % (n % 1000, n) for n in range(n_names))]
    offset, local, central = 0, [], []
    for name in names:
        data = DAF_JSON if name == b"daf.json" else b""
        fields = struct.pack("<5H3L2H", 20, 0, 0, 0, 33, zlib.crc32(data), len(data), len(data), len(name), 0)
        local.append(b"PK\3\4" + fields + name + data)
        central.append(b"PK\1\2\x14\x03" + fields + bytes(14 - 4) + struct.pack("<L", offset) + name)
        offset += len(local[-1])
    directory = b"".join(central)
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, len(names), len(names), len(directory), offset)
    locator = struct.pack("<4sLQL", b"PK\6\7", 0, offset + len(directory), 1)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    archive.write_bytes(b"".join([*local, directory, end64, locator, end]))


def test_a_million_names_take_a_modest_room_each(mounted: Mounted, tmp_path: Path) -> None:
    few, many = tmp_path / "few.daf.zip", tmp_path / "many.daf.zip"
    with zipfile.ZipFile(few, "w") as stream:
        stream.writestr("daf.json", DAF_JSON)
    write_many_names(many, 1000)
    assert zipfile.ZipFile(many).testzip() is None
    write_many_names(many, N_NAMES)
    with mounted(few) as shown:
        least = resident_bytes(shown)
    with mounted(many) as shown:
        assert (resident_bytes(shown) - least) / N_NAMES < MAX_BYTES_A_NAME
        assert len(os.listdir(shown / "notes")) == 1000
        assert len(os.listdir(shown / "notes" / "777")) == 1000
        assert (shown / "notes" / "777" / "999777.json").stat().st_size == 0
        assert (resident_bytes(shown) - least) / N_NAMES < MAX_BYTES_A_NAME


PLACES = (0, 2 * GIB - 4, 2 * GIB + 4, 4 * GIB - 3, 4 * GIB + 8, 4 * GIB + 12_345, 5 * GIB - 8)
"""Of eight bytes each, which cross 2 and 4 GiB."""

LARGE_CRC = 0x13B0F15C
"""CRC-32 of all that `write_large` writes, found once with zlib."""


def write_large(file: io.BufferedWriter) -> None:
    """5 GiB of nothing but marks."""
    start = file.tell()
    for place in PLACES:
        file.seek(start + place)
        file.write(mark(place))
    file.truncate(start + 5 * GIB)


def mark(place: int) -> bytes:
    return struct.pack("<Q", place ^ 0x5DAF_5DAF_5DAF_5DAF)


def check_large(path: Path) -> None:
    assert path.stat().st_size == 5 * GIB
    assert path.stat().st_blocks == 5 * GIB // 512
    with path.open("rb") as file:
        for place in PLACES:
            assert os.pread(file.fileno(), 8, place) == mark(place)
        assert os.pread(file.fileno(), 100, 5 * GIB - 8) == mark(5 * GIB - 8)
        mapped = np.memmap(file, np.uint8, "r")
        assert mapped[4 * GIB - 3 : 4 * GIB + 5].tobytes() == mark(4 * GIB - 3)


def test_a_flat_file_beyond_four_gibibytes(mounted: Mounted, tmp_path: Path) -> None:
    source = write_daf(tmp_path / "x.daf")
    with (source / "large.bin").open("wb") as file:
        write_large(file)
    with mounted(source) as shown:
        check_large(shown / "large.bin")


@pytest.fixture
def large_archive(tmp_path: Path) -> Iterator[Path]:
    """A stored entry of 5 GiB, sparse on disk, and a small one behind it."""
    archive = tmp_path / "x.daf.zip"
    with zipfile.ZipFile(archive, "w") as stream:
        stream.writestr("daf.json", DAF_JSON)
    yield archive
    archive.unlink()


def test_an_archive_beyond_four_gibibytes(large_archive: Path, mounted: Mounted) -> None:
    with zipfile.ZipFile(large_archive, "a") as stream:
        assert stream.fp is not None
        info = zipfile.ZipInfo("large.bin")
        info.header_offset = stream.start_dir
        stream.fp.seek(info.header_offset)
        sizes = struct.pack("<2H2Q", 1, 16, 5 * GIB, 5 * GIB)
        start = info.header_offset + 30 + len("large.bin") + len(sizes)
        with large_archive.open("r+b") as file:
            file.seek(start)
            write_large(file)  # type: ignore[arg-type]
        info.CRC, info.file_size, info.compress_size = LARGE_CRC, 5 * GIB, 5 * GIB
        head = struct.pack("<5H3L2H", 45, 0, 0, 0, 33, info.CRC, 0xFFFFFFFF, 0xFFFFFFFF, len("large.bin"), len(sizes))
        stream.fp.write(b"PK\3\4" + head + b"large.bin" + sizes)
        stream.start_dir = start + 5 * GIB
        stream._didModify = True  # type: ignore[attr-defined]
        stream.filelist.append(info)
        stream.NameToInfo["large.bin"] = info
        stream.writestr("behind.txt", b"behind it")
    with mounted(large_archive) as shown:
        check_large(shown / "large.bin")
        assert (shown / "behind.txt").read_bytes() == b"behind it"


def test_a_packed_file_beyond_four_gibibytes(mounted: Mounted, tmp_path: Path) -> None:
    """Most chunks are absent, and so are zeros."""
    n_rows, n_columns, width = 5120, 1 << 17, 32
    chunk = n_rows * width * 8
    assert n_rows * n_columns * 8 == 5 * GIB
    source = tmp_path / "x.daf"
    (source / "matrices" / "a" / "b").mkdir(parents=True)
    (source / "axes").mkdir()
    (source / "daf.json").write_bytes(DAF_JSON)
    (source / "axes" / "a.txt").write_bytes(b"x\n" * n_rows)
    (source / "axes" / "b.txt").write_bytes(b"x\n" * n_columns)
    raw: dict[int, bytearray] = {}
    for place in PLACES:
        for at, byte in enumerate(mark(place), place):
            raw.setdefault(at // chunk, bytearray(chunk))[at % chunk] = byte
    (source / "matrices" / "a" / "b" / "x.zip").write_bytes(sparse_shard(raw, chunk, n_columns // width))
    packing = {"packed_format": "indexed+zipped", "chunk_shape": [n_rows, width], "compression": "zstd"}
    descriptor = {"format": "dense", "eltype": "Float64", **packing}
    (source / "matrices" / "a" / "b" / "x.json").write_text(json.dumps(descriptor))
    with mounted(source) as shown:
        check_large(shown / "matrices" / "a" / "b" / "x.data")


def sparse_shard(raw: dict[int, bytearray], chunk: int, n_chunks: int) -> bytes:
    """A shard of the chunks given, the others absent."""
    out = io.BytesIO()
    present = sorted(raw)
    flat = b"".join(raw[number] for number in present)
    write_shard(out, flat, [len(flat)], [chunk], 1, "zstd", 5)
    shard = out.getvalue()
    n = len(present)
    old = np.frombuffer(shard[: 16 * n], "<u8").reshape(n, 2)
    index = np.full((n_chunks, 2), 2**64 - 1, "<u8")
    moved = 16 * (n_chunks - n)
    index[present] = old + np.array([moved, 0], "<u8")
    end = len(shard) - 98
    n_bytes, start = struct.unpack_from("<QQ", shard, end + 40)
    entries = bytearray(shard[start : start + n_bytes])
    stride = n_bytes // n
    for at in range(stride - 8, n_bytes, stride):
        struct.pack_into("<Q", entries, at, struct.unpack_from("<Q", entries, at)[0] + moved)
    tail = bytearray(shard[end:])
    struct.pack_into("<Q", tail, 48, start + moved)
    struct.pack_into("<Q", tail, 56 + 8, end + moved)
    checked = index.tobytes() + google_crc32c.value(index.tobytes()).to_bytes(4, "little")
    return bytes(checked + shard[16 * n + 4 : start] + entries + tail)
