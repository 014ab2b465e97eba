"""Figures and how they are taken: interleaved rounds, medians, what is to be reached, the table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Samples: TypeAlias = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Reach:
    """What a figure has to be: at least, or at most, so much."""

    kind: Literal["at least", "at most"]
    value: float

    def met(self, figure: float) -> bool:
        """Whether the figure is good enough."""
        return figure >= self.value if self.kind == "at least" else figure <= self.value

    def __str__(self) -> str:
        return f"{'>=' if self.kind == 'at least' else '<='} {self.value:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the table. `samples` are what was measured, by who or what was measured, each in seconds if not said
    otherwise."""

    line: str
    what: str
    figure: float | None
    """None where it was not measured; then `note` says why."""
    unit: str
    reach: Reach | None = None
    note: str = ""
    samples: Samples = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """None where nothing was measured or nothing is to be reached."""
        return None if self.figure is None or self.reach is None else self.reach.met(self.figure)

    def as_json(self) -> dict[str, object]:
        """For the report."""
        return asdict(self) | {"reach": str(self.reach) if self.reach else None, "met": self.met}


def interleave(runs: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """What each of `runs` gives in each round. They take turns, each round in the other direction, so that whatever
    else the machine does hits all of them."""
    samples: Samples = {name: [] for name in runs}
    for turn in range(rounds):
        order = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        for name in order:
            samples[name].append(runs[name]())
    return samples


def ratio(samples: Samples, above: str, below: str) -> float:
    """The median of the rounds' quotients."""
    return statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))


HEADING = f"{'line':<5} {'what':<100} {'figure':>12} {'reach':>8}  met"


def rows(figure: Figure) -> Iterator[str]:
    """Lines of text below the heading."""
    number = "not measured" if figure.figure is None else f"{figure.figure:.3g} {figure.unit}"
    reach = str(figure.reach or "")
    met = {None: "", True: "yes", False: "NO"}[figure.met]
    yield f"{figure.line:<5} {figure.what:<100} {number:>12} {reach:>8}  {met}".rstrip()
    if figure.note:
        yield f"{'':<5}   {figure.note}"
