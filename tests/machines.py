"""Commands run on a machine of their own, and what they are run on. Imported by tests; owns no fixtures."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mounts import LIMIT_S, wait_until

REPOSITORY = Path(__file__).resolve().parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
"""The commands that are installed, and the function that each runs."""

AS_USER = ("setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups")
"""Put before a command, runs it as an ordinary user."""

CELLS = "a\nb\nc\n"


class Machine(NamedTuple):
    """Where commands run with their own view of the system."""

    init: int
    """The process that holds the namespaces."""
    place: Path
    """A directory for the test's files, the same inside and outside."""

    def run(
        self,
        *command: str | Path,
        cwd: Path | None = None,
        environment: dict[str, str] | None = None,
        limit_s: int = LIMIT_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command inside to its end."""
        return subprocess.run(
            self.command(*command, cwd=cwd),
            env=os.environ | (environment or {}),
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            timeout=limit_s,
        )

    def command(self, *command: str | Path, cwd: Path | None = None) -> list[str | Path]:
        """The command line that runs a command inside."""
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        target = [f"--target={self.init}", "--mount", "--pid", f"--wd={cwd or self.place}"]
        return ["nsenter", *target, *user, "--", *command]

    def good(self, *command: str | Path, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
        """What a command that must succeed without a word of complaint prints."""
        done = self.run(*command, cwd=cwd, environment=environment)
        assert (done.returncode, done.stderr) == (0, ""), f"{command}: {done}"
        return done.stdout

    def read(self, path: Path) -> str:
        """The text of a file inside."""
        return self.good("cat", "--", path)

    def mounts(self) -> list[list[str]]:
        """Target, source and type of each dafmount inside, as findmnt knows them."""
        columns = ("--noheadings", "--raw", "--output", "TARGET,SOURCE,FSTYPE")
        done = self.run("findmnt", "--types", "fuse.dafmount", *columns)
        return [[_unescaped(field) for field in line.split(" ")] for line in done.stdout.splitlines()]

    def servers(self) -> int:
        """How many processes serve a mount inside."""
        done = self.run("ps", "-eo", "args")
        return sum("dafmount.cli.dafmount" in line or "bin/dafmount " in line for line in done.stdout.splitlines())

    def unmounted(self, mountpoint: Path) -> None:
        """Unmount as an administrator does; the server must end."""
        self.good("umount", mountpoint)
        wait_until(lambda: self.servers() == 0, "ending")


def _unescaped(field: str) -> str:
    """Findmnt writes blanks and the like as \\x20."""
    return field.encode("latin-1", "backslashreplace").decode("unicode_escape")


def let_users_in(machine: Machine) -> None:
    """Give ordinary users /dev/fuse, as udev does, and a directory /mnt where they can look at files of ours."""
    machine.good("mount", "-t", "tmpfs", "tmpfs", "/mnt")
    machine.good("mknod", "-m", "666", "/mnt/fuse", "c", "10", "229")
    machine.good("mount", "--bind", "/mnt/fuse", "/dev/fuse")


def children(process: int) -> list[int]:
    """The processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def write_command(path: Path) -> None:
    """The command dafmount of this checkout, as a program."""
    write_program(path, f'PYTHONPATH={REPOSITORY} exec {sys.executable} -m dafmount.cli.dafmount "$@"')


def write_program(path: Path, text: str) -> None:
    """A program for the shell."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def write_archive(path: Path, groups: Sequence[str] = ("",)) -> Path:
    """A small data set, or one in each group."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as stream:
        for group in groups:
            prefix = f"{group}/" if group else ""
            stream.writestr(f"{prefix}daf.json", '{"version":[1,1]}\n')
            stream.writestr(f"{prefix}axes/cell.txt", CELLS)
    return path
