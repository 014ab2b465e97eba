"""What every line of the table uses."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.data import Data
from benchmarks.peers import Peers


@dataclass(frozen=True, slots=True)
class Bench:
    """What all lines use."""

    data: Data
    peers: Peers

    @property
    def rounds(self) -> int:
        """How often each thing is measured."""
        return self.data.scale.rounds
