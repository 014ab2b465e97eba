"""The line that tells how far a command is."""

from __future__ import annotations

import io

import pytest

from dafmount.cli.progress import ProgressLine, progress_text, size_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536 << 20, "1.5 GiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 60, "1048576.0 TiB"),
    ],
)
def test_sizes(n_bytes: int, text: str) -> None:
    assert size_text(n_bytes) == text


def test_share_rate_and_time_left() -> None:
    assert progress_text(1 << 20, 4 << 20, 2.0) == " 25% of 4.0 MiB: 1.0 MiB, 512.0 KiB/s, 0:06 left"


@pytest.mark.parametrize("total", [0, 10])
def test_a_total_that_is_unknown_or_wrong_is_left_out(total: int) -> None:
    assert progress_text(20, total, 1.0) == "20 B, 20 B/s"


def test_nothing_elapsed_yet() -> None:
    assert progress_text(0, 10, 0.0) == "  0% of 10 B: 0 B, 0 B/s, 0:00 left"


def test_only_a_terminal_is_written_to() -> None:
    stream = io.StringIO()
    with ProgressLine(stream=stream) as line:
        line._last = -1e9
        line.update(1, 2)
    assert stream.getvalue() == ""


def test_the_line_is_gone_at_the_end() -> None:
    stream = Terminal()
    with ProgressLine(stream=stream) as line:
        line._last = -1e9
        line.update(1, 2)
        line.update(2, 2)  # too soon to show
    shown = stream.getvalue()
    assert " 50% of 2 B" in shown
    assert "100%" not in shown
    assert shown.endswith("\r\x1b[K")


def test_a_line_that_is_not_wanted() -> None:
    stream = Terminal()
    with ProgressLine(is_wanted=False, stream=stream) as line:
        line._last = -1e9
        line.update(1, 2)
    assert stream.getvalue() == ""
