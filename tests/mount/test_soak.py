"""The soak, for as long as $SOAK_SECONDS says (60, where CI is set 300)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("SOAK_SECONDS") or (300 if os.environ.get("CI") else 60))
END_LIMIT_S = 120
"""For starting, ending, and whatever a busy machine adds."""

pytestmark = [pytest.mark.fuse, pytest.mark.soak]


@pytest.mark.timeout(SECONDS + 2 * END_LIMIT_S)
def test_mounts_under_mixed_load_serve_no_wrong_byte_and_do_not_grow() -> None:
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "tests")])
    # It takes all the time that it gets, and other tests run beside it.
    # Where it may, in a namespace of its own, without copies of others' mounts: a copy keeps a daemon from ending.
    leave = 'umount -a -l -t fuse.dafmount; exec "$@"'
    alone = ["unshare", "--mount", "sh", "-c", leave, "sh"] if os.geteuid() == 0 else []
    soak = [sys.executable, REPOSITORY / "scripts" / "soak.py", "--seconds", str(SECONDS)]
    command = [*alone, "nice", "-n", "10", *soak]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, check=False, text=True,
        timeout=SECONDS + END_LIMIT_S,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
