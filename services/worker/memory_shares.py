"""Shares of a node's memory among jobs that take turns there (Lee 2020, section 4.3.3).

An elastic program whose data do not fit into the memory that it asked for keeps a part of them in
files, and reads that while it computes on the rest. One that computes for long on each byte never
waits for its files; one that does not stands still until they are read. So the jobs of a node share
what they asked for together: some memory goes from a job that waits little for its data to the one
that waits most. If all of them together wait less then, it stays there; else it goes back, and the
next move is smaller (hill climbing).

No job has less than half of what it asked for. Nobody is given memory that another one has not let
go of yet, so that all together never have more than they asked for.

Pure: time comes with each call.
"""

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from slackwater.schemas.relay import MemoryAsk

LEAST_PART: Final = 0.5
"""A job keeps at least so much of what it asked for."""
PERIOD_S: Final = 10.0
"""Seconds over which is measured how long jobs wait for their data."""
MOVING_PERIODS: Final = 6
"""Periods within which a job must have let go of what it is to give."""
FIRST_PART: Final = 1 / 8
"""The part of all memory that moves at first."""
LAST_PART: Final = 1 / 64
"""The smallest part that is tried."""
STALLED_MIN: Final = 0.02
"""A job that waits for its data for less, a second in which it does not, is content."""
GAIN_MIN: Final = 0.02
"""A move stays if all together wait for so much less, a second in which they do not,"""
GAIN_PART: Final = 0.05
"""and by this part less than before."""
GOING_MIN: Final = 0.01
"""A job that waits for nearly all of its time counts as if it went on for this part of it."""
ROOM: Final = 1.15
"""A job that has all of its data in memory keeps so many times what it uses."""
REST_S: Final = 120.0
"""Seconds until it is tried again, once nothing has helped: programs change."""
TRANSITIONS: Final[dict[tuple[str, str], str]] = {
    ("measuring", "move"): "moving",
    ("measuring", "content"): "resting",
    ("moving", "moved"): "judging",
    ("moving", "undone"): "measuring",
    ("moving", "late"): "moving",
    ("judging", "move"): "moving",
    ("judging", "content"): "resting",
    ("judging", "undo"): "moving",
    ("resting", "due"): "measuring",
}
"""State and event -> the state that follows. A job that comes or goes begins with measuring."""


class Moved(NamedTuple):
    """Memory that goes from one job's process to another's."""

    giver: int
    taker: int
    nbytes: int


@dataclass(slots=True)
class _Member:
    """A process of a job."""

    job: str
    asked_bytes: int
    target_bytes: int
    told_bytes: int
    """Its limit, as it was told last."""
    held_bytes: int
    """The most that it may use at present."""
    told: MemoryAsk = field(default_factory=MemoryAsk)
    seen_s: float = 0.0
    mark: tuple[float, float] | None = None
    """The first report of the period: when, and the seconds that it had waited by then."""

    @property
    def least_bytes(self) -> int:
        return int(LEAST_PART * self.asked_bytes)

    @property
    def measured_s(self) -> float:
        return self.seen_s - self.mark[0] if self.mark is not None else 0.0

    @property
    def stalled(self) -> float:
        """Return the seconds that it waited for its data, for each second in which it did not. They
        fall in proportion to the memory that it is given; a part of its time would not."""
        if self.mark is None or self.measured_s <= 0.0:
            return 0.0
        part = (self.told.stalled_s - self.mark[1]) / self.measured_s
        return max(0.0, part) / max(1.0 - part, GOING_MIN)

    @property
    def spare_bytes(self) -> int:
        """Return what it does not need: all of its data are in memory."""
        if self.told.aside_bytes:
            return 0
        return max(0, self.target_bytes - max(self.least_bytes, int(ROOM * self.told.used_bytes)))


class MemoryShares:
    """`moving`: False: every process keeps what its job asked for. `lane`: its connection."""

    def __init__(self, moving: bool = True) -> None:
        self._moving = moving
        self._members: dict[int, _Member] = {}
        self.state = "measuring"
        self._since_s = 0.0
        self._part = FIRST_PART
        self._before: float | None = None
        """How much all waited before the last move."""
        self.last: Moved | None = None
        """The last move, which may be undone."""
        self._failed: set[tuple[int, int]] = set()
        """Moves, by giver and taker, that did not help."""
        self.moves = 0

    def knows(self, lane: int) -> bool:
        return lane in self._members

    @property
    def all_bytes(self) -> int:
        return sum(each.asked_bytes for each in self._members.values())

    def joined(self, lane: int, job: str, asked_bytes: int, now_s: float) -> None:
        """A process has come, with what its job asked for."""
        self._members[lane] = _Member(job, asked_bytes, asked_bytes, asked_bytes, asked_bytes)
        self._begin_anew(now_s)

    def left(self, lane: int, now_s: float) -> None:
        """A process has gone, and what its job asked for with it: those that have more than they
        asked for give back what is too much now, or those that have less get back what is left."""
        if self._members.pop(lane, None) is None:
            return
        members = self._members.values()
        over_bytes = sum(each.target_bytes for each in members) - self.all_bytes
        for each in members:
            differs_bytes = each.target_bytes - each.asked_bytes
            if differs_bytes > 0 < over_bytes or differs_bytes < 0 > over_bytes:
                back_bytes = min(abs(differs_bytes), abs(over_bytes))
                sign = 1 if over_bytes > 0 else -1
                each.target_bytes -= sign * back_bytes
                over_bytes -= sign * back_bytes
        self._begin_anew(now_s)

    def asked(self, lane: int, told: MemoryAsk, now_s: float) -> int:
        """Take what a process says, and return its limit, in bytes."""
        member = self._members[lane]
        member.told, member.seen_s = told, now_s
        if member.mark is None:
            member.mark = now_s, told.stalled_s
        self._look(now_s)
        # Until now it could use as much as it was told before; what it still uses counts, too.
        member.held_bytes = max(told.used_bytes, min(member.told_bytes, member.target_bytes))
        free_bytes = self.all_bytes - sum(each.held_bytes for each in self._members.values())
        grows_bytes = member.target_bytes - member.held_bytes
        if grows_bytes > 0:
            member.held_bytes += max(0, min(grows_bytes, free_bytes))
        member.told_bytes = min(member.held_bytes, member.target_bytes)
        return member.told_bytes

    def limits(self, job: str) -> tuple[int, float]:
        """Return the limits of the job's processes here, in bytes, and the seconds for which they
        have waited for their data."""
        members = [each for each in self._members.values() if each.job == job]
        return sum(m.told_bytes for m in members), sum(m.told.stalled_s for m in members)

    def job_of(self, lane: int) -> str:
        return self._members[lane].job

    # Hill climbing --------------------------------------------------------------------------------

    def _begin_anew(self, now_s: float) -> None:
        self._part, self._before, self.last = FIRST_PART, None, None
        self._failed.clear()
        self.state, self._since_s = "measuring", now_s
        self._measure()

    def _measure(self) -> None:
        for each in self._members.values():
            each.mark = None

    def _goes(self, event: str, now_s: float) -> None:
        self.state, self._since_s = TRANSITIONS[self.state, event], now_s
        self._measure()

    def _look(self, now_s: float) -> None:
        if not self._moving or len(self._members) < 2:
            return
        if self.state == "resting":
            if now_s - self._since_s >= REST_S:
                self._part = max(self._part, 4 * LAST_PART)
                self._goes("due", now_s)
        elif self.state == "moving":
            self._carry_out(now_s)
        elif all(each.measured_s >= PERIOD_S for each in self._members.values()):
            stalled = sum(each.stalled for each in self._members.values())
            if self.state == "judging" and not self._is_better(stalled):
                self._undo(now_s)
            else:
                self._before = stalled
                self._move(now_s)

    def _is_better(self, stalled: float) -> bool:
        assert self._before is not None
        return stalled <= self._before - max(GAIN_MIN, GAIN_PART * self._before)

    def _carry_out(self, now_s: float) -> None:
        """Wait until everybody has the memory that it is to have."""
        if all(each.told_bytes == each.target_bytes for each in self._members.values()):
            self._goes("moved" if self.last is not None else "undone", now_s)
        elif now_s - self._since_s >= MOVING_PERIODS * PERIOD_S and self.last is not None:
            self._take_back()
            self._goes("late", now_s)

    def _undo(self, now_s: float) -> None:
        self._take_back()
        self._goes("undo", now_s)

    def _take_back(self) -> None:
        assert self.last is not None
        giver, taker, nbytes = self.last
        self._members[giver].target_bytes += nbytes
        self._members[taker].target_bytes -= nbytes
        self._failed.add((giver, taker))
        self.last = None

    def _move(self, now_s: float) -> None:
        """Move memory to the job that waits most, from the one that needs it least."""
        while (move := self._best_move()) is None and self._part > LAST_PART:
            self._part /= 2
            self._failed.clear()
        if move is None:
            self._goes("content", now_s)
            return
        self.last = move
        self._members[move.giver].target_bytes -= move.nbytes
        self._members[move.taker].target_bytes += move.nbytes
        self.moves += 1
        self._goes("move", now_s)

    def _best_move(self) -> Moved | None:
        # One that waits less may yet gain more by each byte: it computes less on it.
        step_bytes, both_ways = int(self._part * self.all_bytes), self._part == FIRST_PART
        takers = [
            lane
            for lane, each in self._members.items()
            if each.told.aside_bytes and each.stalled > STALLED_MIN
        ]
        for taker in sorted(takers, key=lambda lane: -self._members[lane].stalled):
            wants = self._members[taker]
            wanted_bytes = int(ROOM * wants.told.aside_bytes)
            givers = [
                (each.spare_bytes == 0, each.stalled, lane)
                for lane, each in self._members.items()
                if lane != taker
                and (lane, taker) not in self._failed
                and (each.spare_bytes or each.stalled < wants.stalled - GAIN_MIN or both_ways)
            ]
            for _, _, lane in sorted(givers):
                gives = self._members[lane]
                most_bytes = gives.target_bytes - gives.least_bytes
                given = max(gives.spare_bytes, step_bytes)
                if (nbytes := min(given, most_bytes, wanted_bytes)) > 0:
                    return Moved(lane, taker, nbytes)
        return None
