"""Blocks that other processes decode ahead: the same bytes, whatever becomes of the processes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from dafmount.daf.catalog import Packing
from dafmount.errors import CorruptShard
from dafmount.shard.codecs import CODECS
from dafmount.shard.grid import make_grid
from dafmount.shard.writer import write_shard
from dafmount.source.local import LocalFile
from dafmount.tree import decoders as decoders_module
from dafmount.tree.cache import ChunkCache
from dafmount.tree.chunks import DECODED, ShardReader, ShardSpec
from dafmount.tree.content import PackedNumbers
from dafmount.tree.decoders import Decoders, _Process
from mounts import wait_until

N_ROWS, N_COLUMNS = 30_000, 60
PIECE = 100_000
VALUES = np.random.default_rng(4).poisson(3, (N_COLUMNS, N_ROWS)).astype("<i4")
FLAT = VALUES.tobytes()
BLOCK_BYTES = 1 << 18


class Reader:
    """A packed matrix whose last chunk of each column has padding, and processes that decode ahead of who reads it."""

    def __init__(self, decoders: Decoders, cache: ChunkCache, shard: Path, compression: str) -> None:
        self.decoders = decoders
        how = packing(compression)
        grid = make_grid((N_ROWS, N_COLUMNS), how.chunk_shape, 4, 1 << 20, "x")
        spec = ShardSpec(grid.n_chunks, how, 4, grid.chunk_bytes, 1 << 20, True)
        reader = ShardReader(LocalFile(shard, "x.zip"), spec, "x.zip")
        self.content = PackedNumbers(grid, reader, cache, 7, block_bytes=BLOCK_BYTES, decoders=decoders)

    def read_all(self, start: int = 0) -> None:
        """From `start` to the end; every byte is checked."""
        for at in range(start, len(FLAT), PIECE):
            self.read(at)

    def read(self, at: int) -> None:
        length = min(PIECE, len(FLAT) - at)
        found = self.content.read_nowait(at, length)
        if found is None:
            found = self.content.read(at, length)
        assert bytes(found) == FLAT[at : at + length]

    def processes(self) -> list[_Process]:
        return [process for process in self.decoders._processes if process is not None]


def packing(compression: str) -> Packing:
    return Packing("indexed+zipped", (2047, 1), compression, 5)


def made(compression: str) -> bytes:
    out = io.BytesIO()
    write_shard(out, FLAT, (N_ROWS, N_COLUMNS), packing(compression).chunk_shape, 4, compression, 5)
    return out.getvalue()


@contextmanager
def reading(shard: Path, compression: str = "blosc_zstd_bitshuffle", n_processes: int = 2) -> Iterator[Reader]:
    cache = ChunkCache(64 << 20)
    decoders = Decoders(cache, n_processes)
    try:
        yield Reader(decoders, cache, shard, compression)
    finally:
        decoders.close()


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shard") / "x.zip"
    path.write_bytes(made("blosc_zstd_bitshuffle"))
    return path


def wait_for_start(reader: Reader) -> None:
    """Until the processes have imported what they need and decode as fast as they are asked."""
    wait_until(lambda: reader.decoders.has_room(0), "the processes to start")


@pytest.mark.parametrize("compression", list(CODECS))
def test_what_others_decode_is_what_would_be_decoded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(decoders_module, "PATIENCE_S", 20)  # other tests keep the machine busy
    (tmp_path / "x.zip").write_bytes(made(compression))
    with reading(tmp_path / "x.zip", compression) as reader:
        for at in range(0, 20 * PIECE, PIECE):
            reader.read(at)
        assert reader.processes()
        wait_for_start(reader)
        before = DECODED.n_chunks
        reader.read_all(20 * PIECE)
        n_here = DECODED.n_chunks - before
        assert n_here < (len(FLAT) - 20 * PIECE) // 4 // 2047 // 2, "most were decoded elsewhere"


def test_short_reads_start_no_process(shard: Path) -> None:
    with reading(shard) as reader:
        for at in range(0, 2 * BLOCK_BYTES, PIECE):
            reader.read(at)
        for at in range(0, len(FLAT), 7 * PIECE):
            reader.read(at)
        assert not reader.processes()


def test_without_processes_all_is_decoded_here(shard: Path) -> None:
    with reading(shard, n_processes=0) as reader:
        reader.read_all()
        assert not reader.processes()


def test_a_reader_that_jumps_gets_the_right_bytes(shard: Path) -> None:
    with reading(shard) as reader:
        for start in (0, 30 * PIECE, 2 * PIECE, 50 * PIECE, 11 * PIECE):
            for at in range(start, start + 15 * PIECE, PIECE):
                reader.read(at)


def test_processes_that_are_killed_are_replaced(shard: Path) -> None:
    with reading(shard) as reader:
        for at in range(0, 20 * PIECE, PIECE):
            reader.read(at)
        wait_for_start(reader)
        killed = reader.processes()
        for process in killed:
            process._process.kill()
            process._process.wait()
        reader.read_all(20 * PIECE)
        wait_for_start(reader)
        assert not {id(process) for process in reader.processes()} & {id(process) for process in killed}


def test_a_process_that_hangs_holds_nobody_up_for_long(shard: Path) -> None:
    with reading(shard) as reader:
        for at in range(0, 20 * PIECE, PIECE):
            reader.read(at)
        wait_for_start(reader)
        stopped = reader.processes()
        for process in stopped:
            os.kill(process._process.pid, signal.SIGSTOP)
        try:
            reader.read_all(20 * PIECE)
            assert reader.processes() == stopped
            assert all(process._is_late for process in stopped if process._keys)
        finally:
            for process in reader.processes():
                os.kill(process._process.pid, signal.SIGCONT)


def test_a_damaged_chunk_is_an_error_of_its_block_alone(shard: Path, tmp_path: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 0x55
    damaged = tmp_path / "x.zip"
    damaged.write_bytes(data)
    errors = []
    with reading(damaged) as reader:
        for start in range(0, len(FLAT), PIECE):
            try:
                reader.read(start)
            except CorruptShard as error:
                errors.append(str(error))
    assert 1 <= len(errors) <= 2 + BLOCK_BYTES // PIECE
    assert all(error.startswith("x.zip: chunk") for error in errors)


@pytest.mark.parametrize("program", ["/bin/false", "/nonexistent/python"])
def test_processes_that_cannot_start_are_tried_a_few_times(
    shard: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr("sys.executable", program)
    n_files = len(os.listdir("/proc/self/fd"))
    with reading(shard) as reader:

        def has_given_up() -> bool:
            reader.read_all()
            return reader.decoders.depth == 0

        wait_until(has_given_up, "giving up")
        reader.read_all()
        assert not reader.processes()
    assert len(os.listdir("/proc/self/fd")) <= n_files + 1  # the shard


def test_a_process_of_another_version_gets_nothing_to_do(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "_HELLO", b"0.0.1 4 100 100 5")
    with reading(shard) as reader:

        def has_given_up() -> bool:
            reader.read_all()
            return reader.decoders.depth == 0

        wait_until(has_given_up, "giving up")


def test_readers_who_went_away_leave_room_for_others(shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders_module, "UNUSED_S", 0.0)
    with reading(shard) as reader:
        for at in range(0, 20 * PIECE, PIECE):
            reader.read(at)
        wait_for_start(reader)
        reader.read(20 * PIECE)
        wait_until(lambda: reader.decoders.has_room(0) and not reader.decoders._flying, "what was asked for")
        assert reader.decoders.has_room(BLOCK_BYTES)
        assert not reader.decoders._landed


def test_closing_ends_the_processes(shard: Path) -> None:
    with reading(shard) as reader:
        reader.read_all()
        started: list[subprocess.Popen[bytes]] = [process._process for process in reader.processes()]
        assert started
    assert all(process.returncode is not None for process in started)
