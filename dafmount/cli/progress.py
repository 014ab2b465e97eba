"""One line on a terminal that tells how far a command is: share, bytes, rate, time left. Elsewhere nothing."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

_EVERY_S = 0.1
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """Use it in a `with` statement, so that the line is gone when something else is printed."""

    def __init__(self, *, is_wanted: bool = True, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_shown = is_wanted and self._stream.isatty()
        self._began = self._last = time.monotonic()
        self._has_line = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def update(self, done_bytes: int, total_bytes: int) -> None:
        """Show how far it is; no more often than ten times a second."""
        now = time.monotonic()
        if not self._is_shown or now - self._last < _EVERY_S:
            return
        self._last = now
        self._has_line = True
        self._stream.write(_CLEAR + progress_text(done_bytes, total_bytes, now - self._began))
        self._stream.flush()

    def clear(self) -> None:
        """Take the line away."""
        if self._has_line:
            self._stream.write(_CLEAR)
            self._stream.flush()
            self._has_line = False


def progress_text(done_bytes: int, total_bytes: int, elapsed_s: float) -> str:
    """The line, for so many bytes after so many seconds."""
    rate = done_bytes / elapsed_s if elapsed_s > 0 else 0.0
    text = f"{size_text(done_bytes)}, {size_text(int(rate))}/s"
    if total_bytes <= 0 or done_bytes > total_bytes:
        return text
    percent = 100 * done_bytes // total_bytes
    left_s = int((total_bytes - done_bytes) / rate) if rate else 0
    return f"{percent:3d}% of {size_text(total_bytes)}: {text}, {left_s // 60}:{left_s % 60:02d} left"


def size_text(n_bytes: int) -> str:
    """`17 B`, `4.0 KiB`, `1.5 GiB`."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{n_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
