"""The kernel's page cache: giving it bytes of a file before it asks.

Owns that nothing is given under a number that means another file by then, and that nothing is under way when the
session is taken down, which libfuse would not survive. Threads share it.

A store waits in the kernel for pages that it has asked this process for and not got yet: who stores must not be who
answers.
"""

from __future__ import annotations

import errno
import logging
import threading
from typing import cast

import pyfuse3
from pyfuse3 import InodeT

from dafmount.mount import mountpoint as mountpoints
from dafmount.mount.guardian import Guardian
from dafmount.mount.statistics import Statistics
from dafmount.tree.nodes import File, NodeTable

log = logging.getLogger(__name__)

END_LIMIT_S = 5.0
"""How long `close` waits for what is under way."""


class PageCache:
    """What a session's kernel is given."""

    def __init__(self, nodes: NodeTable, statistics: Statistics, mountpoint: str) -> None:
        self._nodes = nodes
        self._statistics = statistics
        self._mountpoint = mountpoint
        self._changed = threading.Condition()
        self._n_storing = 0
        self._is_open = True
        self._guardian: Guardian | None = None
        self._has_tried = False

    def is_ready(self) -> bool:
        """Whether bytes can be given; asked by the main thread, which has a guardian started at the first time."""
        if not self._has_tried:
            self._has_tried = True
            mount = mountpoints.mount_at(self._mountpoint)
            if mount is not None:
                self._guardian = Guardian.started(mount.device.partition(":")[2])
        return self._guardian is not None and self._guardian.is_on_guard()

    def store(self, file: File, offset: int, data: memoryview) -> bool:
        """Whether the kernel has taken `data` as the bytes of `file` at `offset`, which lie within its size."""
        with self._changed:
            if not self._is_open:
                return False
            self._n_storing += 1
        n_stored = 0
        try:
            with self._nodes.held(file) as is_true:
                if is_true:
                    pyfuse3.notify_store(InodeT(file.number), offset, cast(bytes, data))  # any buffer does
                    n_stored = len(data)
            return is_true
        except OSError as error:
            if error.errno != errno.ENOENT:  # the kernel has forgotten the file
                log.debug("the kernel takes no bytes before it asks: %s", error)
            return False
        finally:
            with self._changed:
                self._statistics.bytes_served += n_stored
                self._n_storing -= 1
                self._changed.notify_all()

    def stop(self) -> None:
        """Begin nothing any more."""
        with self._changed:
            self._is_open = False

    def close(self) -> None:
        """Begin nothing any more, and return when nothing is under way.

        Ends the connection where that takes long: what is waited for was asked for and will not be answered.
        """
        self.stop()
        if not self._is_idle(END_LIMIT_S) and self._guardian is not None:
            log.warning("%s: ending the connection, for the kernel waits for answers", self._mountpoint)
            self._guardian.abort()
            self._is_idle(END_LIMIT_S)

    def dismiss(self) -> None:
        """After `close`: no guardian is needed any more."""
        if self._guardian is not None:
            self._guardian.close()
            self._guardian = None

    def _is_idle(self, within_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._n_storing, within_s)
