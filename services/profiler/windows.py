"""The iterations of one job under one placement: its profile and its monitor windows.

Section 3.3.1: a job is characterised by its iteration duration D_j and its tasks' CPU times e_t. A
placement is told by the sum of its buckets' location epochs, which grows with every migration, so
that what was measured under an older one is thrown away and the new one is profiled by itself
(4.3.3.1: re-profiling after every reassignment). Synchronous ranks differ only by noise; the
slowest rank's median is the job's.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

KEPT_MAX = 4096


@dataclass(slots=True)
class _Rank:
    next_iteration: int = 0
    skipped: int = 0
    profile_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    window_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    last_iteration: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    last_iteration: int
    iterations: int
    iteration_s: float


class Iterations:
    """Of one job. Under each new placement neither the first report of a rank counts nor the next
    `warm_up` iterations."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._ranks: dict[int, _Rank] = {}
        self.location_epoch = -1
        self.workers = 0

    def add(
        self,
        rank: int,
        first_iteration: int,
        durations_s: Sequence[float],
        location_epoch: int,
        workers: int,
    ) -> None:
        """One report. Repeated iterations count once, those of an older placement never."""
        if location_epoch < self.location_epoch:
            return
        if location_epoch > self.location_epoch:
            self.location_epoch = location_epoch
            self._ranks.clear()
        self.workers = max(self.workers, workers)
        entry = self._ranks.get(rank)
        if entry is None:
            entry = self._ranks[rank] = _Rank()
            if first_iteration > 1:  # Its older part may have run under the placement before.
                entry.next_iteration = first_iteration + len(durations_s)
        for iteration, duration_s in enumerate(durations_s, first_iteration):
            if iteration < entry.next_iteration:
                continue
            entry.next_iteration = iteration + 1
            entry.last_iteration = iteration
            if entry.skipped < self._warm_up:
                entry.skipped += 1
                continue
            entry.profile_s.append(duration_s)
            entry.window_s.append(duration_s)

    def profiled(self) -> tuple[int, float]:
        """(iterations that every rank has, D_j over all of them)."""
        if not self._complete():
            return 0, 0.0
        count = min(len(entry.profile_s) for entry in self._ranks.values())
        if count == 0:
            return 0, 0.0
        return count, max(median(entry.profile_s) for entry in self._ranks.values())

    def window(self, iterations: int) -> Window | None:
        """The next full window, once; None while some rank has too few iterations."""
        if not self._complete():
            return None
        if any(len(entry.window_s) < iterations for entry in self._ranks.values()):
            return None
        slowest_s = 0.0
        for entry in self._ranks.values():
            slowest_s = max(slowest_s, median(entry.window_s.popleft() for _ in range(iterations)))
        last = min(entry.last_iteration - len(entry.window_s) for entry in self._ranks.values())
        return Window(last_iteration=max(0, last), iterations=iterations, iteration_s=slowest_s)

    def _complete(self) -> bool:
        """Every rank that the job is known to have was heard under this placement."""
        return bool(self._ranks) and len(self._ranks) >= self.workers
