"""How much this process has read from where its data lies.

Owns three numbers, one set for the process, as it serves one mount. Reading threads add to them without a lock: a lost
count is no harm, a lock on the way of every read is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Traffic:
    """Reads of files, or requests to a server."""

    n_requests: int = 0
    n_bytes: int = 0
    n_retries: int = 0
    """Requests that were made again after a failure."""

    def fetched(self, n_bytes: int) -> None:
        """One request brought so many bytes."""
        self.n_requests += 1
        self.n_bytes += n_bytes


TRAFFIC = Traffic()
"""Of this process since it started."""
