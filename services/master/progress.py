"""How far a job is and how fast: learned from its Agents' reports, and never stored.

An Agent reports about once a second. A report costs the master one addition, so that thousands of
jobs may report. Only the master that leads hears them; the next one knows as much after a second.
Where the job is and what it loses comes with its controller's reports.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import exp
from statistics import median
from typing import Final

from slackwater.schemas.base import COUNT_MAX, AggregatorId
from slackwater.schemas.cluster import PlacedJob
from slackwater.schemas.job_states import HOLDING_STATES, TERMINAL_STATES, JobState
from slackwater.schemas.jobs import JobSpec
from slackwater.schemas.progress import JobProgress, ProgramProgress, RankProgress
from slackwater.schemas.telemetry import IterationsObserved

SMOOTHED_S: Final = 10.0
"""Seconds over which a speed is measured, about."""
RECENT: Final = 16
"""Iterations of each rank that are remembered one by one."""
TOLD_MIN: Final = 4
"""The fewest of them by which an iteration's length is known."""
PATIENCE_S: Final = 2.0
"""Seconds of silence after which a rank's speed falls, or two of its iterations if they take
longer."""


@dataclass(slots=True)
class _Rank:
    iteration: int = 0
    """The last iteration that ended."""
    heard_s: float = 0.0
    count: float = 0.0
    """Recent iterations; older ones count less."""
    span_s: float = 0.0
    """Seconds that these took."""
    moved_s: float = 0.0
    """When it last reported that iterations ended."""
    last: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds that its last iterations took."""

    def reported(self, message: IterationsObserved, now_s: float) -> None:
        ended = len(message.durations_s)
        self.iteration = min(COUNT_MAX, max(0, message.first_iteration + ended - 1))
        self.heard_s = now_s
        if ended:
            self.moved_s = now_s
            self.last.extend(message.durations_s[-RECENT:])
        took_s = sum(message.durations_s)
        kept = exp(-took_s / SMOOTHED_S)
        self.count = self.count * kept + ended
        self.span_s = self.span_s * kept + took_s

    def speed(self, now_s: float) -> float:
        """Return iterations a second; the figure falls while an iteration is overdue."""
        if not self.count or self.span_s <= 0.0:
            return 0.0
        overdue_s = now_s - self.heard_s - max(PATIENCE_S, 2 * self.span_s / self.count)
        if overdue_s <= 0.0:
            return self.count / self.span_s
        kept = exp(-overdue_s / SMOOTHED_S)
        return self.count * kept / (self.span_s * kept + overdue_s)


@dataclass(slots=True)
class Progress:
    """Follows one job."""

    ranks: dict[int, _Rank] = field(default_factory=dict)
    placed: PlacedJob | None = None
    aggregators: tuple[AggregatorId, ...] = ()
    program: ProgramProgress | None = None
    """How far an elastic program is, as its rank 0 told last."""

    def reported(self, message: IterationsObserved, now_s: float) -> None:
        rank = self.ranks.get(message.rank)
        if rank is None:
            rank = self.ranks[message.rank] = _Rank()
        rank.reported(message, now_s)

    @property
    def updates(self) -> int:
        """Count the iterations of all ranks together, those that left included."""
        return sum(rank.iteration for rank in self.ranks.values())

    def quiet(self, going: Sequence[int]) -> tuple[float, float] | None:
        """Return when the ranks `going` last ended an iteration, and how many seconds one takes:
        the median of the slowest rank's last ones. None: some have told too little."""
        ranks = [self.ranks.get(rank) for rank in going]
        known = [rank for rank in ranks if rank is not None and len(rank.last) >= TOLD_MIN]
        if not known or len(known) < len(ranks):
            return None
        return max(rank.moved_s for rank in known), max(median(rank.last) for rank in known)

    def behind(self, going: Sequence[int]) -> list[int]:
        """List the ranks that have ended fewer iterations than the others; empty: all as many."""
        ended = {rank: self.ranks[rank].iteration for rank in going if rank in self.ranks}
        least = min(ended.values(), default=0)
        found = [rank for rank, iteration in ended.items() if iteration == least]
        return found if len(found) < len(ended) else []

    def take_report(self, placed: PlacedJob, aggregators: tuple[AggregatorId, ...]) -> None:
        """Take the report of the job's controller, whose aggregators are `aggregators`."""
        self.placed = placed
        self.aggregators = tuple(aggregators[at] for at in placed.at if at < len(aggregators))

    def shown(
        self, spec: JobSpec, state: JobState, now_s: float, by_rank: bool, workers: int = 0
    ) -> JobProgress | None:
        """None: nothing is known. The job is as far and as fast as the slowest of its `workers` (0:
        as many as submitted); an asynchronous one whose number may change, as all the updates of
        its ranks together, in iterations of as many workers as submitted. One that does not run
        has no speed; one that ended is nowhere."""
        placed = self.placed
        if not self.ranks and placed is None and self.program is None:
            return None
        workers = workers or spec.workers
        counted = [r for rank, r in self.ranks.items() if rank < workers]
        whole = len(counted) == workers
        iteration = min((r.iteration for r in counted), default=0) if whole else 0
        speed = min((r.speed(now_s) for r in counted), default=0.0) if whole else 0.0
        if spec.consistency == "asynchronous" and spec.elastic:
            iteration = self.updates // spec.workers
            speed = sum(r.speed(now_s) for r in counted) / spec.workers
        total = own_iterations(spec)
        program = self.program
        if program is not None:
            iteration, total, speed = program.iteration, program.iterations, program.speed
        left = max(0, total - iteration)
        idle = state not in HOLDING_STATES
        if idle:
            speed = 0.0
        if state in TERMINAL_STATES:
            placed = None
        return JobProgress(
            iteration=iteration,
            iterations=total,
            speed=speed,
            eta_s=left / speed if total and speed > 0.0 else None,
            loss=placed.loss if placed is not None else None,
            phase=placed.phase if placed is not None else "",
            moves=self.placed.moves if self.placed is not None else 0,
            aggregators=self.aggregators if placed is not None else (),
            updated_s=max((r.heard_s for r in self.ranks.values()), default=0.0),
            program=program,
            ranks=tuple(self._by_rank(now_s, idle)) if by_rank else (),
        )

    def _by_rank(self, now_s: float, idle: bool) -> Iterator[RankProgress]:
        for number in sorted(self.ranks):
            rank = self.ranks[number]
            yield RankProgress(
                rank=number,
                iteration=rank.iteration,
                speed=0.0 if idle else rank.speed(now_s),
                heard_s=rank.heard_s,
            )


def own_iterations(spec: JobSpec) -> int:
    """Return how many iterations the job does in all; 0: unknown. A program that counts for itself
    is submitted without a number, which reads as 1."""
    return spec.iterations if spec.iterations > 1 else 0
