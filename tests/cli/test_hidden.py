from __future__ import annotations

import subprocess
import sys


def test_secrets_vanish_from_the_arguments_and_nothing_else_does() -> None:
    program = (
        "import sys; from pathlib import Path; from dafmount.cli.hidden import hide\n"
        "hide(sys.argv[1:3] + [''])\n"
        "print(Path('/proc/self/cmdline').read_bytes(), sys.argv[1])"
    )
    arguments = ["s3cret", "t\N{LATIN SMALL LETTER O WITH DIAERESIS}ken", "http://me:s3cret@host/x", "other"]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    assert r"\x00xxxxxx\x00xxxxxx\x00http://me:xxxxxx@host/x\x00other\x00" in done.stdout
    assert done.stdout.endswith(" s3cret\n")
