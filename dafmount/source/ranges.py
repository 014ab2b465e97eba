"""Which byte ranges to fetch together: a pure planner.

Knows nothing of where the bytes lie; the knobs are the caller's. Any thread may call it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dafmount.source.base import Range


class Fetch(NamedTuple):
    """One range to read, and which of the wanted ranges lie inside it (their positions in the list given)."""

    range: Range
    members: tuple[int, ...]


def join(ranges: Sequence[Range], *, gap_bytes: int, max_bytes: int) -> list[Fetch]:
    """Fetches that cover `ranges`, near ones joined, ordered by where they start.

    Each position in `ranges` is a member of exactly one fetch, whose range holds it whole. Two ranges are joined only
    when at most `gap_bytes` lie between them and the result is at most `max_bytes` long; a single wanted range longer
    than that stays whole.
    """
    fetches: list[Fetch] = []
    members: list[int] = []
    start = stop = 0
    for position in sorted(range(len(ranges)), key=ranges.__getitem__):
        wanted = ranges[position]
        joined_stop = max(stop, wanted.stop)
        fits = joined_stop == stop or joined_stop - start <= max_bytes
        if members and wanted.start - stop <= gap_bytes and fits:
            members.append(position)
            stop = joined_stop
            continue
        if members:
            fetches.append(Fetch(Range(start, stop), tuple(members)))
        members, (start, stop) = [position], wanted
    if members:
        fetches.append(Fetch(Range(start, stop), tuple(members)))
    return fetches


def cut(fetch: Fetch, data: bytes | memoryview, ranges: Sequence[Range]) -> dict[int, memoryview]:
    """The members of a fetch, by their position, out of the bytes read for it; views, not copies."""
    view = memoryview(data)
    origin = fetch.range.start
    return {
        position: view[ranges[position].start - origin : ranges[position].stop - origin] for position in fetch.members
    }
