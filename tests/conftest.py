"""What every test may ask for: the corpus, real mounts, and the rules about skipped and stuck tests.

Mounts are served by a process of their own, never by the one that runs the tests: a test that waits for a file system
served by itself waits for ever.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import hypothesis.configuration
import pytest

from mounts import DAFMOUNT, LIMIT_S, Mounted, is_mounted, wait_until

REPOSITORY = Path(__file__).resolve().parent.parent
FAULT = re.compile(r"\b(?:WARNING|ERROR|CRITICAL)\b|^Traceback ")

STUCK_AFTER_S = 100
"""Less than pytest's own timeout, which cannot interrupt a read that waits for a file system."""

hypothesis.configuration.set_hypothesis_home_dir(Path(sys.prefix) / "cache" / "hypothesis")

_servers: set[subprocess.Popen[bytes]] = set()


# ---------------------------------------------------------------------------------------------------------------------
# Order, skips, stuck tests

_ROOMS = ("shard", "source", "daf", "tree", "cli", None, "conformance", "faults", "mount", "home")
"""What the others build on first; None stands for whatever is not named here."""

_MOUNTING = tuple(f"tests/{room}/" for room in ("conformance", "mount", "home", "scripts"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tests = REPOSITORY / "tests"

    def rank(item: pytest.Item) -> int:
        room = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else None
        return _ROOMS.index(room if room in _ROOMS else None)

    items.sort(key=rank)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.get_closest_marker("soak") is None)  # takes the longest, beside all others


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Where tests run side by side: those of a file one after the other, and so all that mount, but for the soak.

    Some look at all mounts of the machine, and so hold up who unmounts one.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByMounts(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            is_mounting = path.startswith(_MOUNTING) and not path.endswith("test_soak.py")
            return "mounts" if is_mounting else path

    return ByMounts(config, log)


def why_fuse_is_missing() -> str | None:
    """The reason why nothing can be mounted here, or None."""
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed"
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        return f"/dev/fuse cannot be opened: {error.strerror}"
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("fuse") and (reason := why_fuse_is_missing()):
        pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and item.get_closest_marker("fuse") and os.environ.get("CI"):
        report.outcome = "failed"
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.longrepr = f"where CI is set, a test that mounts must not be skipped: {reason}"
    return report


@pytest.fixture(autouse=True)
def free_stuck_reads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kills the file systems when a test takes too long: what waited for them gets an error, and the test fails."""
    if request.node.get_closest_marker("fuse") is None:
        yield
        return

    def kill_all() -> None:
        for server in list(_servers):
            server.kill()

    timer = threading.Timer(STUCK_AFTER_S, kill_all)
    timer.daemon = True
    timer.start()
    yield
    timer.cancel()


# ---------------------------------------------------------------------------------------------------------------------
# Fixtures


@pytest.fixture(scope="session")
def corpus() -> Path:
    """Archives that other programs wrote, and what a mount of them must show."""
    place = REPOSITORY.parent / "shared" / "corpus"
    if not place.is_dir():
        pytest.skip(f"the corpus is not there: {place}")
    return place


@pytest.fixture(scope="session")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Mounted:
    """A context manager: `with mounted(source, "-o", "shards", log=PATH, expect_log=["pattern"]) as mountpoint: ...`.

    It always unmounts, and fails when the server does not end well or when its log holds a warning or an error that no
    pattern of `expect_log` or `may_log` matches; one of `expect_log` that matches none is a failure too.
    """

    @contextmanager
    def mount(
        source: Path | str,
        *options: str,
        log: Path | None = None,
        expect_log: Sequence[str] = (),
        may_log: Sequence[str] = (),
    ) -> Iterator[Path]:
        place = tmp_path_factory.mktemp("mounted")
        mountpoint = place / "mnt"
        mountpoint.mkdir()
        log = log or place / "log"
        output = place / "output"
        command = [*DAFMOUNT, str(source), str(mountpoint), "-f", "--log-file", str(log), *options]
        with output.open("wb") as stream:
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, cwd=place)
        _servers.add(server)
        try:
            wait_until(lambda: is_mounted(mountpoint) or server.poll() is not None, "mounting")
            if server.poll() is not None:
                pytest.fail(f"dafmount ended with {server.returncode}: {output.read_text()}")
            yield mountpoint
            status = _unmount(server, mountpoint)
        finally:
            _make_sure_it_is_gone(server, mountpoint)
            print(f"dafmount {source}:\n{output.read_text()}{log.read_text() if log.exists() else ''}")
        assert status == 0, f"the server ended with {status}: {output.read_text()}"
        _check_faults([log, output], expect_log, may_log)

    return mount


def _unmount(server: subprocess.Popen[bytes], mountpoint: Path) -> int | None:
    """Unmounts as a user would; gives the server's exit status, None where it does not end."""
    subprocess.run(["fusermount3", "-u", mountpoint], check=True, timeout=LIMIT_S)
    try:
        return server.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        return None


def _make_sure_it_is_gone(server: subprocess.Popen[bytes], mountpoint: Path) -> None:
    server.kill()
    server.wait()
    _servers.discard(server)
    if is_mounted(mountpoint):
        subprocess.run(["fusermount3", "-uz", mountpoint], check=False, timeout=LIMIT_S)


def _check_faults(places: Sequence[Path], expected: Sequence[str], allowed: Sequence[str]) -> None:
    faults = [
        line
        for place in places
        if place.exists()
        for line in place.read_text(errors="backslashreplace").splitlines()
        if FAULT.search(line)
    ]
    undeclared = [line for line in faults if not any(re.search(pattern, line) for pattern in (*expected, *allowed))]
    assert not undeclared, "the server logged what the test did not declare:\n" + "\n".join(undeclared)
    missing = [pattern for pattern in expected if not any(re.search(pattern, line) for line in faults)]
    assert not missing, f"the server did not log {missing}, but:\n" + "\n".join(faults)
