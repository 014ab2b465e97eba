"""What a running mount says of itself in extended attributes of its root, asked for and shown.

Owns the names `user.dafmount.*`, the meaning of what they hold, and how it looks in a terminal. Must not know where the
numbers come from (see `reporter.py`), so that the commands that ask start fast.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import NamedTuple

from dafmount.errors import MountFailed
from dafmount.mount.ask import ANSWER_LIMIT_S, Question
from dafmount.mount.mountpoint import FILE_SYSTEM, Mount, mounts

PREFIX = "user.dafmount."
WHOLE = PREFIX + "statistics"
"""Everything, as one JSON object; the others are its fields one by one."""


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a mount at one moment. Its fields are the keys of the JSON object."""

    version: str
    source: str
    mountpoint: str
    pid: int
    started: str
    """UTC, ISO 8601."""
    uptime_s: float
    memory_bytes: int
    """Of the daemon, resident."""
    requests: Mapping[str, int]
    """By kind, such as `read`."""
    bytes_served: int
    chunks_decoded: int
    cache_hits: int
    cache_misses: int
    cache_evictions: int
    cache_bytes: int
    cache_limit_bytes: int
    requests_fetched: int
    """Reads of the source, or requests to its server."""
    bytes_fetched: int
    retries: int
    errors: Mapping[str, int]
    """By errno, such as `EIO`."""
    latency_us: Mapping[str, Mapping[str, float]]
    """By kind of request: p50, p90, p99, longest."""

    @property
    def hit_rate(self) -> float | None:
        """Chunks found decoded among those needed, 0 to 1; None where none was needed."""
        needed = self.cache_hits + self.cache_misses
        return self.cache_hits / needed if needed else None

    def line(self) -> str:
        """Everything on one line, as JSON."""
        return json.dumps(asdict(self))


# ---------------------------------------------------------------------------------------------------------------------
# Asking


class Asked(NamedTuple):
    """A mount and what it said, or why it said nothing."""

    mount: Mount
    status: Status | None
    problem: str


def ask_all(asked: Iterable[Mount], limit_s: float = ANSWER_LIMIT_S) -> list[Asked]:
    """Asks all at the same time."""
    questions = [(mount, Question(mount.mountpoint, WHOLE)) for mount in asked]
    deadline = time.monotonic() + limit_s
    return [_asked(mount, question, deadline, limit_s) for mount, question in questions]


def ours() -> list[Mount]:
    """Every dafmount mount that this process can see, in the order of mounting."""
    return [mount for mount in mounts() if mount.file_system == FILE_SYSTEM]


def status_of(path: str) -> Status:
    """The status of the mount that holds `path`; raises MountFailed with the reason in one line."""
    absolute = os.path.abspath(path)
    mount = holding(absolute) or holding(os.path.realpath(absolute))
    if mount is None:
        raise MountFailed(f"{absolute}: no dafmount is mounted here; dafmount --list shows all")
    (asked,) = ask_all([mount])
    if asked.status is None:
        raise MountFailed(f"{mount.mountpoint}: {asked.problem}")
    return asked.status


def holding(path: str) -> Mount | None:
    """The dafmount mount that an absolute path lies in, found without touching it."""
    best: Mount | None = None
    for mount in mounts():
        is_below = path == mount.mountpoint or path.startswith(mount.mountpoint.rstrip("/") + "/")
        if is_below and (best is None or len(mount.mountpoint) >= len(best.mountpoint)):
            best = mount
    return best if best is not None and best.file_system == FILE_SYSTEM else None


def _asked(mount: Mount, question: Question, deadline: float, limit_s: float) -> Asked:
    try:
        return Asked(mount, _parse(question.answer(deadline)), "")
    except TimeoutError:
        return Asked(mount, None, f"no answer within {limit_s:g} s")
    except OSError as error:
        return Asked(mount, None, _PROBLEMS.get(error.errno or 0, os.strerror(error.errno or 0)))
    except (ValueError, TypeError):
        return Asked(mount, None, "of another release, whose status cannot be read")


_PROBLEMS = {
    errno.ENOTCONN: "dead; mounting there again or dafmount --unmount takes it away",
    errno.ECONNABORTED: "dead; mounting there again or dafmount --unmount takes it away",
    errno.EACCES: "of another user, who alone may look (allow_other lets others in)",
    errno.ENODATA: "tells no status",
    errno.EOPNOTSUPP: "tells no status",
}


def _parse(value: bytes) -> Status:
    """Raises ValueError or TypeError for what another release says."""
    found = json.loads(value)
    return Status(**{field.name: found.get(field.name) for field in fields(Status)})


# ---------------------------------------------------------------------------------------------------------------------
# Showing


def table(asked: Iterable[Asked]) -> str:
    """One line for each mount under a line of headings; empty where there is none."""
    rows = [_row(one) for one in asked]
    if not rows:
        return ""
    rows.insert(0, ("MOUNTPOINT", "SOURCE", "UPTIME", "READS", "HITS", "MEMORY"))
    widths = [max(len(row[column]) for row in rows if len(row) > 3 or column < 2) for column in range(5)]
    return "".join("  ".join(_padded(row, widths)).rstrip() + "\n" for row in rows)


def _padded(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=False)]


def _row(asked: Asked) -> tuple[str, ...]:
    place, source, status = asked.mount.mountpoint, asked.mount.source, asked.status
    if status is None:
        return (_printable(place), _printable(source), asked.problem)
    rate = "-" if status.hit_rate is None else f"{status.hit_rate:.0%}"
    reads = str(status.requests.get("read", 0))
    return (_printable(place), _printable(source), duration(status.uptime_s), reads, rate, size(status.memory_bytes))


def text(status: Status) -> str:
    """All of a status, for people."""
    rate = "" if status.hit_rate is None else f" ({status.hit_rate:.1%} hits)"
    lines = [
        ("mounted at", _printable(status.mountpoint)),
        ("source", _printable(status.source)),
        ("daemon", f"process {status.pid}, dafmount {status.version}, {size(status.memory_bytes)} of memory"),
        ("up since", f"{status.started} ({duration(status.uptime_s)})"),
        ("requests", ", ".join(f"{kind} {count}" for kind, count in status.requests.items()) or "none"),
        ("bytes served", f"{status.bytes_served} ({size(status.bytes_served)})"),
        ("chunks decoded", str(status.chunks_decoded)),
        (
            "cache",
            f"{status.cache_hits} hits, {status.cache_misses} misses{rate}, {status.cache_evictions} evictions, "
            f"{size(status.cache_bytes)} of {size(status.cache_limit_bytes)} used",
        ),
        (
            "fetched",
            f"{status.bytes_fetched} bytes ({size(status.bytes_fetched)}) in {status.requests_fetched} requests, "
            f"{status.retries} retries",
        ),
        ("errors", ", ".join(f"{name} {count}" for name, count in status.errors.items()) or "none"),
    ]
    for kind, latency in status.latency_us.items():
        shown = ", ".join(f"{name} {microseconds(value)}" for name, value in latency.items())
        lines.append((f"time of {kind}", shown))
    width = max(len(name) for name, _ in lines) + 2
    return "".join(f"{name + ':':<{width}}{value}\n" for name, value in lines)


def as_json(asked: Iterable[Asked]) -> str:
    """A JSON list with an object for each mount; one that does not answer has only a few keys, and `problem`."""
    found = []
    for one in asked:
        if one.status is not None:
            found.append(asdict(one.status))
        else:
            found.append({"source": one.mount.source, "mountpoint": one.mount.mountpoint, "problem": one.problem})
    return json.dumps(found) + "\n"


def duration(seconds: float) -> str:
    """Such as `3 d 4 h`, the two largest units."""
    minutes, hours, days = int(seconds) // 60, int(seconds) // 3600, int(seconds) // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes % 60} min"
    return f"{minutes} min {int(seconds) % 60} s" if minutes else f"{int(seconds)} s"


def size(n_bytes: int) -> str:
    """Such as `12.3 MiB`."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def microseconds(value: float) -> str:
    """Such as `87 us`, `1.5 ms`, `2.1 s`."""
    if value < 1000:
        return f"{value:.3g} us"
    return f"{value / 1000:.3g} ms" if value < 1_000_000 else f"{value / 1_000_000:.3g} s"


def _printable(name: str) -> str:
    """Names hold any byte but a terminal should not get every one."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)
