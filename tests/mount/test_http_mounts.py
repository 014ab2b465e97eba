"""Mounts of data on web servers: nginx, Python's own, and one of the tests' that misbehaves on demand."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from web import Handler, serving

from dafmount.shard.writer import write_shard
from mounts import LIMIT_S, Mounted, is_mounted, run_dafmount, servers, wait_until

pytestmark = pytest.mark.fuse

N_ROWS = 50_000
N_COLUMNS = 300
CHUNK_ROWS = 2048


# ---------------------------------------------------------------------------------------------------------------------
# Servers and data


@contextmanager
def nginx(root: Path, place: Path) -> Iterator[str]:
    if shutil.which("nginx") is None and not Path("/usr/sbin/nginx").exists():
        pytest.skip("nginx is not installed")
    place.mkdir()
    for _ in range(10):  # somebody else may take the port before nginx does
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        (place / "nginx.conf").write_text(f"""
            daemon off; master_process off; pid {place}/pid; error_log {place}/error.log;
            events {{}}
            http {{
              access_log off; client_body_temp_path {place}/a; proxy_temp_path {place}/b; fastcgi_temp_path {place}/c;
              uwsgi_temp_path {place}/d; scgi_temp_path {place}/e;
              server {{ listen 127.0.0.1:{port}; root "{root}"; }}
            }}""")
        command = ["nginx", "-p", place, "-c", place / "nginx.conf"]
        environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin"}
        server = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        wait_until(lambda server=server, port=port: server.poll() is not None or answers(port), "starting nginx")
        if server.poll() is None:
            break
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def python_server(root: Path, place: Path) -> Iterator[str]:
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", root]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{server.stdout.readline().split()[5]}"
    finally:
        server.kill()
        server.wait()


@contextmanager
def own_server(root: Path, place: Path) -> Iterator[str]:
    with serving(root) as web:
        yield web.url


def write_metadata(root: Path) -> None:
    """What FilesDaf keeps in metadata.json."""
    entries: dict[str, object] = {}
    for axis in sorted((root / "axes").glob("*.txt")):
        lines = axis.read_bytes().count(b"\n")
        entries[f"axes/{axis.stem}"] = {"format": "axis", "n_entries": lines}
    for section in ("scalars", "vectors", "matrices"):
        for path in sorted((root / section).rglob("*.json")):
            entries[str(path.relative_to(root).with_suffix(""))] = json.loads(path.read_bytes())
    (root / "metadata.json").write_text(json.dumps(entries, ensure_ascii=False, separators=(",", ":")))


@pytest.fixture(scope="module")
def site(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What lies on the servers: the made data set, packed and flat, as directories and as archives."""
    root = tmp_path_factory.mktemp("site")
    for name in ("flat.daf", "packed.daf"):
        shutil.copytree(made / name, root / "sub dir" / name)
        write_metadata(root / "sub dir" / name)
    shutil.copy(made / "packed.daf.zip", root / "sub dir" / "packed.daf.zip")
    with zipfile.ZipFile(root / "two.dafs.zip", "w") as archive:
        for group in ("one", "deep/two"):
            for path in (made / "packed.daf").rglob("*"):
                if path.is_file() and ("axes" in path.parts or "vectors" in path.parts or path.name == "daf.json"):
                    archive.write(path, f"{group}/{path.relative_to(made / 'packed.daf')}")
    return root


def named_files(flat: Path) -> list[Path]:
    """The files of a data set that its metadata.json names."""
    return [
        path.relative_to(flat)
        for path in sorted(flat.rglob("*"))
        if path.is_file() and path.relative_to(flat).parts[0] in ("axes", "scalars", "vectors", "matrices", "daf.json")
    ]


def assert_same(flat: Path, shown: Path) -> None:
    for path in named_files(flat):
        assert (shown / path).stat().st_size == (flat / path).stat().st_size, path
        assert (shown / path).read_bytes() == (flat / path).read_bytes(), path
        assert path.name in os.listdir((shown / path).parent)


# ---------------------------------------------------------------------------------------------------------------------
# Real servers


@pytest.mark.parametrize("source", ["packed.daf.zip", "packed.daf", "packed.daf/", "flat.daf"])
@pytest.mark.parametrize("server", [nginx, python_server, own_server])
def test_a_mount_over_http_is_the_flat_tree(
    server: Callable[[Path, Path], AbstractContextManager[str]],
    source: str,
    site: Path,
    made: Path,
    mounted: Mounted,
    tmp_path: Path,
) -> None:
    expected = ["sends no ranges"] if server is python_server else []
    with server(site, tmp_path / "server") as url, mounted(f"{url}/sub dir/{source}", expect_log=expected) as shown:
        assert_same(made / "flat.daf", shown)


def test_groups_over_http(site: Path, made: Path, mounted: Mounted) -> None:
    label = "vectors/cell/label.txt"
    with serving(site) as web:
        with mounted(web.url + "/two.dafs.zip#/deep/two") as shown:
            assert (shown / label).read_bytes() == (made / "flat.daf" / label).read_bytes()
        with mounted(web.url + "/two.dafs.zip") as shown:
            assert sorted(os.listdir(shown)) == ["deep", "one"]
            assert (shown / "one" / label).read_bytes() == (made / "flat.daf" / label).read_bytes()


@pytest.mark.parametrize(
    ("source", "code", "message"),
    [
        ("/made.daf", 4, "made.daf: not a Daf: it has no metadata.json, without which nothing in it can be found"),
        ("/nothing.daf", 4, "nothing.daf: not a Daf: it has no daf.json"),
        ("/nothing.daf.zip", 3, "nothing.daf.zip: the server answered 404"),
        ("/made.daf/daf.json", 4, "not a Daf: it has no daf.json"),
        ("/empty.zip", 9, "empty.zip"),
        ("/x.dafs.zip#/none", 6, "no group 'none'; it has one"),
        ("/x.daf.zip#/none", 2, r"only \.dafs\.zip archives have groups"),
        ("/x.zip#none", 2, "after # a group is expected"),
    ],
)
def test_sources_that_cannot_be_mounted(source: str, code: int, message: str, tmp_path: Path) -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("one/daf.json", '{"version":[1,1]}')
    files = {"made.daf/daf.json": b'{"version":[1,1]}\n', "empty.zip": b"", "x.dafs.zip": stream.getvalue()}
    (tmp_path / "mnt").mkdir()
    with serving(files) as web:
        done = run_dafmount(web.url + source, tmp_path / "mnt")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1)
    assert re.search(message, done.stderr)


def test_no_secret_is_seen(site: Path, mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pa55word\n")
    secrets = ("t0ken", "k3y", "us3rinfo", "pa55word", "bWU6")
    options = ("-v", "-o", "header=X-Key: k3y,user=me", "-o", f"password-file={tmp_path}/password")

    def check(handler: Handler) -> bool:
        headers = handler.request_record.headers
        allowed = headers.get("x-key") == "k3y" and headers.get("authorization") == "Basic bWU6cGE1NXdvcmQ="
        if not allowed:
            handler.send_whole(401, b"")
        return not allowed

    log = tmp_path / "log"
    with serving(site, check) as web:
        url = web.url.replace("//", "//us3rinfo:us3rinfo@") + "/sub dir/packed.daf.zip?token=t0ken"
        with mounted(url, *options, log=log) as shown:
            assert (shown / "axes" / "gene.txt").read_bytes()
            (process,) = servers(shown)
            seen = [
                Path(f"/proc/{process}/cmdline").read_bytes(),
                Path("/proc/self/mountinfo").read_bytes(),
                subprocess.run(["ps", "-ww", "-o", "args", str(process)], capture_output=True, check=True).stdout,
            ]
            assert b"packed.daf.zip" in seen[0]
            assert b"127.0.0.1" in seen[1]
        seen.append(log.read_bytes())
        (tmp_path / "mnt").mkdir()
        refused = run_dafmount(url, tmp_path / "mnt", "-v", "-o", "header=X-Key: k3y-wrong")
        assert refused.returncode == 10
        seen.append(refused.stderr.encode())
    for text in seen:
        assert not any(secret.encode() in text for secret in secrets)


# ---------------------------------------------------------------------------------------------------------------------
# Faults under a mount


def reason(call: Callable[[], object]) -> int | None:
    """The errno of a call, None where it succeeds."""
    try:
        call()
    except OSError as error:
        return error.errno
    return None


BIG = "matrices/cell/gene/fraction.data"


@pytest.mark.parametrize(
    ("status", "expected", "log"),
    [(403, errno.EACCES, "answered 403"), (404, errno.ENOENT, None), (500, errno.EIO, "answered 500")],
)
def test_refused_files_cost_nothing_else(
    status: int, expected: int, log: str | None, site: Path, made: Path, mounted: Mounted
) -> None:
    def refuse(handler: Handler) -> bool:
        if "fraction" not in handler.path:
            return False
        handler.send_whole(status, b"")
        return True

    with serving(site, refuse) as web:
        expect_log = [log] if log else []
        with mounted(web.url + "/sub dir/packed.daf", "-o", "retries=0", expect_log=expect_log) as shown:
            assert reason((shown / BIG).read_bytes) == expected
            other = "matrices/cell/gene/counts.data"
            assert (shown / other).read_bytes() == (made / "flat.daf" / other).read_bytes()
            web.behave = None
            assert (shown / BIG).read_bytes() == (made / "flat.daf" / BIG).read_bytes()


def test_a_server_that_falls_silent(site: Path, made: Path, mounted: Mounted) -> None:
    end = threading.Event()
    with serving(site, lambda handler: "fraction" in handler.path and end.wait(60)) as web:
        with mounted(web.url + "/sub dir/packed.daf", "-o", "timeout=2", expect_log=["fraction"]) as shown:
            assert reason((shown / BIG).read_bytes) == errno.ETIMEDOUT
            other = "matrices/cell/gene/counts.data"
            assert (shown / other).read_bytes() == (made / "flat.daf" / other).read_bytes()
        end.set()


def test_a_server_that_goes_away(site: Path, mounted: Mounted) -> None:
    with serving(site) as web:
        mount = mounted(web.url + "/sub dir/packed.daf.zip", "-o", "timeout=5", expect_log=["the connection failed"])
        shown = mount.__enter__()
        (shown / "axes/gene.txt").read_bytes()
    try:
        assert (shown / "axes/gene.txt").read_bytes()
        assert reason((shown / BIG).read_bytes) in (errno.EIO, errno.ETIMEDOUT)
    finally:
        mount.__exit__(None, None, None)


def test_an_archive_that_is_replaced(site: Path, mounted: Mounted) -> None:
    with serving(site) as web, mounted(web.url + "/sub dir/packed.daf.zip", expect_log=["changed since"]) as shown:
        (shown / "axes/gene.txt").read_bytes()
        web.version = "2"
        assert reason((shown / BIG).read_bytes) == errno.ESTALE


# ---------------------------------------------------------------------------------------------------------------------
# Files that change on the server

LONG = "vectors/cell/long.data"


def site_of(values: np.ndarray, is_packed: bool) -> dict[str, bytes]:
    """The files of a server that has one data set twice, as a directory and as an archive."""
    descriptor = {"format": "dense", "eltype": "UInt32"}
    files = {"daf.json": b'{"version":[1,1]}\n', "axes/cell.txt": b"".join(b"%d\n" % n for n in range(len(values)))}
    if is_packed:
        shard = io.BytesIO()
        write_shard(shard, values.tobytes(), values.shape, (10_000,), 4, "zstd", 1)
        descriptor |= {"packed_format": "indexed+zipped", "chunk_shape": [10_000], "index_location": "start"}  # type: ignore[dict-item]
        descriptor |= {"compression": "zstd"}
        files[LONG.replace(".data", ".zip")] = shard.getvalue()
    else:
        files[LONG] = values.tobytes()
    files[LONG.replace(".data", ".json")] = json.dumps(descriptor).encode()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as stream:
        for name, data in files.items():
            stream.writestr(name, data)
    axes = {"axes/cell": {"n_entries": len(values)}}
    files["metadata.json"] = json.dumps(axes | {LONG.removesuffix(".data"): descriptor}).encode()
    return {f"x.daf/{name}": data for name, data in files.items()} | {"x.daf.zip": archive.getvalue()}


@pytest.fixture(scope="module", params=[False, True], ids=["flat", "packed"])
def states(request: pytest.FixtureRequest) -> list[tuple[bytes, dict[str, bytes]]]:
    """Two states of a data set: its vector's bytes, and what lies on the server. The names and sizes are the same."""
    random = np.random.default_rng(9)
    made = [random.integers(0, 1 << 32, 500_000, dtype="<u4") for _ in range(2)]
    return [(values.tobytes(), site_of(values, request.param)) for values in made]


@pytest.mark.parametrize("source", ["x.daf", "x.daf.zip"])
@pytest.mark.parametrize("refresh", ["0", "0.1"])
def test_a_data_set_that_is_replaced_is_shown_anew(
    source: str, refresh: str, states: list[tuple[bytes, dict[str, bytes]]], mounted: Mounted
) -> None:
    """Without looking for changes too, for a read finds out."""
    (old, old_files), (new, new_files) = states
    with (
        serving(old_files) as web,
        mounted(f"{web.url}/{source}?key=secret", "-o", f"refresh={refresh}", expect_log=["changed|replaced"]) as shown,
        (shown / LONG).open("rb", buffering=0) as opened,
    ):
        assert opened.read(4096) == old[:4096]
        web.files, web.version = new_files, "2"
        assert reason(lambda: [opened.read(4096) for _ in range(len(old) // 4096)]) == errno.ESTALE
        assert (shown / LONG).read_bytes() == new
        assert (shown / LONG).stat().st_size == len(new)
        assert reason(lambda: os.pread(opened.fileno(), 4096, len(old) - 8192)) == errno.ESTALE
        assert all("key=secret" in request.path for request in web.requests)


@pytest.mark.parametrize("source", ["x.daf", "x.daf.zip"])
def test_a_replaced_data_set_is_noticed_though_the_kernel_remembers_all_of_it(
    source: str, states: list[tuple[bytes, dict[str, bytes]]], mounted: Mounted
) -> None:
    (old, old_files), (new, new_files) = states
    replaced = "replaced while the file was open"
    with (
        serving(old_files) as web,
        mounted(f"{web.url}/{source}", "-o", "refresh=0.1", may_log=[replaced]) as shown,
    ):
        assert (shown / LONG).read_bytes() == old
        web.files, web.version = new_files, "2"
        found = [old]

        def is_new() -> bool:
            code = reason(lambda: found.append((shown / LONG).read_bytes()))
            assert code in (None, errno.ESTALE)
            return found[-1] == new

        wait_until(is_new, "the new state")
        assert set(found) == {old, new}


def test_a_server_that_goes_away_for_a_while_changes_nothing(
    states: list[tuple[bytes, dict[str, bytes]]], mounted: Mounted
) -> None:
    (old, files), _ = states

    def fails(handler: Handler) -> bool:
        handler.send_whole(503, b"")
        return True

    with (
        serving(files) as web,
        mounted(f"{web.url}/x.daf.zip", "-o", "refresh=0.05,retries=0") as shown,
        (shown / LONG).open("rb", buffering=0) as file,
    ):
        assert file.read(4096) == old[:4096]
        web.behave = fails
        n_before = len(web.requests)
        wait_until(lambda: len(web.requests) > n_before + 3, "some looks at the server")
        web.behave = None
        assert (shown / LONG).read_bytes() == old


# ---------------------------------------------------------------------------------------------------------------------
# What is fetched


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A matrix of many columns, packed in an archive."""
    random = np.random.default_rng(5)
    values = random.integers(0, 1000, (N_COLUMNS, N_ROWS)).astype("<u4")
    shard = io.BytesIO()
    write_shard(shard, values.tobytes(), (N_ROWS, N_COLUMNS), (CHUNK_ROWS, 1), 4, "blosc_zstd_bitshuffle", 1)
    packing = {"packed_format": "indexed+zipped", "chunk_shape": [CHUNK_ROWS, 1], "index_location": "start"}
    descriptor = {"format": "dense", "eltype": "UInt32", **packing, "compression": "blosc_zstd_bitshuffle"}
    place = tmp_path_factory.mktemp("wide")
    with zipfile.ZipFile(place / "wide.daf.zip", "w") as archive:
        archive.writestr("daf.json", '{"version":[1,1]}\n')
        archive.writestr("axes/cell.txt", "".join(f"{n}\n" for n in range(N_ROWS)))
        archive.writestr("axes/gene.txt", "".join(f"{n}\n" for n in range(N_COLUMNS)))
        archive.writestr("matrices/cell/gene/x.json", json.dumps(descriptor))
        archive.writestr("matrices/cell/gene/x.zip", shard.getvalue())
    return place, values


def many_vectors(place: Path, n_vectors: int, n_values: int) -> Path:
    """An archive of packed vectors that do not compress, each after its descriptor."""
    values = np.random.default_rng(4).integers(0, 1 << 32, n_values, dtype="<u4")
    shard = io.BytesIO()
    write_shard(shard, values.tobytes(), values.shape, (n_values,), 4, "zstd", 1)
    packing = {"packed_format": "indexed+zipped", "chunk_shape": [n_values], "index_location": "start"}
    descriptor = json.dumps({"format": "dense", "eltype": "UInt32", **packing, "compression": "zstd"})
    with zipfile.ZipFile(place / "many.daf.zip", "w") as archive:
        archive.writestr("daf.json", '{"version":[1,1]}\n')
        archive.writestr("axes/cell.txt", "".join(f"{n}\n" for n in range(n_values)))
        for number in range(n_vectors):
            archive.writestr(f"vectors/cell/v{number}.json", descriptor)
            archive.writestr(f"vectors/cell/v{number}.zip", shard.getvalue())
    return place / "many.daf.zip"


@pytest.mark.parametrize(("n_vectors", "n_values", "are_near"), [(2000, 250, True), (200, 6000, False)])
def test_descriptors_come_together_or_at_the_same_time(
    n_vectors: int, n_values: int, are_near: bool, mounted: Mounted, tmp_path: Path
) -> None:
    many_vectors(tmp_path, n_vectors, n_values)
    lock, now, most = threading.Lock(), 0, 0

    def count(handler: Handler) -> bool:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        handler.send_content()
        with lock:
            now -= 1
        return True

    with serving(tmp_path, count, delay_s=0.01) as web, mounted(web.url + "/many.daf.zip") as shown:
        command = ["ls", "-l", str(shown), str(shown / "vectors/cell")]
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
        assert len(re.findall(rf" {4 * n_values} .* v\d+\.data", listing)) == n_vectors
        assert len(re.findall(r" v\d+\.json", listing)) == n_vectors
        assert len(web.requests) <= (20 if are_near else n_vectors + 20)
        if not are_near:
            assert most > 1
        descriptor = json.loads((shown / "vectors/cell/v99.json").read_text())
        assert descriptor == {"format": "dense", "eltype": "UInt32"}


def test_columns_far_apart_cost_a_request_each(wide: tuple[Path, np.ndarray], mounted: Mounted) -> None:
    place, values = wide
    columns = [int(c) for c in np.random.default_rng(6).permutation(np.arange(0, N_COLUMNS, 6))]
    with serving(place) as web, mounted(web.url + "/wide.daf.zip") as shown:
        path = shown / "matrices/cell/gene/x.data"
        assert path.stat().st_size == values.nbytes
        web.requests.clear()
        with path.open("rb", buffering=0) as file:
            for column in columns:
                assert os.pread(file.fileno(), N_ROWS * 4, column * N_ROWS * 4) == values[column].tobytes()
        n_requests, sent_bytes = len(web.requests), web.sent_bytes
    needed = (place / "wide.daf.zip").stat().st_size * len(columns) / N_COLUMNS
    assert n_requests <= len(columns) + 4
    assert sent_bytes <= 1.3 * needed


def test_a_mapped_column_fetches_little_more(wide: tuple[Path, np.ndarray], mounted: Mounted) -> None:
    place, values = wide
    program = (
        "import numpy, sys; m = numpy.memmap(sys.argv[1], '<u4', 'r', shape=(%d, %d)); print(m[100].sum(), m[7].sum())"
    )
    with serving(place) as web, mounted(web.url + "/wide.daf.zip") as shown:
        path = shown / "matrices/cell/gene/x.data"
        assert path.stat().st_size == values.nbytes
        web.requests.clear()
        before = web.sent_bytes
        command = [sys.executable, "-c", program % values.shape, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
        assert done.stdout.split() == [str(values[100].sum()), str(values[7].sum())]
        assert len(web.requests) <= 2 + 4
        for_index = 16 * N_COLUMNS * -(-N_ROWS // CHUNK_ROWS)
        needed = ((place / "wide.daf.zip").stat().st_size - for_index) * 2 / N_COLUMNS
        assert web.sent_bytes - before <= 1.3 * needed + for_index


def test_reads_past_the_kernels_cache_fetch_their_chunks_only(
    wide: tuple[Path, np.ndarray], mounted: Mounted
) -> None:
    place, values = wide
    program = """
import mmap, os, sys
descriptor = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
page = mmap.mmap(-1, 4096)
for offset in map(int, sys.argv[2:]):
    assert os.preadv(descriptor, [page], offset // 4096 * 4096) == 4096
    print(page[offset % 4096 :][:4].hex())
"""
    offsets = [str(column * values[0].nbytes) for column in (3, 90, 41)]
    with serving(place) as web, mounted(web.url + "/wide.daf.zip") as shown:
        path = shown / "matrices/cell/gene/x.data"
        assert path.stat().st_size == values.nbytes
        with path.open("rb", buffering=0) as file:
            os.pread(file.fileno(), 4, 200 * N_ROWS * 4)
        before, n_before = web.sent_bytes, len(web.requests)
        done = subprocess.run(
            [sys.executable, "-c", program, path, *offsets], capture_output=True, text=True, check=True, timeout=LIMIT_S
        )
        assert done.stdout.split() == [values[column, :1].tobytes().hex() for column in (3, 90, 41)]
        assert len(web.requests) - n_before <= 3 + 3
        chunk_bytes = (place / "wide.daf.zip").stat().st_size / (N_COLUMNS * -(-N_ROWS // CHUNK_ROWS))
        for_index = 16 * N_COLUMNS * -(-N_ROWS // CHUNK_ROWS)
        assert web.sent_bytes - before <= 3 * 2.2 * chunk_bytes + 2 * for_index


def test_random_reads_fetch_nothing_extra(wide: tuple[Path, np.ndarray], mounted: Mounted) -> None:
    place, values = wide
    flat = values.tobytes()
    offsets = [int(offset) * 4096 for offset in np.random.default_rng(7).permutation(len(flat) // 4096 - 3)[:40]]
    with serving(place) as web, mounted(web.url + "/wide.daf.zip") as shown:
        path = shown / "matrices/cell/gene/x.data"
        assert path.stat().st_size == len(flat)
        with path.open("rb", buffering=0) as file:
            os.pread(file.fileno(), 4, 50 * N_ROWS * 4 + 8192)
            web.requests.clear()
            for offset in offsets:
                assert os.pread(file.fileno(), 4, offset) == flat[offset : offset + 4]
        sizes = sorted(request.sent_bytes for request in web.requests)
        assert len(web.requests) <= len(offsets) + 3
    chunk_bytes = (place / "wide.daf.zip").stat().st_size / (N_COLUMNS * -(-N_ROWS // CHUNK_ROWS))
    assert sizes[len(sizes) // 2] <= 2.2 * chunk_bytes


def test_sequential_reading_is_fetched_ahead_at_the_same_time(
    wide: tuple[Path, np.ndarray], mounted: Mounted, tmp_path: Path
) -> None:
    _, values = wide
    root = tmp_path / "flat.daf"
    for path in ("axes", "matrices/cell/gene"):
        (root / path).mkdir(parents=True)
    (root / "daf.json").write_text('{"version":[1,1]}\n')
    (root / "axes/cell.txt").write_text("".join(f"{n}\n" for n in range(N_ROWS)))
    (root / "axes/gene.txt").write_text("".join(f"{n}\n" for n in range(N_COLUMNS)))
    (root / "matrices/cell/gene/x.json").write_text('{"format":"dense","eltype":"UInt32"}\n')
    (root / "matrices/cell/gene/x.data").write_bytes(values.tobytes())
    write_metadata(root)
    lock, now, most = threading.Lock(), 0, 0

    def count(handler: Handler) -> bool:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        handler.send_content()
        with lock:
            now -= 1
        return True

    with serving(tmp_path, count, delay_s=0.01) as web, mounted(web.url + "/flat.daf") as shown:
        assert (shown / "matrices/cell/gene/x.data").read_bytes() == values.tobytes()
        fetched = [request for request in web.requests if request.path.endswith("x.data")]
        assert sum(request.sent_bytes for request in fetched) == values.nbytes
        assert len(fetched) < values.nbytes / (512 * 1024)
        assert most > 1


# ---------------------------------------------------------------------------------------------------------------------
# The cache on disk


def test_what_was_fetched_is_kept_across_mounts(site: Path, made: Path, mounted: Mounted, tmp_path: Path) -> None:
    options = ("-o", f"cache-dir={tmp_path}/cache")
    with serving(site) as web:
        for source in ("packed.daf.zip", "packed.daf"):
            with mounted(f"{web.url}/sub dir/{source}", *options) as shown:
                assert_same(made / "flat.daf", shown)
            first = web.sent_bytes
            web.requests.clear()
            with mounted(f"{web.url}/sub dir/{source}", *options) as shown:
                assert_same(made / "flat.daf", shown)
            assert web.sent_bytes < first / 5
            web.requests.clear()
            web.version += "x"
            with mounted(f"{web.url}/sub dir/{source}", *options) as shown:
                assert_same(made / "flat.daf", shown)
            assert web.sent_bytes > first / 2


def test_two_mounts_share_a_cache_and_one_is_killed(site: Path, made: Path, mounted: Mounted, tmp_path: Path) -> None:
    options = ("-o", f"cache-dir={tmp_path}/cache")
    with serving(site) as web:
        (tmp_path / "mnt").mkdir()
        assert run_dafmount(f"{web.url}/sub dir/packed.daf.zip", tmp_path / "mnt", *options).returncode == 0
        try:
            with mounted(f"{web.url}/sub dir/packed.daf.zip", *options) as shown:
                assert (tmp_path / "mnt" / BIG).read_bytes() == (shown / BIG).read_bytes()
                (process,) = servers(tmp_path / "mnt")
                os.kill(process, 9)
                assert_same(made / "flat.daf", shown)
        finally:
            for process in servers(tmp_path / "mnt"):
                os.kill(process, 9)
            wait_until(lambda: not servers(tmp_path / "mnt"), "the end of the killed server")
            if is_mounted(tmp_path / "mnt"):
                subprocess.run(["fusermount3", "-uz", tmp_path / "mnt"], check=True, timeout=LIMIT_S)


def test_a_cache_that_cannot_be_written(site: Path, made: Path, mounted: Mounted, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with serving(site) as web:
        source = f"{web.url}/sub dir/packed.daf.zip"
        with mounted(source, "-o", f"cache-dir={tmp_path}/cache", expect_log=["done without"]) as shown:
            assert_same(made / "flat.daf", shown)
