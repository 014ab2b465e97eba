"""Taking secrets out of what `ps` shows of this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

_STAT_FIELDS_BEFORE_NAME_ENDS = 2
_ARG_START, _ARG_END = 48, 49  # proc_pid_stat(5)


def hide(secrets: Iterable[str]) -> None:
    """Overwrite the secrets among the arguments of this process with `x`, where the kernel says they are.

    Until then, some hundredths of a second after the start, they can be seen; nothing happens where it cannot be done.
    """
    wanted = [os.fsencode(secret) for secret in secrets if secret]
    if not wanted:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        start, end = (int(fields[at - _STAT_FIELDS_BEFORE_NAME_ENDS - 1]) for at in (_ARG_START, _ARG_END))
        shown = ctypes.string_at(start, end - start)
        if shown != Path("/proc/self/cmdline").read_bytes():
            return
        for secret in sorted(wanted, key=len, reverse=True):
            shown = shown.replace(secret, b"x" * len(secret))
        ctypes.memmove(start, shown, len(shown))
