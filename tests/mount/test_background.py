"""Going into the background: what the waiting parent hears, and that nothing is started before the fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dafmount.mount import background
from dafmount.mount.background import Outcome, Report
from mounts import LIMIT_S


def test_the_parent_hears_of_success_and_the_child_goes_on() -> None:
    readable, writable = os.pipe()

    def child(report: Report) -> int:
        assert report(Outcome(0, ""))
        told_twice = report(Outcome(3, "too late"))
        os.write(writable, f"{told_twice} {os.getcwd()} {os.getsid(0) == os.getpid()}".encode())
        return 0

    assert background.run(child) == Outcome(0, "")
    os.close(writable)
    with os.fdopen(readable) as pipe:
        assert pipe.read() == "False / True"


def test_the_parent_hears_of_an_error_in_any_script() -> None:
    def child(report: Report) -> int:
        report(Outcome(7, "caf\u00e9 \udcff"))
        return 7

    assert background.run(child) == Outcome(7, "caf\u00e9 \udcff")


def test_the_parent_hears_of_what_nobody_expected() -> None:
    def child(report: Report) -> int:
        raise RuntimeError("odd")

    assert background.run(child) == Outcome(1, "unexpected RuntimeError: odd")


def test_the_parent_does_not_wait_for_a_child_that_is_gone() -> None:
    def child(report: Report) -> int:
        os._exit(0)

    outcome = background.run(child)
    assert outcome.exit_code == 1
    assert "ended before the mount was usable" in outcome.message


def test_an_interrupted_parent_takes_the_child_along() -> None:
    readable, writable = os.pipe()

    def child(report: Report) -> int:
        time.sleep(0.5)  # until the parent has left os.fork, whose hooks swallow what interrupts them
        os.kill(os.getppid(), signal.SIGINT)
        signal.pause()
        return 0

    assert background.run(child) == Outcome(130, "interrupted")
    os.close(writable)
    with os.fdopen(readable) as pipe:
        assert pipe.read() == ""  # which is read when the child, too, no longer holds it


@pytest.mark.fuse
def test_nothing_that_starts_threads_is_imported_before_the_fork(tmp_path: Path) -> None:
    script = """
import sys
from dafmount.cli import dafmount
from dafmount.mount import background

def show(child):
    heavy = {"numpy", "trio", "pyfuse3", "blosc2", "requests"}
    print(*sorted({name.partition(".")[0] for name in sys.modules} & heavy))
    return background.Outcome(0, "")

background.run = show
sys.exit(dafmount.main(["nowhere", sys.argv[1]]))
"""
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("\n", "")
