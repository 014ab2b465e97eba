"""What lies before a program that reads a file from start to end: decoded ahead, and given to the kernel.

A stretch is some blocks. Its bytes go to the kernel's page cache as soon as they are decoded, but for its head: for
that the kernel must ask, which tells how far the program has come. So one request moves a stretch, not 128 KiB of it.

Owns when that is done, and what waits for what. The kernel locks the pages that it has asked for until it gets them; a
thread that gives it these very pages waits for the lock. Hence a request that overlaps what is being given is answered
as soon as the bytes are decoded, and only one that does not, for the head, waits until all is given, so that the
program finds it there. Must not know FUSE. One object for each open file; `go_on` is for the requests' thread.
"""

from __future__ import annotations

from dafmount.tree.decoders import Decoders, Job, Store
from dafmount.tree.units import CachedUnits, FlatBlocks

STRETCH_BLOCKS = 8
"""Blocks in a stretch. A job for each single one spends as much on waking threads as it gains."""

AHEAD_AFTER_BLOCKS = 4
"""How many blocks somebody reads one after the other before those behind them are decoded ahead."""

HEAD_BYTES = 128 * 1024
"""What the kernel reads ahead by itself. Where it was told to read more it makes longer requests, for longer heads."""

MAX_HEAD_SHARE = 4
"""A head is at most such a part of a stretch; otherwise nothing is given to the kernel, which reads enough ahead."""

MAX_OVERLAPPED = 3
"""After so many stretches in a row of which the kernel asked for more than the head it is not given any more until
somebody reads on from elsewhere. Of the first one it does: once it has begun to read ahead it asks for the next
piece at the first page of what it gets."""

PATIENCE_S = 0.02
"""How long the requests' thread waits for a stretch that is being decoded, which takes some 10 ms: a hop to another
thread for each of the kernel's requests took a twentieth of the speed."""

LONG_PATIENCE_S = 0.5
"""How long another thread waits for it, and until the rest is with the kernel. Then the bytes are decoded once more."""

_PAGE_BYTES = 4096


class _Stretch(Job):
    """Some blocks of one file, and which of its bytes are given to the kernel."""

    def __init__(self, of: Stretches, blocks: range, head_bytes: int | None) -> None:
        """Without `head_bytes` nothing is given."""
        self.blocks = blocks
        self.is_overlapped = False
        """Whether the kernel asked for some of what it is given."""
        self._of = of
        self._start, stop = of.blocks.span(blocks.start)[0], of.blocks.span(blocks.stop - 1)[1]
        super().__init__([of.cached.key(block) for block in blocks], stop - self._start)
        self.stored = range(0)
        if head_bytes is not None:
            # The kernel asks for whole pages: one that this stretch shares with the next is not given to it.
            first = self._start // _PAGE_BYTES * _PAGE_BYTES + head_bytes
            self.stored = range(first, stop if stop == of.blocks.size else stop // _PAGE_BYTES * _PAGE_BYTES)

    def work(self) -> None:
        """Decode, and give to the kernel."""
        is_given = False
        try:
            is_given = self._work()
        finally:
            if not is_given:
                self.stored = range(0)

    def _work(self) -> bool:
        """Whether the kernel was given something."""
        blocks, cached, start = self._of.blocks, self._of.cached, self._start
        flat = blocks.read_flat_nowait(self.blocks.start, self.blocks.stop)
        for block in self.blocks:
            first, stop = blocks.span(block)
            cached.add(block, flat[first - start : stop - start])
        self.decoded.set()
        store, stored = self._of.store, self.stored
        if store is None or not stored:
            return False
        if not store(stored.start, flat[stored.start - start : stored.stop - start]):
            self._of.is_given = False
            return False
        for block in self.blocks[1:-1]:
            cached.discard(block)
        # The head is still to come, and of the last one perhaps a page. In memory of their own: that of all can go.
        kept = {self.blocks[0], self.blocks[-1]}
        for block in kept:
            first, stop = blocks.span(block)
            cached.swap(block, bytes(flat[first - start : stop - start]))
        self.n_bytes = len(kept) * blocks.block_bytes
        return True


class Stretches:
    """The stretches before the reader of one file."""

    def __init__(self, blocks: FlatBlocks, cached: CachedUnits, decoders: Decoders, store: Store | None) -> None:
        """Without `store` nothing is given to the kernel."""
        self.blocks = blocks
        self.cached = cached
        self.store = store
        self._decoders = decoders
        self._jobs: dict[int, _Stretch] = {}
        """Those that the reader has not passed, by number."""
        self._last_block = 0
        self._n_in_a_row = 0
        self._asked = 0
        """The first stretch that was not asked for yet."""
        self._longest = 0
        """Bytes of the longest request among those in a row."""
        self._n_overlapped = 0
        self.is_given = True

    def leads_to(self, offset: int) -> bool:
        """Whether who goes on reading what the kernel was given makes it ask for `offset` next. From any thread."""
        return any(job.stored and job.stored.stop == offset for job in list(self._jobs.values()))

    def go_on(self, blocks: range, offset: int, length: int) -> bool:
        """Somebody reads these blocks: begin what is worthwhile. Whether to answer now; otherwise `wait` first."""
        self._count(blocks)
        self._forget_passed(blocks.start // STRETCH_BLOCKS)
        stop = offset + length
        self._look_for_overlaps(offset, stop)
        self._longest = max(self._longest, length)
        self._begin(blocks, offset)
        for job in self._touched(blocks):
            if job.done.is_set():
                continue
            if job.stored and not _overlaps(job.stored, offset, stop):
                return False
            if not job.decoded.wait(PATIENCE_S):
                return False
        return True

    def wait(self, blocks: range, offset: int, length: int) -> None:
        """Return when what was begun for these blocks is done, or is not going to be soon. Any thread but `go_on`'s."""
        for job in self._touched(blocks):
            awaited = job.decoded if _overlaps(job.stored, offset, offset + length) else job.done
            if not awaited.wait(LONG_PATIENCE_S):
                self._takes_back(job)

    def answered(self, blocks: range, stop: int) -> None:
        """Bytes up to `stop` were handed out: what the kernel has does not have to be kept."""
        for block in blocks:
            job = self._jobs.get(block // STRETCH_BLOCKS)
            if job is None or not job.stored or not job.done.is_set() or stop < job.stored.start:
                continue
            if block != job.blocks[-1] or block != blocks[-1]:
                self.cached.discard(block)

    def close(self) -> None:
        """Do not begin anything more."""
        for job in list(self._jobs.values()):
            self._takes_back(job)

    def _count(self, blocks: range) -> None:
        """How many blocks have been read in a row."""
        if self._last_block <= blocks.start <= max(self._last_block + 1, self._asked * STRETCH_BLOCKS):
            self._n_in_a_row += blocks.stop - 1 - self._last_block if self._n_in_a_row else 1
        else:
            self._n_in_a_row = self._asked = self._longest = self._n_overlapped = 0
            self.is_given = True
            self._forget_passed(self.blocks.n_blocks)
        self._last_block = blocks.stop - 1

    def _look_for_overlaps(self, start: int, stop: int) -> None:
        for job in self._jobs.values():
            if not _overlaps(job.stored, start, stop):
                continue
            if job.done.is_set():  # it had these bytes: its memory is short, or somebody reads past it
                self.is_given = False
                job.stored = range(0)
            elif not job.is_overlapped:  # it reads ahead by several requests at a time
                job.is_overlapped = True
                self._n_overlapped += 1
                if self._n_overlapped == MAX_OVERLAPPED:
                    self.is_given = False

    def _begin(self, blocks: range, offset: int) -> None:
        if self._n_in_a_row < AHEAD_AFTER_BLOCKS:
            return
        stretch_bytes = STRETCH_BLOCKS * self.blocks.block_bytes
        here, in_stretch = divmod(blocks.stop - 1, STRETCH_BLOCKS)
        is_entered = in_stretch > 0 or offset > self.blocks.span(blocks.stop - 1)[0]
        self._asked = max(self._asked, here + is_entered)
        # No further ahead than has been read already.
        n_blocks = self.blocks.n_blocks
        stop = min(n_blocks, blocks.stop + self._n_in_a_row)
        head_bytes = max(HEAD_BYTES, -(-self._longest // _PAGE_BYTES) * _PAGE_BYTES)
        is_given = self.is_given and head_bytes * MAX_HEAD_SHARE <= stretch_bytes and self._can_store()
        while self._asked * STRETCH_BLOCKS < stop and self._decoders.has_room(stretch_bytes, self._asked == here):
            first = self._asked * STRETCH_BLOCKS
            job = _Stretch(self, range(first, min(first + STRETCH_BLOCKS, n_blocks)), head_bytes if is_given else None)
            if not self._decoders.start(job):
                break
            self._jobs[self._asked] = job
            self._asked += 1

    def _can_store(self) -> bool:
        return self.store is not None and self._decoders.can_give

    def _touched(self, blocks: range) -> list[_Stretch]:
        numbers = range(blocks.start // STRETCH_BLOCKS, (blocks.stop - 1) // STRETCH_BLOCKS + 1)
        jobs = [self._jobs.get(number) for number in numbers]
        return [job for job in jobs if job is not None]

    def _takes_back(self, job: _Stretch) -> bool:
        """Whether the job has not begun, and will not any more: who needs its blocks now is as fast."""
        if not job.take():
            return False
        job.stored = range(0)
        job.decoded.set()
        job.done.set()
        return True

    def _forget_passed(self, number: int) -> None:
        for passed in [other for other in self._jobs if other < number]:
            job = self._jobs.pop(passed)
            if job.stored and not job.is_overlapped:
                self._n_overlapped = 0
            if not self._takes_back(job):
                for block in job.blocks:
                    self.cached.discard(block)


def _overlaps(given: range, start: int, stop: int) -> bool:
    return len(given) > 0 and given.start < stop and start < given.stop
