"""System calls on a mount do what they do on the unpacked tree, as far as reading goes; all others are refused."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import json
import mmap
import os
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from mounts import LIMIT_S, Mounted, write_daf

pytestmark = pytest.mark.fuse

BIG = "matrices/cell/gene/fraction.data"
TEXT = "vectors/cell/label.txt"
AXIS = "axes/cell.txt"
EMPTY = "axes/nothing.txt"
FILES = (BIG, TEXT, AXIS, "notes.txt")
N_NAMES = 10_000
LONG_NAME = "n" * 255
RAW_NAME = b"not \xff utf-8 \xe9"
DEPTH = 14

libc = ctypes.CDLL(None, use_errno=True)
libc.opendir.restype = libc.readdir.restype = ctypes.c_void_p
libc.opendir.argtypes = [ctypes.c_char_p]
libc.readdir.argtypes = libc.closedir.argtypes = libc.rewinddir.argtypes = libc.telldir.argtypes = [ctypes.c_void_p]
libc.telldir.restype = ctypes.c_long
libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
libc.seekdir.restype = libc.rewinddir.restype = None


@dataclass(frozen=True, slots=True)
class Twins:
    """An unpacked data set, and a mount that must look like it."""

    flat: Path
    shown: Path


@pytest.fixture(scope="module")
def twins(made: Path, mounted: Mounted, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    place = tmp_path_factory.mktemp("posix")
    flat, packed = place / "flat.daf", place / "packed.daf"
    for name, copy in (("flat.daf", flat), ("packed.daf", packed)):
        shutil.copytree(made / name, copy)
        (copy / "many").mkdir()
        for number in range(N_NAMES):
            (copy / "many" / f"note-{number:05}").touch()
        odd = copy / "odd"
        odd.mkdir()
        (odd / LONG_NAME).write_text("long")
        (Path(os.fsdecode(os.fsencode(odd) + b"/" + RAW_NAME))).write_text("raw")
        deep = odd
        for _ in range(DEPTH):
            deep = deep / ("d" * 250)
        os.makedirs(odd / "d", exist_ok=True)
        at = os.open(odd, os.O_RDONLY)
        for _ in range(DEPTH):  # longer than a path may be at once
            os.mkdir("d" * 250, dir_fd=at)
            below = os.open("d" * 250, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        os.close(os.open("leaf", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=at))
        os.close(at)
    with mounted(packed) as shown:
        yield Twins(flat, shown)


@pytest.fixture(params=FILES)
def both(request: pytest.FixtureRequest, twins: Twins) -> Iterator[tuple[int, int]]:
    """Descriptors of a file of the unpacked tree and of the mount."""
    pair = (os.open(twins.flat / request.param, os.O_RDONLY), os.open(twins.shown / request.param, os.O_RDONLY))
    yield pair
    for file in pair:
        os.close(file)


def outcome(call: Callable[[], object]) -> object:
    """What a call gives, or the name of its errno."""
    try:
        return call()
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def same(both: tuple[int, int], call: Callable[[int], object]) -> object:
    """What a call gives on both, which must be one."""
    there, here = (outcome(lambda file=file: call(file)) for file in both)  # type: ignore[misc]
    assert here == there
    return here


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def test_read_pread_readv_and_preadv(both: tuple[int, int]) -> None:
    size = os.fstat(both[0]).st_size
    same(both, lambda file: os.read(file, 1000))
    same(both, lambda file: os.read(file, 0))
    for offset in (0, 1, 4095, 4096, 8191, size - 1, size, size + 1, 2**40, 2**63 - 1):
        for length in (0, 1, 7, 4096, 131_073):
            same(both, lambda file, offset=offset, length=length: os.pread(file, length, offset))  # type: ignore[misc]

    def vectors(file: int, offset: int | None) -> list[bytes]:
        buffers = [bytearray(n) for n in (1, 0, 4096, 77, 10_000)]
        n = os.readv(file, buffers) if offset is None else os.preadv(file, buffers, offset)
        return [b"%d" % n, *(bytes(buffer) for buffer in buffers)]

    same(both, lambda file: vectors(file, None))
    same(both, lambda file: vectors(file, size - 5000))
    assert same(both, lambda file: os.pread(file, 10, -1)) == "EINVAL"


def test_seeking(both: tuple[int, int]) -> None:
    size = os.fstat(both[0]).st_size
    for offset, whence in ((5, os.SEEK_SET), (7, os.SEEK_CUR), (-3, os.SEEK_END), (10, os.SEEK_END), (-1, os.SEEK_SET)):
        same(both, lambda file, offset=offset, whence=whence: os.lseek(file, offset, whence))  # type: ignore[misc]
        same(both, lambda file: os.read(file, 100))
    for offset in (0, 1, size - 1):
        assert os.lseek(both[1], offset, os.SEEK_DATA) == offset
        assert os.lseek(both[1], offset, os.SEEK_HOLE) == size
    for whence in (os.SEEK_DATA, os.SEEK_HOLE):
        assert same(both, lambda file, whence=whence: os.lseek(file, size, whence)) == "ENXIO"  # type: ignore[misc]


def test_direct_reads(twins: Twins) -> None:
    """Buffers and offsets aligned as O_DIRECT wants them; the last read is cut short by the end."""
    expected = (twins.flat / BIG).read_bytes()
    file = os.open(twins.shown / BIG, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 1 << 18)
    parts = []
    try:
        while n := os.readv(file, [buffer]):
            parts.append(buffer[:n])
    finally:
        os.close(file)
    assert b"".join(parts) == expected


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE])
def test_mapped_pages(flags: int, both: tuple[int, int]) -> None:
    there, here = (mmap.mmap(file, 0, flags, mmap.PROT_READ) for file in both)
    assert here[:] == there[:]
    assert outcome(lambda: mmap.mmap(both[1], 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)) == "EACCES"
    written = mmap.mmap(both[1], 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
    written[0] ^= 0xFF
    assert os.pread(both[1], 1, 0) == there[:1]


def test_copies_made_by_the_kernel(both: tuple[int, int], tmp_path: Path) -> None:
    size = os.fstat(both[0]).st_size
    expected = os.pread(both[0], size, 0)

    def sendfile(target: int) -> None:
        at = 0
        while n := os.sendfile(target, both[1], at, size):
            at += n

    def copy_file_range(target: int) -> None:
        at = 0
        while n := os.copy_file_range(both[1], target, size, at):
            at += n

    def splice(target: int) -> None:
        readable, writable = os.pipe()
        at = 0
        while n := os.splice(both[1], writable, 65_536, at):
            at += n
            while n:
                n -= os.splice(readable, target, n)
        os.close(readable)
        os.close(writable)

    for copy in (sendfile, copy_file_range, splice):
        target = tmp_path / copy.__name__
        with target.open("wb", buffering=0) as stream:
            result = outcome(lambda copy=copy, stream=stream: copy(stream.fileno()))  # type: ignore[misc]
        assert result in (None, "EXDEV", "EOPNOTSUPP"), copy.__name__  # between file systems not every kernel copies
        if result is None:
            assert target.read_bytes() == expected, copy.__name__


def test_advice_readiness_and_sync(both: tuple[int, int]) -> None:
    for advice in (os.POSIX_FADV_RANDOM, os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_WILLNEED, os.POSIX_FADV_DONTNEED):
        same(both, lambda file, advice=advice: os.posix_fadvise(file, 0, 0, advice))  # type: ignore[misc]
    same(both, lambda file: os.pread(file, 100_000, 3))
    poll = select.poll()
    poll.register(both[1], select.POLLIN)
    assert poll.poll(0)
    waiting = array.array("i", [0])
    assert outcome(lambda: fcntl.ioctl(both[1], 0x541B, waiting)) in (0, "ENOTTY")  # FIONREAD
    same(both, os.fsync)
    same(both, os.fdatasync)


# ---------------------------------------------------------------------------------------------------------------------
# Locks


def test_locks_are_those_of_a_file_open_for_reading(twins: Twins) -> None:
    one, two = (os.open(twins.shown / TEXT, os.O_RDONLY) for _ in range(2))
    try:
        fcntl.flock(one, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert outcome(lambda: fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)) == "EAGAIN"
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(two, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.lockf(one, fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 5)
        script = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'rb'), fcntl.LOCK_SH | fcntl.LOCK_NB, 10, 5)"
        subprocess.run([sys.executable, "-c", script, twins.shown / TEXT], check=True, timeout=LIMIT_S)
        assert outcome(lambda: fcntl.lockf(one, fcntl.LOCK_EX | fcntl.LOCK_NB)) == "EBADF"  # not open for writing
    finally:
        os.close(one)
        os.close(two)


# ---------------------------------------------------------------------------------------------------------------------
# What is told of files


def test_stat_of_files_and_directories(twins: Twins) -> None:
    for path in [*FILES, EMPTY, "axes", "vectors/cell", "scalars/a b.json"]:
        there, here = os.stat(twins.flat / path), os.lstat(twins.shown / path)
        assert stat.S_IFMT(here.st_mode) == stat.S_IFMT(there.st_mode)
        assert here.st_mode & 0o222 == 0
        if stat.S_ISREG(here.st_mode):
            assert (here.st_size, here.st_nlink) == (there.st_size, 1)
            assert here.st_blocks == -(-here.st_size // 512)
        assert here.st_mtime_ns == here.st_ctime_ns == here.st_atime_ns
        assert here.st_uid == os.getuid()


def test_statx_and_statfs(twins: Twins) -> None:
    done = subprocess.run(
        ["stat", "-c", "%s %F %h", *FILES], cwd=twins.shown, capture_output=True, check=True, timeout=LIMIT_S, text=True
    )
    sizes = [f"{(twins.flat / name).stat().st_size} regular file 1" for name in FILES]
    assert done.stdout.splitlines() == sizes
    found = os.statvfs(twins.shown)
    assert (found.f_bfree, found.f_bavail, found.f_ffree, found.f_namemax) == (0, 0, 0, 255)
    assert found.f_flag & os.ST_RDONLY
    assert found.f_flag & os.ST_NOSUID
    assert found.f_blocks * found.f_frsize > 0


def test_access(twins: Twins) -> None:
    root = os.open(twins.shown, os.O_RDONLY)
    for path in (BIG, "axes", "nothing here"):
        for mode in (os.F_OK, os.R_OK):
            expected = os.access(twins.flat / path, mode)
            assert os.access(twins.shown / path, mode) == expected
            assert os.access(path, mode, dir_fd=root, effective_ids=True) == expected  # faccessat2
        assert not os.access(twins.shown / path, os.W_OK)
    os.close(root)
    assert os.access(twins.shown / "axes", os.X_OK)


def test_extended_attributes_are_those_of_daf_only(twins: Twins) -> None:
    assert all(name.startswith("user.daf.") for name in os.listxattr(twins.shown / BIG))
    assert os.listxattr(twins.shown / "axes") == []
    assert outcome(lambda: os.getxattr(twins.shown / BIG, "user.any")) == "ENODATA"


OPEN_FLAGS = ["O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_NOATIME", "O_SYNC", "O_DSYNC", "O_PATH", "O_NOCTTY"]


@pytest.mark.parametrize("flag", OPEN_FLAGS)
def test_open_flags_that_change_no_bytes(flag: str, twins: Twins) -> None:
    file = os.open(twins.shown / TEXT, os.O_RDONLY | getattr(os, flag))
    expected = "EBADF" if flag == "O_PATH" else (twins.flat / TEXT).read_bytes()[:100]
    assert outcome(lambda: os.read(file, 100)) == expected
    os.close(file)


def test_opening_what_is_of_another_kind(twins: Twins) -> None:
    shown = twins.shown
    assert outcome(lambda: os.open(shown / TEXT, os.O_RDONLY | os.O_DIRECTORY)) == "ENOTDIR"
    assert outcome(lambda: os.open(shown / TEXT / "x", os.O_RDONLY)) == "ENOTDIR"
    assert outcome(lambda: os.open(shown / "nothing", os.O_RDONLY)) == "ENOENT"
    folder = os.open(shown / "axes", os.O_RDONLY)
    assert outcome(lambda: os.read(folder, 1)) == "EISDIR"
    os.close(folder)
    assert outcome(lambda: os.listdir(shown / TEXT)) == "ENOTDIR"
    assert outcome(lambda: os.readlink(shown / TEXT)) == "EINVAL"
    # Existing names with O_CREAT alone are opened as without it.
    os.close(os.open(shown / TEXT, os.O_RDONLY | os.O_CREAT))
    assert outcome(lambda: os.open(shown / TEXT, os.O_RDONLY | os.O_CREAT | os.O_EXCL)) == "EEXIST"


# ---------------------------------------------------------------------------------------------------------------------
# Names


def test_long_raw_and_deep_names(twins: Twins) -> None:
    for root in (twins.flat, twins.shown):
        assert (root / "odd" / LONG_NAME).read_text() == "long"
        assert outcome(lambda root=root: os.stat(root / "odd" / (LONG_NAME + "n"))) == "ENAMETOOLONG"  # type: ignore[misc]
        assert os.fsdecode(RAW_NAME) in os.listdir(root / "odd")
        with open(os.fsencode(root) + b"/odd/" + RAW_NAME) as stream:
            assert stream.read() == "raw"
        at = os.open(root / "odd", os.O_RDONLY)
        for _ in range(DEPTH):
            below = os.open("d" * 250, os.O_RDONLY, dir_fd=at)
            os.close(at)
            at = below
        assert os.listdir(at) == ["leaf"]
        os.close(at)
        deepest = root / "odd"
        while len(os.fsencode(deepest)) + 251 < 4096:
            deepest = deepest / ("d" * 250)
        assert deepest.is_dir() or len(deepest.parts) > DEPTH
        too_long = f"{root}/odd/" + "./" * 2048
        assert outcome(lambda too_long=too_long: os.stat(too_long)) == "ENAMETOOLONG"  # type: ignore[misc]


def test_dot_and_dot_dot(twins: Twins) -> None:
    below = twins.shown / "vectors" / "cell"
    assert os.stat(below / ".").st_ino == os.stat(below).st_ino
    assert os.stat(f"{below}/..").st_ino == os.stat(twins.shown / "vectors").st_ino
    assert os.stat(f"{below}/../../axes/../{AXIS}").st_ino == os.stat(twins.shown / AXIS).st_ino
    names = raw_names(below)
    assert names[:2] == [b".", b".."]
    assert sorted(names[2:]) == sorted(os.fsencode(name) for name in os.listdir(below))


def test_inode_numbers_and_types_are_the_same_in_each_mount(twins: Twins, mounted: Mounted) -> None:
    def listing(root: Path) -> dict[str, tuple[int, bool]]:
        found = {}
        for directory, _, _ in os.walk(root):
            if "/many" in directory or "/odd" in directory:
                continue
            with os.scandir(directory) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    assert entry.inode() == status.st_ino
                    assert entry.is_dir() == stat.S_ISDIR(status.st_mode)
                    found[os.path.relpath(entry.path, root)] = (entry.inode(), entry.is_dir())
        return found

    first = listing(twins.shown)
    with mounted(twins.flat.parent / "packed.daf") as again:
        assert listing(again) == first


# ---------------------------------------------------------------------------------------------------------------------
# Large directories


class Stream:
    """A directory stream of the C library."""

    def __init__(self, path: Path) -> None:
        self.dir = libc.opendir(os.fsencode(path))
        assert self.dir

    def next(self) -> bytes | None:
        entry = libc.readdir(self.dir)
        return ctypes.string_at(entry + 19) if entry else None  # d_name follows ino, off, reclen and type

    def rest(self) -> list[bytes]:
        names = []
        while (name := self.next()) is not None:
            names.append(name)
        return names

    def close(self) -> None:
        libc.closedir(self.dir)


def raw_names(path: Path) -> list[bytes]:
    stream = Stream(path)
    try:
        return stream.rest()
    finally:
        stream.close()


def test_two_readers_rewinding_and_seeking_in_ten_thousand_names(twins: Twins) -> None:
    expected = {b".", b"..", *(b"note-%05d" % number for number in range(N_NAMES))}
    one, two = Stream(twins.shown / "many"), Stream(twins.shown / "many")
    try:
        names: list[bytes] = []
        places: list[int] = []
        for _ in range(N_NAMES + 2):
            places.append(libc.telldir(one.dir))
            name, other = one.next(), two.next()
            assert name is not None
            assert name == other
            names.append(name)
        assert one.next() is None
        assert two.next() is None
        assert len(names) == len(expected)
        assert set(names) == expected
        for at in (0, 1, 2, 777, 5000, N_NAMES + 1):
            libc.seekdir(one.dir, places[at])
            assert one.next() == names[at]
        libc.seekdir(one.dir, places[9000])
        assert one.rest() == names[9000:]
        libc.rewinddir(two.dir)
        assert two.rest() == names
    finally:
        one.close()
        two.close()


# ---------------------------------------------------------------------------------------------------------------------
# Everything that would change something

AT_FDCWD, AT_EMPTY_PATH = -100, 0x1000


def system(name: str, *arguments: object) -> None:
    """A function of the C library that Python does not offer as it is."""
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)


def mutations(root: Path) -> dict[str, Callable[[], object]]:
    """Every call that changes a file system, on names that are there and on some that are not."""
    file, new, folder = root / TEXT, root / "new", root / "axes"
    raw, raw_new = os.fsencode(file), os.fsencode(new)
    return {
        "open O_WRONLY": lambda: os.open(file, os.O_WRONLY),
        "open O_RDWR": lambda: os.open(file, os.O_RDWR),
        "open O_TRUNC": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "open O_APPEND": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
        "open O_CREAT": lambda: os.open(new, os.O_RDONLY | os.O_CREAT, 0o644),
        "open O_CREAT O_EXCL": lambda: os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644),
        "open O_TMPFILE": lambda: os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o644),
        "truncate": lambda: os.truncate(file, 1),
        "utimensat": lambda: os.utime(file, ns=(1, 1)),
        "utimensat of a directory": lambda: os.utime(folder),
        "chmod": lambda: os.chmod(file, 0o600),
        "chown": lambda: os.chown(file, os.getuid(), os.getgid()),
        "lchown": lambda: os.lchown(file, os.getuid(), os.getgid()),
        "link": lambda: os.link(file, new),
        "symlink": lambda: os.symlink("x", new),
        "mkdir": lambda: os.mkdir(new),
        "mkfifo": lambda: os.mkfifo(new),
        "mknod": lambda: os.mknod(new, 0o644 | stat.S_IFREG),
        "rename": lambda: os.rename(file, new),
        "rename onto another": lambda: os.rename(file, root / AXIS),
        "renameat2 exchange": lambda: system("renameat2", AT_FDCWD, raw, AT_FDCWD, os.fsencode(root / AXIS), 2),
        "rmdir": lambda: os.rmdir(folder),
        "unlink": lambda: os.unlink(file),
        "setxattr": lambda: os.setxattr(file, "user.x", b"y"),
        "removexattr": lambda: os.removexattr(file, "user.x"),
        "mknodat of a socket": lambda: system("mknod", raw_new, stat.S_IFSOCK | 0o600, 0),
    }


def test_everything_that_changes_something_is_refused(twins: Twins) -> None:
    before = {path: os.lstat(twins.shown / path) for path in (*FILES, "axes")}
    calls = mutations(twins.shown)
    results = {name: outcome(call) for name, call in calls.items()}
    assert results == dict.fromkeys(calls, "EROFS")
    assert {path: os.lstat(twins.shown / path) for path in before} == before
    assert not (twins.shown / "new").exists()


def test_what_changes_through_a_descriptor_is_refused(both: tuple[int, int]) -> None:
    _, here = both
    refused = {
        "write": lambda: os.write(here, b"x"),
        "pwrite": lambda: os.pwrite(here, b"x", 0),
        "writev": lambda: os.writev(here, [b"x"]),
        "fallocate": lambda: os.posix_fallocate(here, 0, 10),
    }
    assert {name: outcome(call) for name, call in refused.items()} == dict.fromkeys(refused, "EBADF")
    assert outcome(lambda: os.ftruncate(here, 0)) == "EINVAL"
    frozen = {
        "fchmod": lambda: os.fchmod(here, 0o600),
        "fchown": lambda: os.fchown(here, os.getuid(), os.getgid()),
        "futimens": lambda: os.utime(here),
        "fsetxattr": lambda: os.setxattr(here, "user.x", b"y"),
    }
    assert {name: outcome(call) for name, call in frozen.items()} == dict.fromkeys(frozen, "EROFS")


# ---------------------------------------------------------------------------------------------------------------------
# Other people's stress


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
@pytest.mark.parametrize("engine", ["sync", "psync", "pvsync", "mmap", "libaio", "io_uring"])
def test_fio_reads_without_errors(engine: str, twins: Twins) -> None:
    command = [
        "fio", "--name=mounted", f"--filename={twins.shown / BIG}", "--readonly", "--rw=randread", "--bs=4k",
        "--size=2m", "--loops=2", f"--ioengine={engine}", "--numjobs=2", "--thread", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S * 2, text=True)
    if "not supported" in done.stderr or "not loadable" in done.stderr or "not permitted" in done.stdout + done.stderr:
        pytest.skip(f"fio has no {engine} here")
    assert done.returncode == 0, done.stdout + done.stderr
    jobs = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    assert [job["error"] for job in jobs] == [0, 0]
    assert sum(job["read"]["io_bytes"] for job in jobs) > 0


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_fio_finds_what_it_wrote(mounted: Mounted, tmp_path: Path) -> None:
    """Each block holds a checksum and its own place, which fio checks through the mount; not so a damaged one."""
    source = write_daf(tmp_path / "x.daf")
    common = ["fio", "--name=x", "--bs=4k", "--size=4m", "--verify=crc32c", "--ioengine=psync", "--minimal"]

    def verified(file: Path) -> int:
        command = [*common, f"--filename={file}", "--rw=randread", "--readonly", "--norandommap=0"]
        return subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S, cwd=tmp_path).returncode

    for name in ("sound", "damaged"):
        command = [*common, f"--filename={source / name}", "--rw=write", "--do_verify=0"]
        subprocess.run(command, capture_output=True, check=True, timeout=LIMIT_S, cwd=tmp_path)
    with (source / "damaged").open("r+b") as file:
        file.seek(1_000_000)
        file.write(b"damage")
    with mounted(source) as shown:
        assert verified(shown / "sound") == 0
        assert verified(shown / "damaged") != 0


@pytest.mark.skipif(shutil.which("stress-ng") is None, reason="stress-ng is not installed")
@pytest.mark.parametrize("stressor", ["dirdeep", "getdent", "fstat", "dentry", "file-ioctl"])
def test_stress_ng_leaves_the_mount_as_it_was(stressor: str, twins: Twins) -> None:
    """Most stressors write, which is refused; none may harm the mount."""
    command = ["stress-ng", f"--{stressor}", "2", "--timeout", "2", "--temp-path", str(twins.shown)]
    subprocess.run(command, capture_output=True, check=False, timeout=LIMIT_S)
    for name in FILES:
        assert (twins.shown / name).read_bytes() == (twins.flat / name).read_bytes()
