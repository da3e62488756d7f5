"""The iterations of one job under one placement: its profile and its monitor windows.

Section 3.3.1: a job is characterised by its iteration duration D_j and its tasks' CPU times e_t. A
placement is told by the sum of its buckets' location epochs, which grows with every migration, so
that what was measured under an older one is thrown away and the new one is profiled by itself
(4.3.3.1: re-profiling after every reassignment). Synchronous ranks differ only by noise; the
slowest rank's mean is the job's.

A profile is a yardstick, and noise only lengthens iterations: D_j is the mean of the quietest part.
A window is a measurement, of throughput: its mean.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from slackwater.common.domains.models.iterations import mean_s, quieter_half_s, quietest_s
from slackwater.schemas.telemetry import LinkTimes
from slackwater.services.profiler.links import LinkSums

KEPT_MAX = 4096
SLOW_ITERATIONS_MIN = 10
"""No window has fewer, unless it is configured so: a mean wants some."""


@dataclass(slots=True)
class _Rank:
    next_iteration: int = 0
    skipped: int = 0
    profile_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    window_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_MAX))
    last_iteration: int = 0
    gaps_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Window:
    last_iteration: int
    iterations: int
    iteration_s: float
    quieter_half_s: float
    spanned_s: float
    """From the begin of its first iteration to the end of the last one that was reported."""


class Iterations:
    """The iterations of one job. Under each new placement neither the first report of a rank counts
    nor the next `warm_up` iterations."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._ranks: dict[int, _Rank] = {}
        self.location_epoch = -1
        self.workers = 0
        self.links = LinkSums()

    def add(
        self,
        rank: int,
        first_iteration: int,
        durations_s: Sequence[float],
        location_epoch: int,
        workers: int,
        links: Sequence[LinkTimes] = (),
        gaps_s: Sequence[float] = (),
    ) -> None:
        """One report. Repeated iterations count once, those of an older placement never."""
        if location_epoch < self.location_epoch:
            return
        if location_epoch > self.location_epoch:
            self.location_epoch = location_epoch
            self._ranks.clear()
            self.links = LinkSums()
        self.workers = max(self.workers, workers)
        entry = self._ranks.get(rank)
        if entry is not None or first_iteration == 1:
            self.links.add(links, len(durations_s))  # Else a part of it may be from before.
        if entry is None:
            entry = self._ranks[rank] = _Rank()
            if first_iteration > 1:  # Its older part may have run under the placement before.
                entry.next_iteration = first_iteration + len(durations_s)
        if entry.skipped >= self._warm_up and gaps_s:
            known = entry.gaps_s if len(entry.gaps_s) == len(gaps_s) else gaps_s
            entry.gaps_s = [min(pair) for pair in zip(known, gaps_s, strict=True)]
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

    @property
    def profiled(self) -> int:
        """Iterations that every rank has."""
        if not self._complete():
            return 0
        return min(len(entry.profile_s) for entry in self._ranks.values())

    @property
    def profiled_s(self) -> float:
        """Seconds of training of the rank that has most."""
        return max((sum(entry.profile_s) for entry in self._ranks.values()), default=0.0)

    def iteration_s(self) -> float:
        """D_j, of the slowest rank; 0: some rank has no iteration yet."""
        if not self.profiled:
            return 0.0
        return max(quietest_s(entry.profile_s) for entry in self._ranks.values())

    def agrees(self, within: float) -> bool:
        """Say whether D_j of the first half and of the second differ by no more than that part."""
        if self.profiled < 2:
            return False
        halves_s = [0.0, 0.0]
        for entry in self._ranks.values():
            measured_s = list(entry.profile_s)
            middle = len(measured_s) // 2
            for half, part_s in enumerate((measured_s[:middle], measured_s[middle:])):
                halves_s[half] = max(halves_s[half], quietest_s(part_s))
        return max(halves_s) <= min(halves_s) * (1.0 + within)

    def positions(self) -> tuple[float, ...]:
        """Per bucket, which part of D_j passes at least between its push and its next pull, by
        the rank that has least; empty: not every rank said it under this placement."""
        gaps_s = [entry.gaps_s for entry in self._ranks.values()]
        iteration_s = self.iteration_s()
        if iteration_s <= 0.0 or not gaps_s or not all(gaps_s):
            return ()
        if len({len(each) for each in gaps_s}) > 1:
            return ()
        return tuple(min(1.0, min(each) / iteration_s) for each in zip(*gaps_s, strict=True))

    def window(self, iterations: int, within_s: float = inf) -> Window | None:
        """The next full window, once; None while some rank has too few iterations. A slow job's is
        full with fewer, once they took `within_s`."""
        if not self._complete():
            return None
        ready = min(len(entry.window_s) for entry in self._ranks.values())
        if ready < iterations:
            slow = all(sum(entry.window_s) >= within_s for entry in self._ranks.values())
            if not slow or ready < min(iterations, SLOW_ITERATIONS_MIN):
                return None
            iterations = ready
        slowest_s = quieter_s = spanned_s = 0.0
        for entry in self._ranks.values():
            spanned_s = max(spanned_s, sum(entry.window_s))
            window_s = [entry.window_s.popleft() for _ in range(iterations)]
            slowest_s = max(slowest_s, mean_s(window_s))
            quieter_s = max(quieter_s, quieter_half_s(window_s))
        last = min(entry.last_iteration - len(entry.window_s) for entry in self._ranks.values())
        return Window(max(0, last), iterations, slowest_s, quieter_s, spanned_s)

    def _complete(self) -> bool:
        """Say whether every known rank of the job was heard under this placement."""
        return bool(self._ranks) and len(self._ranks) >= self.workers
