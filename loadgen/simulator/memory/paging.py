"""The pages of all containers, as streams: what is in memory, what is in swap, and where in swap.

A container's pages are of three kinds: in memory without a copy in swap, in memory with one (read
back and not changed since), in swap only. Each second it grows, touches pages evenly, reads those
that it misses and gives up as many, drawn evenly from what it has. As in Linux a page that is
changed loses its slot, one that is only read keeps it until swap is half full, and slots are
handed out in a circle: so a device's spans are touched one after another, and go on being in use
when most of what was written there is old. Numbers are pages, and need not be whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from slackwater.loadgen.simulator.memory.containers import Container, Floats, wanted_bytes

PAGE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Second:
    """The paging of one second, per machine and span of its device: pages read and written."""

    read: Floats
    written: Floats


class Swap:
    """The swap areas of all machines: `used` and `remote` are (machines, spans) in pages; `remote`
    are those whose newest bytes are in a lender's memory, `mapped` the spans that have a slab."""

    def __init__(self, machines: int, spans: int, span_pages: int) -> None:
        self.used: Floats = np.zeros((machines, spans))
        self.remote: Floats = np.zeros((machines, spans))
        self.mapped: NDArray[np.bool_] = np.zeros((machines, spans), np.bool_)
        self.span_pages = float(span_pages)
        self._span = [0] * machines
        self._left = [float(span_pages)] * machines
        """Free slots that the allocator still meets in its span."""

    @property
    def pages(self) -> float:
        """Pages of one machine's device."""
        return len(self.used[0]) * self.span_pages

    def free(self, pages: Floats) -> None:
        """Free that many slots of each machine, from any device."""
        total = self.used.sum(axis=1)
        share = np.divide(pages, total, out=np.zeros_like(total), where=total > 0)
        keep = 1.0 - np.minimum(share, 1.0)
        self.used *= keep[:, None]
        self.remote *= keep[:, None]

    def write(self, pages: Floats) -> Floats:
        """Hand out slots and write them; (machines, spans). Less than asked for where swap is
        full."""
        written = np.zeros_like(self.used)
        for machine in np.flatnonzero(pages > 0).tolist():
            self._write(machine, float(pages[machine]), written[machine])
        self.used += written
        self.remote += np.where(self.mapped, written, 0.0)
        return written

    def _write(self, machine: int, pages: float, written: Floats) -> None:
        spans = self.used.shape[1]
        empty = 0
        while pages > 0 and empty <= spans:
            span = self._span[machine]
            taken = min(pages, self._left[machine])
            written[span] += taken
            pages -= taken
            self._left[machine] -= taken
            empty = 0 if taken > 0 else empty + 1
            if self._left[machine] <= 0:
                span = self._span[machine] = (span + 1) % spans
                held = float(self.used[machine, span] + written[span])
                self._left[machine] = max(0.0, self.span_pages - held)

    def map(self, machine: int, span: int) -> None:
        """Map a slab to the span: pages written from now on go there."""
        self.mapped[machine, span] = True

    def unmap(self, machine: int, span: int) -> None:
        self.mapped[machine, span] = False
        self.remote[machine, span] = 0.0


class Paging:
    """All containers, each touching `touches` pages a second; `step` moves them on by a second."""

    def __init__(
        self,
        containers: Sequence[Container],
        machines: int,
        swap: Swap,
        end_s: float,
        touches: float,
    ) -> None:
        self._containers = containers
        self._end_s = end_s
        self._machine = np.array([c.machine for c in containers])
        self._limit: Floats = np.array([c.limit_bytes / PAGE_BYTES for c in containers])
        self._touches = touches
        self._writes: Floats = np.array([c.application.writes for c in containers])
        self._machines = machines
        self.swap = swap
        none = np.zeros(len(containers))
        self.dirty, self.clean, self.swapped = none, none.copy(), none.copy()
        """In memory without a copy, in memory with one, in swap only."""

    def resident_bytes(self) -> Floats:
        """Return the resident bytes of each machine's containers."""
        return self._sum(self.dirty + self.clean) * PAGE_BYTES

    def over_limit_pages(self) -> float:
        """For which swap had no room: a real cluster would have killed somebody."""
        return float(np.maximum(self.dirty + self.clean - self._limit, 0.0).sum())

    def step(self, at_s: float) -> Second:
        """The second that ends at `at_s`."""
        total = self.dirty + self.clean + self.swapped
        wanted = wanted_bytes(self._containers, at_s, self._end_s) / PAGE_BYTES
        self.dirty = self.dirty + np.maximum(wanted - total, 0.0)
        read = self._touch(np.maximum(wanted, total))
        written = self._shrink()
        return Second(read, written)

    def _touch(self, total: Floats) -> Floats:
        """Pages read from swap, (machines, spans)."""
        touches = np.full_like(total, self._touches)
        share = np.divide(touches, total, out=np.zeros_like(total), where=total > 0)
        share = np.minimum(share, 1.0)
        missed = self.swapped * share
        changed = self.clean * share * self._writes
        full = (self.swap.used.sum(axis=1) > self.swap.pages / 2)[self._machine]
        kept = np.where(full, 0.0, missed * (1.0 - self._writes))
        by_machine = self._sum(missed)
        read = self._spread(by_machine)
        self.swapped = self.swapped - missed
        self.clean = self.clean - changed + kept
        self.dirty = self.dirty + changed + missed - kept
        self.swap.free(self._sum(changed + missed - kept))
        return read

    def _shrink(self) -> Floats:
        """Back to the limits: pages with a copy are dropped, the others written."""
        held = self.dirty + self.clean
        over = np.maximum(held - self._limit, 0.0)
        share = np.divide(over, held, out=np.zeros_like(held), where=held > 0)
        dropped, out = self.clean * share, self.dirty * share
        asked = self._sum(out)
        written = self.swap.write(asked)
        done = written.sum(axis=1)
        room = np.divide(done, asked, out=np.ones_like(asked), where=asked > 0)
        out = out * np.minimum(room, 1.0)[self._machine]
        self.clean = self.clean - dropped
        self.dirty = self.dirty - out
        self.swapped = self.swapped + dropped + out
        return written

    def _spread(self, pages: Floats) -> Floats:
        """Over each device's spans, as their slots are in use."""
        used = self.swap.used
        total = used.sum(axis=1, keepdims=True)
        weight = np.divide(used, total, out=np.zeros_like(used), where=total > 0)
        return np.asarray(weight * pages[:, None])

    def _sum(self, per_container: Floats) -> Floats:
        found = np.bincount(self._machine, weights=per_container, minlength=self._machines)
        return found.astype(np.float64)
