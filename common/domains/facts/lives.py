"""Fold kept facts into the lives of jobs, and into levels of the pools over time. Pure.

A dashboard and a report draw them: when each job waited, ran and stood still, on which nodes, how
fast against its speed alone, and when its aggregators changed. They are bounded, so that they may
be told the facts of weeks: no more jobs than `JOBS_MAX`, the newest stretches and moves of each.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from slackwater.common.domains.facts.sentences import named
from slackwater.common.domains.facts.timeline import ENDS, LIFE
from slackwater.schemas.base import Message
from slackwater.schemas.cluster import AllocationEvent
from slackwater.schemas.gpus import NodeAllocation, held
from slackwater.schemas.job_events import JobEvent
from slackwater.schemas.job_states import HOLDING_STATES, JobState
from slackwater.schemas.memory import SlabEvent
from slackwater.schemas.placement import MigrationEvent
from slackwater.schemas.telemetry import JobProfiled, WindowMeasured

JOBS_MAX: Final = 5_000
STRETCHES_MAX: Final = 256
POINTS_MAX: Final = 512
MOVES_MAX: Final = 128
LEVELS_MAX: Final = 4_096
_LENT: Final = {"lent": 1, "returned": -1, "evicted": -1, "revoked": -1, "lost": -1}
_SHOWN: Final = frozenset(
    {
        "reverted", "expanded", "protected", "hung", "rank-restarted", "rolled-back",
        "checkpointed", "optimizer-state-lost", "corrected",
    }
)  # fmt: skip
"""Facts about a job that a picture of its life marks."""


@dataclass(slots=True)
class Stretch:
    """A time in one state, holding the same. `to_s`: None while it lasts."""

    state: JobState
    from_s: float
    to_s: float | None = None
    allocation: NodeAllocation = ()
    reason: str = ""

    @property
    def held(self) -> int:
        """Return the GPUs, or slots, that the job held."""
        return held(self.allocation) if self.state in HOLDING_STATES else 0

    def lasted_s(self, now_s: float) -> float:
        return max(0.0, (now_s if self.to_s is None else self.to_s) - self.from_s)


@dataclass(slots=True)
class Move:
    """A move of buckets between aggregators. `ended_s`: None while it lasts."""

    id: str
    from_s: float
    sources: tuple[str, ...]
    targets: tuple[str, ...]
    cause: str
    ended_s: float | None = None
    done: bool = False


@dataclass(slots=True)
class Points:
    """Points (second, value); of too many, every second one of the older half goes."""

    most: int
    points: list[tuple[float, float]] = field(default_factory=list)

    def add(self, at_s: float, value: float) -> None:
        self.points.append((at_s, value))
        if len(self.points) > self.most:
            half = len(self.points) // 2
            self.points[:half] = self.points[:half:2]


@dataclass(slots=True)
class Life:
    """A job as facts tell it, through all its runs.

    `gpus` is the number that it asked for (0: it uses slots of nodes; None: no fact said);
    `servers` the number of parameter servers of its own that it would have.
    """

    job: str
    submitted_s: float
    tenant: str = ""
    gpus: int | None = None
    servers: int | None = None
    stretches: list[Stretch] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """(second, fact) of what befell it."""
    alone_s: float | None = None
    """Seconds of an iteration alone, as profiled; None: not yet."""
    windows: Points = field(default_factory=lambda: Points(POINTS_MAX))
    """(second, seconds of an iteration) by monitor window."""
    aggregators: tuple[str, ...] = ()
    placed_s: float | None = None
    """Since when aggregators serve it; None: they do not."""
    served: list[tuple[float, float]] = field(default_factory=list)
    """(from, to) in which aggregators served it before."""
    ended_s: float | None = None
    deleted: bool = False

    @property
    def state(self) -> JobState:
        return self.stretches[-1].state if self.stretches else "pending"

    def spent_s(self, states: Iterable[JobState], now_s: float) -> float:
        """Sum up the seconds in any of these states."""
        wanted = frozenset(states)
        return sum(each.lasted_s(now_s) for each in self.stretches if each.state in wanted)

    def held_s(self, now_s: float) -> float:
        """Return GPUs, or slots, times seconds."""
        return sum(each.held * each.lasted_s(now_s) for each in self.stretches)

    def speeds(self) -> list[tuple[float, float]]:
        """Return (second, speed over the speed alone) by monitor window; none before it is
        profiled."""
        alone_s = self.alone_s
        if not alone_s:
            return []
        return [(at_s, alone_s / each_s) for at_s, each_s in self.windows.points if each_s > 0]

    def turn(self, state: JobState, at_s: float, allocation: NodeAllocation, reason: str) -> None:
        """Begin another stretch, unless nothing changes."""
        last = self.stretches[-1] if self.stretches else None
        allocation = allocation if state in HOLDING_STATES else ()
        if last is not None and last.to_s is None:
            if (last.state, last.allocation) == (state, allocation):
                last.reason = reason or last.reason
                return
            last.to_s = max(at_s, last.from_s)
        self.stretches.append(Stretch(state, at_s, None, allocation, reason))
        del self.stretches[:-STRETCHES_MAX]

    def end(self, state: JobState, at_s: float, reason: str) -> None:
        self.turn(state, at_s, (), reason)
        self.stretches[-1].to_s = at_s
        self.ended_s = at_s
        self.leave_aggregators(at_s)

    def leave_aggregators(self, at_s: float) -> None:
        if self.placed_s is not None:
            self.served.append((self.placed_s, at_s))
            del self.served[:-STRETCHES_MAX]
            self.placed_s = None


class Lives:
    """Jobs by id, and levels of the pools over time.

    `used` are points (second, aggregators in use); `lent` the same of slabs by lender.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Life] = {}
        self.used = Points(LEVELS_MAX)
        self.lent: dict[str, Points] = {}
        self._slabs: dict[str, str] = {}
        """Slab -> its lender, while it is lent."""

    def tell(self, fact: Message, at_s: float) -> str | None:
        """Take a fact in. Return the job that it changed; None: no job."""
        match fact:
            case JobEvent():
                return self._job(fact, at_s)
            case AllocationEvent():
                self.used.add(at_s, fact.in_use)
            case MigrationEvent():
                return self._migration(fact, at_s)
            case JobProfiled() if (life := self.jobs.get(fact.job)) is not None:
                if life.alone_s is None or fact.profile.iteration_s < life.alone_s:
                    life.alone_s = fact.profile.iteration_s
                return fact.job
            case WindowMeasured() if (life := self.jobs.get(fact.job)) is not None:
                life.windows.add(at_s, fact.iteration_s)
                return fact.job
            case SlabEvent():
                self._slab(fact, at_s)
            case _:
                pass  # It changes no picture.
        return None

    def _job(self, event: JobEvent, at_s: float) -> str:
        life = self.jobs.get(event.job)
        if life is None or (life.deleted and event.fact == "pending"):
            life = self._begun(event, at_s)
        fact, detail = event.fact, event.detail
        if fact == "pending" and "servers" in detail:
            life.servers, life.gpus = _count(detail, "servers"), _count(detail, "gpus")
            life.tenant = detail.get("tenant", "")
        if fact == "deleted":
            life.deleted = True
        elif fact in ENDS:
            if life.ended_s is None:
                life.end(ENDS[fact], at_s, event.reason)
        elif fact in LIFE and (life.ended_s is None or fact == "pending"):
            life.ended_s = None
            life.turn(LIFE[fact], at_s, event.allocation, event.reason)
        elif fact == "waiting" and life.stretches and life.ended_s is None:
            life.stretches[-1].reason = event.reason
        if names := named(detail, "aggregators"):
            life.aggregators = names
            if life.placed_s is None and life.ended_s is None and fact in ("located", "assigned"):
                life.placed_s = at_s
        if fact in _SHOWN:
            life.marks.append((at_s, fact))
            del life.marks[:-MOVES_MAX]
        return event.job

    def _begun(self, event: JobEvent, at_s: float) -> Life:
        life = self.jobs[event.job] = Life(event.job, at_s)
        if len(self.jobs) > JOBS_MAX:
            ended = (id for id, each in self.jobs.items() if each.ended_s is not None)
            del self.jobs[next(ended, next(iter(self.jobs)))]
        return life

    def _migration(self, event: MigrationEvent, at_s: float) -> str | None:
        life = self.jobs.get(event.job)
        if life is None:
            return None
        if event.fact == "started":
            sides = (tuple(sorted(set(each))) for each in (event.sources, event.targets))
            sources, targets = sides
            life.moves.append(Move(event.migration, at_s, sources, targets, event.cause))
            del life.moves[:-MOVES_MAX]
        for move in life.moves:
            if move.id == event.migration and event.fact != "started":
                move.ended_s, move.done = at_s, event.fact == "finished"
        return event.job

    def _slab(self, event: SlabEvent, at_s: float) -> None:
        change = _LENT.get(event.fact, 0)
        known = event.slab in self._slabs
        if change == 0 or known == (change > 0):
            return  # Said twice, or lent before the first fact that is kept.
        if change > 0:
            self._slabs[event.slab] = event.lender
        else:
            del self._slabs[event.slab]
        points = self.lent.setdefault(event.lender, Points(LEVELS_MAX))
        now = points.points[-1][1] if points.points else 0.0
        points.add(at_s, now + change)


def _count(detail: Mapping[str, str], name: str) -> int:
    text = detail.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0
