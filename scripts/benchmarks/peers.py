"""Programs that do something like it, measured beside dafmount where they are on the machine.

ratarmount and zarr-python get a virtual environment of their own in the data directory; mount-zip is used when it is
installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.data import say
from benchmarks.mounting import CannotMeasure

_ZARR = """
import sys, time, warnings
warnings.simplefilter("ignore")
import zarr
array = zarr.open_array(sys.argv[1], mode="r")
start = time.perf_counter()
values = array[: array.shape[0] // int(sys.argv[2])]
print(time.perf_counter() - start, values.nbytes)
"""


class Peers:
    """Where the peers are."""

    def __init__(self, place: Path | None) -> None:
        """`place` is the data directory; None when no peers are wanted."""
        self._place = place

    def ratarmount(self) -> tuple[str, ...]:
        """The command; raises CannotMeasure."""
        found = shutil.which("ratarmount") or str(self._environment() / "bin" / "ratarmount")
        return found, "--index-file", ":memory:"

    def mount_zip(self) -> tuple[str, ...]:
        """The command; raises CannotMeasure."""
        self._check_wanted()
        found = shutil.which("mount-zip")
        if found is None:
            raise CannotMeasure("mount-zip is not installed")
        return (found,)

    def read_with_zarr(self, array: Path, share: int) -> float:
        """Seconds a byte of reading one part of `share` of an array; raises CannotMeasure."""
        python = self._environment() / "bin" / "python"
        done = subprocess.run(
            [str(python), "-c", _ZARR, str(array), str(share)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CannotMeasure(f"zarr-python: {done.stderr.strip().splitlines()[-1]}")
        seconds, n_bytes = done.stdout.split()
        return float(seconds) / int(n_bytes)

    def _check_wanted(self) -> None:
        if self._place is None:
            raise CannotMeasure("needs --peers")

    def _environment(self) -> Path:
        self._check_wanted()
        assert self._place is not None
        environment = self._place / "peers"
        if not (environment / "complete").exists():
            say("installing ratarmount and zarr")
            for command in (
                [sys.executable, "-m", "venv", str(environment)],
                [str(environment / "bin" / "pip"), "install", "--quiet", "ratarmount", "zarr>=3.0.8"],
            ):
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise CannotMeasure(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1]}")
            (environment / "complete").touch()
        return environment
